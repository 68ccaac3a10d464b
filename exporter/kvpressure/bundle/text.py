"""How numbers, durations and YAML are written, so that the same input always gives the same bytes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

import yaml

from kvpressure.settings.thresholds import Threshold

_SPANS: Final = ((86400, "d", "day"), (3600, "h", "hour"), (60, "m", "minute"), (1, "s", "second"))


def number(value: float) -> str:
    """Shortest decimal of ``value``: no exponent, no float noise."""
    return format(Decimal(repr(float(value))).normalize(), "f")


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
    return f"{number(seconds)} seconds"


def words(entry: Threshold) -> str:
    """A threshold as a person reads it: ``80 %``, ``2 GB``, ``5 minutes``, ``2 requests``."""
    value = Decimal(repr(entry.value))
    if entry.unit in ("ratio", "multiple", "score"):
        return f"{number(float(value * 100))} %" if value <= 1 else f"{entry.text} times"
    if entry.unit == "bytes":
        return f"{number(float(value / 10**9))} GB"
    if entry.unit == "seconds":
        return span(entry.value)
    if entry.unit == "count":
        return entry.text
    return f"{entry.text} {entry.unit.replace('_', ' ')}"


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Any, header: str = "") -> str:
    """``document`` as YAML in the order it was built, with ``header`` lines as comments on top."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=4096)
    return comment + body
