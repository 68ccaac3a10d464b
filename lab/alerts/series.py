"""What Prometheus would have scraped from a replay: the published series on a grid of scrapes, as promtool writes them.

A series that is no longer published ends with a staleness marker, as it does when a real Prometheus scrapes. (Blocks
made from OpenMetrics have no such markers: there a vanished series lives on for five minutes and would feed the
alerts.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvpressure.model.state import State
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import Encoder

SCRAPE_SECONDS: Final = 15.0
ROOT: Final = Path(__file__).resolve().parents[2]
RULES: Final = ROOT / "alerts" / "kvpressure-rules.yaml"
METRIC: Final = re.compile(r"(?<![\w:])kvpressure_\w+")
SCRAPED_NODE: Final = "node-1"
Target = tuple[tuple[str, str], ...]
"""Labels that a scrape adds."""
_TARGET: Final[Target] = (("job", "kvpressure"), ("instance", f"{SCRAPED_NODE}:9400"), ("node", SCRAPED_NODE))
_GONE: Final = "stale"


_rule_files: list[Path] = [RULES]


def also_wanted(rules: Path) -> None:
    """Sample what the rules of this file read too."""
    _rule_files.append(rules)
    wanted_metrics.cache_clear()


@lru_cache(maxsize=1)
def wanted_metrics() -> frozenset[str]:
    """Names of the exporter's metrics that some rule reads, for its value or its text."""
    return frozenset(name for path in _rule_files for name in METRIC.findall(path.read_text(encoding="utf-8")))


class Series:
    """Scrapes of one exporter, ``SCRAPE_SECONDS`` apart unless said otherwise. Held are changes only."""

    def __init__(self) -> None:
        self.scrapes = 0
        self._changes: dict[str, list[tuple[int, str]]] = {}  # series -> (number of the scrape, value from then on)
        self._present: set[str] = set()

    def add(self, state: State | None) -> None:
        """One scrape; ``None`` = the exporter did not answer."""
        now = {labelled("up"): "1" if state is not None else "0"}
        if state is not None:
            now.update(samples(state))
        self.add_samples(now)

    def add_samples(self, now: Mapping[str, str]) -> None:
        """One scrape that returned these series (with labels, as they are stored) and values."""
        gone = dict.fromkeys(self._present - now.keys(), _GONE)
        for name, value in {**now, **gone}.items():
            changes = self._changes.setdefault(name, [])
            if not changes or changes[-1][1] != value:
                changes.append((self.scrapes, value))
        self._present = set(now)
        self.scrapes += 1

    def between(self, first: int, end: int) -> Iterator[tuple[str, str]]:
        """Every series of the scrapes ``first`` (included) to ``end`` (excluded), with its values for promtool."""
        for name, changes in self._changes.items():
            parts: list[str] = []
            ends = [*(number for number, _ in changes[1:]), self.scrapes]
            at = first
            for (begin, value), until in zip(changes, ends, strict=True):
                length = min(until, end) - max(begin, at)
                if length <= 0:
                    continue
                if begin > at:
                    parts.append(f"_x{begin - at}")
                parts.append(_run(value, length, marked=begin >= first))
                at = max(begin, at) + length
            if parts:
                yield name, " ".join(parts)

    def forget(self, before: int) -> None:
        """Drop what is only needed for scrapes before number ``before``."""
        for name, changes in list(self._changes.items()):
            kept = max((place for place, (number, _) in enumerate(changes) if number <= before), default=0)
            del changes[:kept]
            if len(changes) == 1 and changes[0][1] == _GONE and changes[0][0] < before:
                del self._changes[name]


def _run(value: str, length: int, *, marked: bool) -> str:
    """``length`` equal samples. A vanished series has one marker, at the scrape that missed it, then nothing."""
    if value != _GONE:
        return f"{value}+0x{length - 1}" if length > 1 else value
    parts = [_GONE] if marked else []
    if length > len(parts):
        parts.append(f"_x{length - len(parts)}")
    return " ".join(parts)


def samples(state: State, target: Target = _TARGET) -> Iterator[tuple[str, str]]:
    """``(series, value)`` of every wanted sample of a state, scraped from ``target``."""
    wanted = [family for family in families(state).collect() if any(s.name in wanted_metrics() for s in family.samples)]
    for line in Encoder().encode(wanted, openmetrics=False).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield labelled(name, target), value


@lru_cache(maxsize=65536)
def labelled(name: str, target: Target = _TARGET) -> str:
    """A series as it is stored after the scrape, its own labels kept (``honor_labels``), empty ones too."""
    metric, _, own = name.removesuffix("}").partition("{")
    added = (f'{label}="{value}"' for label, value in target if f',{label}="' not in f",{own}")
    return f"{metric}{{{','.join(filter(None, (own, *added)))}}}"
