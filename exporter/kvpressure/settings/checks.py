"""Contradictions: settings that are each fine alone and cannot be meant together."""

from __future__ import annotations

from collections.abc import Mapping

from kvpressure.errors import InputError
from kvpressure.settings.load import GivenValue
from kvpressure.sources.catalog import registry
from kvpressure.sources.scrape.scrape_interval import SLOWEST_INTERVAL


def check_together(given: Mapping[str, GivenValue]) -> None:
    """Raises ``InputError`` for the first contradiction."""
    for check in (_sources, _thresholds, _targets):
        check(given)


def runs(source: str, given: Mapping[str, GivenValue]) -> bool:
    """Whether a source runs: as somebody switched it, else by its default."""
    spec, switch = registry()[source], given.get(f"collector.{source}")
    return bool(switch.value) if switch else spec.default and not any(runs(other, given) for other in spec.unless)


def _sources(given: Mapping[str, GivenValue]) -> None:
    """Settings of a source that is switched off, two sources for one thing, and nothing switched on at all."""
    sources = registry()
    for one, other in ((one, other) for one, spec in sources.items() for other in spec.unless):
        if runs(one, given) and runs(other, given):
            what = f"the source {other} is switched on, which finds engines too"
            raise _clash(given[f"collector.{one}"], what, "one of them")
    if not any(runs(source, given) for source in sources):
        switch = next(given[f"collector.{source}"] for source in sources if f"collector.{source}" in given)
        raise _clash(switch, "every source is switched off", "at least one on")
    for name, value in given.items():
        source = next((source for source, spec in sources.items() if name.startswith(spec.settings or "--")), None)
        if source is not None and not runs(source, given):
            raise _clash(value, f"the source {source} is switched off", f"with --collector.{source}")


def _thresholds(given: Mapping[str, GivenValue]) -> None:
    """Between two pages an engine would be ``unknown`` at every tick once the last one is stale."""
    file = given.get("thresholds")
    stale = file.value["stale_page_seconds"] if file else SLOWEST_INTERVAL + 1
    if file and stale <= SLOWEST_INTERVAL:
        what = f"stale_page_seconds {stale:g}: an engine that is slow to answer is read every {SLOWEST_INTERVAL:g} s"
        raise _clash(file, what, f"above {SLOWEST_INTERVAL:g}")


def _targets(given: Mapping[str, GivenValue]) -> None:
    targets, timeout = given.get("engine.target"), given.get("engine.timeout")
    names = [target.name for target in targets.value] if targets else []
    if targets and len(set(names)) < len(names):
        raise _clash(targets, "the same URL twice", "each once")
    deadline = registry()["engines"].deadline_seconds
    if timeout and timeout.value > deadline:
        raise _clash(timeout, f"one scrape may take {timeout.value:g} s but all of them only {deadline:g} s", "no more")


def _clash(given: GivenValue, what: str, allowed: str) -> InputError:
    return InputError(f"{given.where}: {what}; allowed: {allowed}")
