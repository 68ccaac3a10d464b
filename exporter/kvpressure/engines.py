"""Which engine a page is about: the engines that are known, by the pages that named them.

Two servers may call themselves alike, and one address may be answered by several servers in turn. Neither may become one
engine with the figures of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from kvpressure.readings import PROCESS_START, EngineKey, EnginePage
from kvpressure.sources.vllm.reasons import SAME_SERVER, SEVERAL_SERVERS
from kvpressure.state import TargetState
from kvpressure.thresholds import Thresholds
from kvpressure.tracks import EngineTrack

FORGET_SECONDS: Final = 300.0
ABSENT: Final = "absent"  # why an engine is down whose page has only others
MAX_GONE_ENGINES: Final = 64  # of all targets, kept until they are forgotten although their pages have others now


@dataclass(slots=True)
class _Target:
    """What is kept of one target from page to page."""

    state: TargetState
    errors: dict[str, int] = field(default_factory=dict)
    started: float = float("-inf")  # the latest start of a process that its pages told
    older_t: float = float("-inf")  # when a page last told of an earlier one


class Engines:
    """All engines, each with its track, and the targets that their pages come from."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._tracks: dict[EngineKey, EngineTrack] = {}
        self._targets: dict[str, _Target] = {}
        self._known: Collection[str] | None = None

    def __iter__(self) -> Iterator[EngineTrack]:
        return iter(self._tracks.values())

    @property
    def targets(self) -> tuple[TargetState, ...]:
        """Scrape health of every target."""
        return tuple(target.state for target in self._targets.values())

    def expect(self, targets: Collection[str] | None) -> None:
        """These targets are read; ``None`` = not known."""
        self._known = None if targets is None else frozenset(targets)

    def take(self, now: float, page: EnginePage, model_from_args: Callable[[EnginePage], str]) -> None:
        """Give each engine of the page its reading; one that has none this time fails."""
        page = self._of_one_server(now, page)
        known = [track for track in self if track.target == page.target
                 and (track.key.namespace, track.key.pod) == (page.namespace, page.pod)]
        if page.error == SAME_SERVER:
            for track in known:
                del self._tracks[track.key]
            return
        if page.error is not None or not page.engines:
            if not known:
                known = [self._new(now, page, (model_from_args(page), "0"))]
            for track in known:
                track.tracker.fail(page.error or ABSENT)
                track.seen_t = now
            return
        names = {(reading.model_name, reading.engine) for reading in page.engines}
        self._lose([track for track in known if track.named not in names])
        of_page = {track.named: track for track in known}
        for reading in page.engines:
            name = (reading.model_name, reading.engine)
            track = of_page.get(name) or self._new(now, page, name)
            track.target, track.container, track.gpus = page.target, page.container, page.gpus
            track.seen_t = now
            if track.tracker.observe(page, reading):
                last = track.tracker.window.last
                track.counters = {**last.counters, **last.page} if last else {}

    def forget(self, now: float) -> None:
        """Drop what is gone: engines whose target was removed at once, all others after a while (or when the clock stepped
        back and they were seen in what is now the future).
        """
        for key in [key for key, track in self._tracks.items()
                    if abs(now - track.seen_t) > FORGET_SECONDS or not self._is_read(track.target)]:
            del self._tracks[key]
        alive = {track.target for track in self} | set(self._known or ())
        for name in [name for name in self._targets if name not in alive]:
            del self._targets[name]

    def _of_one_server(self, now: float, page: EnginePage) -> EnginePage:
        """The page, counted; failed when its address stands for several servers, or for one that is read already."""
        known = self._targets.get(page.target)
        target = known or _Target(TargetState(page.target, True, None, 0))
        self._targets[page.target] = target
        error = page.error or self._doubt(now, page, target)
        if error is not None:
            target.errors[error] = target.errors.get(error, 0) + 1
        target.state = TargetState(page.target, error is None, page.duration_seconds, page.bad_lines, dict(target.errors), page.cut)
        return page if error == page.error else replace(page, engines=(), error=error)

    def _doubt(self, now: float, page: EnginePage, target: _Target) -> str | None:
        """A process that starts anew starts later. One that started earlier than the last one seen is another process
        behind the same address; their counters in turn look like resets.
        """
        start = page.page.get(PROCESS_START)
        if start is None:
            return None
        if start < target.started:
            target.older_t = now
        target.started = max(target.started, start)
        if 0 <= now - target.older_t <= FORGET_SECONDS:
            return SEVERAL_SERVERS
        for reading in page.engines:
            other = self._tracks.get(EngineKey(page.namespace, page.pod, reading.model_name, reading.engine))
            if other is not None and self._is_other(now, other, page) and _start_of(other) == start:
                return SAME_SERVER
        return None

    def _new(self, now: float, page: EnginePage, named: tuple[str, str]) -> EngineTrack:
        """The track of an engine that this page is the first to name. It takes over that of the same name whose target is
        no longer read; while that one is, it carries its container or port in the label ``engine``.
        """
        model, engine = named
        key = EngineKey(page.namespace, page.pod, model, engine)
        other = self._tracks.get(key)
        if other is not None and self._is_other(now, other, page):
            apart = page.container if page.container != other.container else ""
            key = replace(key, engine=f"{engine}/{apart or urlsplit(page.target).port or page.target}")
        if key not in self._tracks:
            self._tracks[key] = EngineTrack(key, page, self._thresholds, named)
        return self._tracks[key]

    def _is_other(self, now: float, track: EngineTrack, page: EnginePage) -> bool:
        """Whether another target of the same pod is read beside this one, and that is its engine."""
        if track.target == page.target or not self._is_read(track.target):
            return False
        return self._known is not None or 0 <= now - track.seen_t <= self._thresholds["stale_page_seconds"]

    def _is_read(self, target: str) -> bool:
        return self._known is None or target in self._known

    def _lose(self, tracks: list[EngineTrack]) -> None:
        """The page has these engines no more. A page that renames its engines every second is no reason to keep them all."""
        for track in tracks:
            if track.tracker.window.last is None:
                del self._tracks[track.key]  # was only a name from the arguments until the page told the right one
        gone = sorted((track for track in tracks if track.key in self._tracks), key=lambda track: track.seen_t)
        for track in gone:
            track.tracker.fail(ABSENT)
        for track in gone[:-max(1, MAX_GONE_ENGINES // len(self._targets))]:
            del self._tracks[track.key]


def _start_of(track: EngineTrack) -> float | None:
    """When the process of a page that came started; ``None`` while none comes."""
    page = track.tracker.page
    return page.page.get(PROCESS_START) if page is not None and track.tracker.failing == 0 else None
