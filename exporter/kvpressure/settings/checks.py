"""Contradictions: settings that are each fine alone and cannot be meant together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.errors import shown
from kvpressure.settings.load import GivenValue
from kvpressure.settings.options import Option, SettingsError
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.catalog import registry
from kvpressure.sources.scrape.scrape_interval import SLOWEST_INTERVAL

RESERVED_PATHS: Final = ("/", "/api/v1/diagnosis", "/-/healthy", "/-/ready")


def check_together(given: Mapping[str, GivenValue], table: Mapping[str, Option]) -> None:
    """Raises ``SettingsError`` for the first contradiction."""
    checks = _Checks(given, table)
    checks.web()
    checks.sources()
    checks.intervals()
    checks.targets()


def runs(source: str, given: Mapping[str, GivenValue]) -> bool:
    """Whether a source runs: as somebody switched it, else by its default."""
    spec, switch = registry()[source], given.get(f"collector.{source}")
    return bool(switch.value) if switch else spec.default and not any(runs(other, given) for other in spec.unless)


class _Checks:
    def __init__(self, given: Mapping[str, GivenValue], table: Mapping[str, Option]) -> None:
        self._given = given
        self._table = table

    def web(self) -> None:
        path = self._given.get("web.telemetry-path")
        if path and path.value in RESERVED_PATHS:
            raise self._clash("web.telemetry-path", f"{shown(path.value)} is taken by the exporter", "any other path")
        fixed: list[object] = []
        for name in ("web.listen-address", "web.health-listen-address"):
            addresses = self._given.get(name)
            fixed += [item for item in addresses.value if item.port] if addresses else []
            if len(set(fixed)) < len(fixed):
                raise self._clash(name, "the same address twice", "each once")

    def sources(self) -> None:
        """Settings of a source that is switched off, two sources for one thing, and nothing switched on at all."""
        sources = registry()
        for one, other in ((one, other) for one, spec in sources.items() for other in spec.unless):
            if self._enabled(one) and self._enabled(other):
                what = f"the source {other} is switched on, which finds engines too"
                raise self._clash(f"collector.{one}", what, "one of them")
        if not any(self._enabled(source) for source in sources):
            name = next(f"collector.{source}" for source in sources if f"collector.{source}" in self._given)
            raise self._clash(name, "every source is switched off", "at least one on")
        for name in self._given:
            source = next((source for source, spec in sources.items() if name.startswith(spec.settings or "--")), None)
            if name.startswith("collector.") and name.count(".") == 2:
                source = name.split(".")[1]
            if source is not None and not self._enabled(source):
                raise self._clash(name, f"the source {source} is switched off", f"with --collector.{source}")

    def intervals(self) -> None:
        tick = self._seconds("interval")
        for source in registry():
            name = f"collector.{source}.interval"
            if name in self._given and self._seconds(name) < tick:
                raise self._clash(
                    name, f"{self._seconds(name):g} s is shorter than a tick", f"{tick:g} s (interval) or more"
                )
        self._pages_stay_fresh(tick)

    def _pages_stay_fresh(self, tick: float) -> None:
        """Between two pages an engine would be ``unknown`` at every tick once the last one is stale."""
        name, given = "collector.engines.interval", self._given.get("thresholds")
        stale = (given.value if given else builtin())["stale_page_seconds"]
        if given and stale <= SLOWEST_INTERVAL:
            raise self._clash(
                "thresholds",
                f"stale_page_seconds {stale:g}: an engine that is slow to answer is read every {SLOWEST_INTERVAL:g} s",
                f"above {SLOWEST_INTERVAL:g}",
            )
        between, timeout = self._seconds(name), self._seconds("engine.timeout")
        if name in self._given and between > tick and between + timeout > stale:
            raise self._clash(
                name,
                f"{between:g} s and a scrape of up to {timeout:g} s (engine.timeout) are longer than a page is "
                f"believed: {stale:g} s",
                f"{stale - timeout:g} s or less, or a tick (interval) as long",
            )

    def targets(self) -> None:
        given = self._given.get("engine.target")
        names = [target.name for target in given.value] if given else []
        if len(set(names)) < len(names):
            raise self._clash("engine.target", "the same URL twice", "each once")
        timeout, deadline = self._seconds("engine.timeout"), self._seconds("collector.engines.deadline")
        if timeout > deadline:
            name = "engine.timeout" if "engine.timeout" in self._given else "collector.engines.deadline"
            raise self._clash(
                name,
                f"one scrape may take {timeout:g} s (engine.timeout) but all of them only "
                f"{deadline:g} s (collector.engines.deadline)",
                "timeout no longer than deadline",
            )

    def _enabled(self, source: str) -> bool:
        return runs(source, self._given)

    def _seconds(self, name: str) -> float:
        return float(self._given[name].value if name in self._given else self._table[name].default)

    def _clash(self, name: str, what: str, allowed: str) -> SettingsError:
        return SettingsError(f"{self._given[name].where}: {what}; allowed: {allowed}")
