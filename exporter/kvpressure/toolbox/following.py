"""Follows live servers and exporters from one look to the next, and knows when an answer is certain."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from kvpressure.advice.wording import clock_text, name_of, scrape_error, words
from kvpressure.diagnosis.logic import GRADE_CONFIDENCE, Grade
from kvpressure.errors import InputError
from kvpressure.model.readings import EngineKey, Snapshot
from kvpressure.model.reasons import TIMEOUT
from kvpressure.model.state import EngineState
from kvpressure.printable import command
from kvpressure.settings.thresholds import Thresholds
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import fetch
from kvpressure.toolbox import live_pages as live
from kvpressure.toolbox.exporter_document import engine_views
from kvpressure.toolbox.fetch import NoExporterError
from kvpressure.toolbox.history import Case, FoundEngines, JudgedPeriod
from kvpressure.toolbox.live_pages import Around, GivenGpu
from kvpressure.toolbox.terminal import waiting

INTERVAL_SECONDS: Final = 1.0
_BY_LIMIT: Final = ("kv_pressure", "concurrency_limited")  # cured by another limit


def servers(
    targets: Sequence[Target], gpu: GivenGpu | None, thresholds: Thresholds, again: str
) -> Iterator[FoundEngines]:
    """The engines of live endpoints, once a second without end. ``again``: the input as typed."""
    around = Around(versions=live.versions(targets), gpu=gpu)
    yield from engines_of(live.watch(targets, inf, INTERVAL_SECONDS, around), thresholds, again)


def engines_of(snapshots: Iterable[Snapshot], thresholds: Thresholds, again: str) -> Iterator[FoundEngines]:
    """The engines after each of ``snapshots``."""
    period = JudgedPeriod(thresholds)
    for snapshot in snapshots:
        period.observe(snapshot)
        yield FoundEngines(tuple(period.now()), again, {})


def exporter(address: str) -> FoundEngines:
    """The engines of a running exporter now. Raises ``NoExporterError``."""
    views = engine_views(fetch.exporter_document(address))
    return FoundEngines(tuple(map(Case, views)), command("--exporter", address), {})


def exporters(addresses: Sequence[str]) -> Iterator[list[FoundEngines]]:
    """The engines of each exporter, once a second without end. One that does not answer is a warning with the time
    since then; raises ``NoExporterError`` when none answers the first time.
    """
    silent: dict[str, tuple[float, NoExporterError]] = {}
    found: dict[str, FoundEngines] = {}
    first = True

    def look(address: str) -> None:
        try:
            found[address] = exporter(address)
            silent.pop(address, None)
        except NoExporterError as error:
            since, _ = silent.setdefault(address, (live.CLOCK.now(), error))
            found[address] = FoundEngines((), "", {}, (f"exporter {error.problem}, since {clock_text(since)}",))

    while True:
        began = live.CLOCK.now()
        threads = [threading.Thread(target=look, args=(address,), daemon=True) for address in addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if first and len(silent) == len(addresses):
            raise silent[addresses[0]][1]
        first = False
        yield [found[address] for address in addresses]
        live.CLOCK.sleep(began + INTERVAL_SECONDS - live.CLOCK.now())


def answered(
    looks: Iterator[FoundEngines], seconds: float, thresholds: Thresholds, *, to_the_end: bool = False
) -> FoundEngines:
    """The first of ``looks`` with a certain answer for each engine; the last one after ``seconds`` (``to_the_end``: in
    any case), or when the user interrupts it. A terminal's standard error shows what it waits for.
    """
    start, certainty, said = live.CLOCK.now(), Certainty(thresholds), ""
    found = FoundEngines((), "", {})
    try:
        for found in looks:
            left = start + seconds - live.CLOCK.now()
            first, *others = certainty.awaited(found.cases) or [""]
            awaited = first + (f"; and {len(others)} more" if others else "")
            if left <= 0 or (found.cases and not awaited and not to_the_end):
                break
            if awaited not in ("", said):
                waiting(f"up to {left:.0f} s more: {awaited}")
            said = awaited
    except KeyboardInterrupt:
        if to_the_end or not found.cases:
            raise
        note = f"interrupted after {live.CLOCK.now() - start:.0f} of {seconds:.0f} s"
        return replace(found, warnings=(*found.warnings, note), interrupted=True)
    return found


def refuse_unscraped(found: FoundEngines, targets: Sequence[Target]) -> None:
    """Raise ``InputError`` when no engine ever answered."""
    engines = [case.view.engine for case in found.cases]
    if any(engine.up for engine in engines) or any(case.seconds.keys() - {"unknown"} for case in found.cases):
        return
    reasons = sorted({f"{engine.target}: {scrape_error(engine)}" for engine in engines})
    silent = [f"{target.name}: no answer in time" for target in targets]  # not one look saw it answer or fail
    raise InputError(f"could not scrape {'; '.join(reasons or silent)}")


class Certainty:
    """Knows which engines have an answer that more seconds would hardly change: one that is confident and lasts."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._lasting_seconds = thresholds["verdict_enter_seconds"]
        self._since: dict[EngineKey, tuple[str, float]] = {}  # the answer, and since when nothing could change it

    def awaited(self, cases: Sequence[Case]) -> list[str]:
        """What the engines without a certain answer wait for."""
        now, all_awaited = live.CLOCK.now(), []
        for engine in (case.view.engine for case in cases):
            answer = words(engine.diagnosis.verdict) if engine.up else f"down ({scrape_error(engine)})"
            awaited = _awaited(engine)
            before, since = self._since.get(engine.key, ("", now))
            since = now if awaited or before != answer else since
            self._since[engine.key] = ("" if awaited else answer, since)
            if awaited or now - since < self._lasting_seconds:
                all_awaited.append(f"{name_of(engine.key)}: {answer} so far, waiting {awaited or 'whether it lasts'}")
        return all_awaited


def _awaited(engine: EngineState) -> str:
    """What could change the answer about an engine soon, to go after "waiting"; "" = nothing."""
    found = engine.diagnosis
    if not engine.up:
        return "for an answer" if engine.error in (None, TIMEOUT) else ""  # a busy server is late, not dead
    if found.confidence < GRADE_CONFIDENCE[Grade.STRONG]:
        unsettled = (text for text in found.missing if text not in found.inputs)
        return f"to know {next(unsettled, 'more')}"
    if found.verdict == "healthy":  # nothing was found, but a longer look may find something
        return "for short peaks"
    if found.verdict in _BY_LIMIT and not any(limit.recommended for limit in engine.limits.values()):
        return "for the value to set"  # there is none while another limit may be reached first
    return ""
