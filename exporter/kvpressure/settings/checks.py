"""Contradictions: settings that are each fine alone and cannot be meant together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.settings_options import Option, SettingsError, registered_sources
from kvpressure.settings_read import Given
from kvpressure.thresholds import builtin

RESERVED_PATHS: Final = ("/", "/api/v1/diagnosis", "/-/healthy", "/-/ready")
_SOURCE_OF: Final = {
    "vllm.": "vllm",
    "nvidia.": "nvidia",
    "gpu.amd.": "amd",
    "recording.": "recording",
    "plugin.": "allocator",
}


def check_together(given: Mapping[str, Given], table: Mapping[str, Option]) -> None:
    """Raises ``SettingsError`` for the first contradiction."""
    checks = _Checks(given, table)
    checks.web()
    checks.sources()
    checks.intervals()
    checks.targets()


class _Checks:
    def __init__(self, given: Mapping[str, Given], table: Mapping[str, Option]) -> None:
        self._given = given
        self._table = table

    def web(self) -> None:
        path = self._given.get("web.telemetry-path")
        if path and path.value in RESERVED_PATHS:
            raise self._clash("web.telemetry-path", f"{path.value!r} is taken by the exporter", "any other path")
        addresses = self._given.get("web.listen-address")
        fixed = [item for item in addresses.value if item.port] if addresses else []
        if len(set(fixed)) < len(fixed):
            raise self._clash("web.listen-address", "the same address twice", "each once")

    def sources(self) -> None:
        """Settings of a source that is switched off, and nothing switched on at all."""
        sources = registered_sources()
        if not any(self._enabled(source) for source in sources):
            name = next(f"collector.{source}" for source in sources if f"collector.{source}" in self._given)
            raise self._clash(name, "every source is switched off", "at least one on")
        for name in self._given:
            source = next((source for prefix, source in _SOURCE_OF.items() if name.startswith(prefix)), None)
            if name.startswith("collector.") and name.count(".") == 2:
                source = name.split(".")[1]
            if source is not None and not self._enabled(source):
                raise self._clash(name, f"the source {source} is switched off", f"with --collector.{source}")
        if self._enabled("recording") and "recording.file" not in self._given:
            raise self._clash("collector.recording", "there is no recording to play", "with --recording.file")
        if self._enabled("allocator") and "plugin.directory" not in self._given:
            raise self._clash("collector.allocator", "there is nowhere to read from", "with --plugin.directory")

    def intervals(self) -> None:
        tick = self._seconds("interval")
        for source in registered_sources():
            name = f"collector.{source}.interval"
            if name in self._given and self._seconds(name) < tick:
                raise self._clash(
                    name, f"{self._seconds(name):g} s is shorter than a tick", f"{tick:g} s (interval) or more"
                )
        self._pages_stay_fresh(tick)

    def _pages_stay_fresh(self, tick: float) -> None:
        """Between two pages an engine would be ``unknown`` at every tick once the last one is stale."""
        name, stale = "collector.vllm.interval", builtin()["stale_page_seconds"]
        between, timeout = self._seconds(name), self._seconds("vllm.timeout")
        if name in self._given and between > tick and between + timeout > stale:
            raise self._clash(
                name,
                f"{between:g} s and a scrape of up to {timeout:g} s (vllm.timeout) are longer than a page is "
                f"believed: {stale:g} s",
                f"{stale - timeout:g} s or less, or a tick (interval) as long",
            )

    def targets(self) -> None:
        given = self._given.get("vllm.target")
        names = [target.name for target in given.value] if given else []
        if len(set(names)) < len(names):
            raise self._clash("vllm.target", "the same URL twice", "each once")
        timeout, deadline = self._seconds("vllm.timeout"), self._seconds("collector.vllm.deadline")
        if timeout > deadline:
            name = "vllm.timeout" if "vllm.timeout" in self._given else "collector.vllm.deadline"
            raise self._clash(
                name,
                f"one scrape may take {timeout:g} s (vllm.timeout) but all of them only "
                f"{deadline:g} s (collector.vllm.deadline)",
                "timeout no longer than deadline",
            )

    def _enabled(self, source: str) -> bool:
        name = f"collector.{source}"
        return bool(self._given[name].value) if name in self._given else self._table[name].default == "true"

    def _seconds(self, name: str) -> float:
        return float(self._given[name].value if name in self._given else self._table[name].default)

    def _clash(self, name: str, what: str, allowed: str) -> SettingsError:
        return SettingsError(f"{self._given[name].where}: {what}; allowed: {allowed}")
