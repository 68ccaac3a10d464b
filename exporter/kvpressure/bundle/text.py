"""Deterministic text of numbers, durations and YAML."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

import yaml

from kvpressure.model.arguments import GIB
from kvpressure.settings.thresholds import Threshold, plain

_SPANS: Final = ((86400, "d", "day"), (3600, "h", "hour"), (60, "m", "minute"), (1, "s", "second"))


def duration(seconds: float) -> str:
    """Seconds as a Prometheus duration in the largest unit that is exact: 300 -> ``5m``, 90 -> ``90s``."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for size, short, _ in _SPANS:
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{short}"
    return "0s"


def span(seconds: float) -> str:
    """Seconds in words: 300 -> ``5 minutes``."""
    for size, _, word in _SPANS:
        if seconds and seconds % size == 0:
            count = int(seconds) // size
            return f"{count} {word}" + ("" if count == 1 else "s")
    return f"{plain(seconds)} seconds"


def words(entry: Threshold) -> str:
    """A threshold for people: ``80 %``, ``2 GB``, ``5 minutes``, ``2 requests``."""
    value = Decimal(repr(entry.value))
    if entry.unit in ("ratio", "multiple", "score"):
        return f"{plain(float(value * 100))} %" if value <= 1 else f"{entry.text} times"
    if entry.unit == "bytes" and value % GIB == 0:
        return f"{plain(float(value / GIB))} GiB"
    if entry.unit == "bytes":
        return f"{plain(float(value / 10**9))} GB"
    if entry.unit == "seconds":
        return span(entry.value)
    return entry.text if entry.unit == "count" else f"{entry.text} {entry.unit.replace('_', ' ')}"


_WIDTH: Final = 4096  # lines are folded there
_BREAKS: Final = re.compile("[\x85\u2028\u2029]")  # line breaks to YAML alone


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper with block style for texts of several lines and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if _BREAKS.search(value) else "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Any, header: str = "") -> str:
    """``document`` as YAML in its own order; ``header`` lines become comments on top."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    return comment + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
