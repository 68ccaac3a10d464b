"""The source that scrapes this node's engines, all concurrently."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic, thread_time, time
from typing import Any, Final

from kvpressure.model.readings import PageText, Scrape
from kvpressure.model.reasons import INTERNAL, NEVER_ANSWERED, TARGET_LIMIT
from kvpressure.sources.base import Reading, SourceError, SourceSettings, isolated
from kvpressure.sources.kvevents.following import EventFollower
from kvpressure.sources.places import Place, Precedence, admitted
from kvpressure.sources.plugin_metrics import FRESH_SECONDS, PluginMetrics, read_plugin_metrics
from kvpressure.sources.scrape.fetch import Fetcher
from kvpressure.sources.scrape.layout import Reservation, ScrapeLimits
from kvpressure.sources.scrape.new_engines import NewEngines
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.sources.scrape.scrape_interval import ScrapeInterval
from kvpressure.sources.scrape.targets import Target

CUT_PLUGIN: Final = "plugin"  # too many lines of the plugin
CUT_NEW_ENGINES: Final = "new_engines"  # too many new engine names
PLUGIN_LINES: Final = 4096  # an engine has two for each size of a batch that it has seen
"""Lines of the plugin on one scrape. Beyond: they are left out. Shown as: `page_cut{reason="plugin"}`."""
WAIT_SHARE: Final = 0.8  # of the interval: how long a read waits for scrapes

log = logging.getLogger(__name__)


class _Feed:
    """One target and its state between scrapes."""

    def __init__(
        self, target: Target, timeout_seconds: float, pace: ScrapeInterval | None, bounds: ScrapeLimits
    ) -> None:
        self.target = target
        self.pace = pace
        self.fetcher = Fetcher(target, timeout_seconds, bounds.give_way)
        self._bounds = bounds
        self._scanner = Scanner(bounds)
        self._new_engines = NewEngines()
        self.scan_seconds = 0.0  # of our own CPU for its last page
        self.inside: PluginMetrics | None = None  # the plugin's reports, if any
        self.in_flight = False
        self.late = False  # its last scrape took longer than a read waits
        self.silent = ""  # why it has never answered
        self.answered = False

    def take_scanner(self, other: _Feed) -> None:
        """Take the scanner of one that is closed next. It keeps no values, but knows the lines: the first page of the
        next server at an address is mostly theirs, and costs 5 ms of CPU without them, 0.2 ms with them.
        """
        self._scanner, other._scanner = other._scanner, self._scanner

    def page(self, keep_text: bool, errors: Counter[str]) -> Scrape:
        """Scrape now; failures are in the result, those of the plugin's part in ``errors``."""
        with self._bounds.memory.lease() as lease:
            started, fetching = monotonic(), thread_time()
            text, error = self._fetched(lease)
            duration, fetching = monotonic() - started, thread_time() - fetching
            with self._bounds.scanning if lease.taken else nullcontext(), self._bounds.scans:
                self._bounds.give_way()
                before = thread_time()
                page = self._page(text, error, duration, keep_text, errors)
                self.scan_seconds = thread_time() - before + (fetching if error is not None else 0.0)
                return page

    def failed(self) -> Scrape:
        """The scrape after an internal error."""
        return _scrape(self.target, None, INTERNAL)

    def take_precedence(self, precedence: Precedence) -> None:
        """Share limits according to the target's claim."""
        self._bounds.engines.join(self._scanner, precedence)

    def close(self) -> None:
        """Close the connection and release shared limits."""
        self.fetcher.close()
        self._scanner.close()

    def _fetched(self, lease: Reservation) -> tuple[PageText | None, str | None]:
        try:
            return self.fetcher.fetch(lease), None
        except SourceError as failure:
            return None, failure.reason

    def _page(
        self, text: PageText | None, error: str | None, duration: float | None, keep_text: bool, errors: Counter[str]
    ) -> Scrape:
        target = self.target
        lines = 0 if text is None else text.count(b"\nkvpressure:")
        crowded = lines > PLUGIN_LINES
        self.inside = None
        if text and lines and not crowded:
            with isolated(f"plugin of target {target.name}", errors):
                self.inside = read_plugin_metrics(text, target.namespace, target.pod, time())
        page = _scrape(target, text, error, duration_seconds=duration, scanner=self._scanner, keep_text=keep_text)
        bad_lines = page.bad_lines + (self.inside.bad_lines if self.inside else 0)
        engines, refused = self._new_engines.admit(page.engines, monotonic())
        cut = {CUT_PLUGIN: int(crowded), CUT_NEW_ENGINES: refused}
        cut = {**page.cut, **{reason: count for reason, count in cut.items() if count}}
        return replace(page, bad_lines=bad_lines, engines=engines, cut=cut)


def _scrape(target: Target, text: PageText | None, error: str | None, **more: Any) -> Scrape:
    """What the target answered, under its identity."""
    page = parse_scrape(
        text,
        target=target.name,
        time=time(),
        namespace=target.namespace,
        pod=target.pod,
        container=target.container,
        gpus=target.gpus,
        args=target.args,
        env=target.env,
        version=target.version,
        dialect=target.dialect,
        error=error,
        **more,
    )
    return replace(page, group=target.group, pool=target.pool, args_source=target.args_source, assumed=target.assumed)


class _FetchThreads:
    """At most ``size`` daemon threads, started on demand. Daemons, so that a hanging name lookup does not delay the
    end of the process.
    """

    def __init__(self, size: int, work: Callable[[_Feed], None]) -> None:
        self._size = size
        self._work = work
        self._jobs: SimpleQueue[_Feed | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._jobs_open = 0
        self._short = False  # of threads; said once

    def submit(self, feed: _Feed) -> None:
        with self._lock:
            self._jobs_open += 1
        self._jobs.put(feed)

    def grow(self) -> None:
        """Start a thread for every job without one. If none can be started (memory or process limit), existing ones
        take the jobs, and the next call tries again.
        """
        with self._lock:
            wanted = min(self._jobs_open, self._size) - self._threads
            for _ in range(wanted):
                try:
                    threading.Thread(target=self._run, name="vllm-fetch", daemon=True).start()
                except (RuntimeError, MemoryError) as error:
                    if not self._short:
                        log.warning("no thread for a scrape, which waits for another one: %s", error)
                    self._short = True
                    return
                self._threads += 1
                self._short = False

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (feed := self._jobs.get()) is not None:
            try:
                self._work(feed)
            except Exception:  # not even a failure could be told; the thread is counted on
                log.error("a scrape failed, and so did saying why")
            with self._lock:
                self._jobs_open -= 1


def _same_server(one: Target, other: Target) -> bool:
    """Whether two targets with one address are the same pod's, as far as known, and trusted alike."""
    alike = not (one.uid and other.uid) or one.uid == other.uid
    return alike and (one.verify, one.ca) == (other.verify, other.ca)


class EngineSource:
    """All targets of this node. ``read`` returns the scrapes finished since the last one.

    A slow target is waited for once; afterwards its scrapes are taken when they finish, and no second one is started
    meanwhile. ``set_targets`` is thread-safe.
    """

    name = "engines"

    def __init__(self, settings: SourceSettings) -> None:
        self._timeout = settings.engine_timeout_seconds
        self._max_targets = settings.engine_max_targets
        self._adaptive = settings.engine_pace == "adaptive"
        self._interval = settings.collectors[self.name].interval_seconds
        self._wait = min(WAIT_SHARE * self._interval, self._timeout)
        self.keep_exposition = settings.keep_exposition
        self._results: SimpleQueue[tuple[_Feed, Scrape | None, Counter[str]]] = SimpleQueue()  # None: internal error
        self._errors: Counter[str] = Counter()  # since the last read
        self._pool = _FetchThreads(self._max_targets, self._work)
        self._bounds = ScrapeLimits(settings.shared.give_way)
        self._events = EventFollower()
        self._lock = threading.Lock()
        self._feeds: dict[str, _Feed] = {}
        self._left_out: list[Target] = []  # the best claim first
        self._closed = False
        self._given = settings.engine_targets
        self._shared = settings.shared
        self._discovered: tuple[Target, ...] = ()
        self._owning = self._shared.owning
        self.set_targets(self._given)

    def set_targets(self, targets: Iterable[Target]) -> None:
        """Scrape these from now on, the first of each name. Known ones of the same pod keep their connection and
        state. Beyond the limit those with the weakest claims are not scraped: the user's own come first, then those
        of pods with a GPU.
        """
        named, precedences = {target.name for target in self._given}, self._shared.precedences()

        def place(target: Target) -> Place:
            return ("", "") if target.name in named else (target.namespace, target.pod)

        def precedence(target: Target) -> Precedence:
            return Precedence.NAMED if target.name in named else precedences.get(place(target), Precedence.NOT_KNOWN)

        with self._lock:
            wanted: dict[str, Target] = {}
            for target in () if self._closed else targets:
                wanted.setdefault(target.name, target)
            allowed, left_out = admitted(wanted.values(), self._max_targets, precedence, place)
            feeds: dict[str, _Feed] = {}
            for target in allowed:
                with isolated(f"target {target.name}", self._errors):
                    feeds[target.name] = self._feed(target.name, target)
                    feeds[target.name].take_precedence(precedence(target))
            gone = [feed for name, feed in self._feeds.items() if name not in feeds or feeds[name] is not feed]
            self._feeds, self._left_out = feeds, left_out
        for feed in gone:
            with isolated(f"target {feed.target.name}", self._errors):
                feed.close()

    def _feed(self, name: str, target: Target) -> _Feed:
        known = self._feeds.get(name)
        if known is not None and _same_server(known.target, target):
            known.target = target
            return known
        pace = ScrapeInterval(self._interval) if self._adaptive else None
        feed = _Feed(target, self._timeout, pace, self._bounds)
        if known is not None and not known.in_flight:
            feed.take_scanner(known)
        return feed

    def read(self) -> Reading:
        """Start the scrapes that are due, and return those that finish soon enough."""
        self._follow_discovery()
        feeds = self._feeds
        for feed in feeds.values():
            if self._is_due(feed):
                feed.in_flight = True
                if feed.pace is not None:
                    feed.pace.started(monotonic())
                self._pool.submit(feed)
        self._pool.grow()
        awaited = {feed for feed in feeds.values() if feed.in_flight and not feed.late}
        collected = [(feed, page) for feed, page in self._collect(awaited) if feeds.get(feed.target.name) is feed]
        pages = [page for _, page in collected]
        self._events.keep(feeds)
        for feed, page in collected:
            with isolated(f"KV events of target {feed.target.name}", self._errors):
                self._events.follow(feed.target, page)
        errors, self._errors = self._errors, Counter()
        errors.update(page.error for page in pages if page.error is not None)
        left_out = self._left_out
        silent = {name: feed.silent for name, feed in feeds.items() if feed.target.assumed and feed.silent}
        self._shared.unread = {target.name: (TARGET_LIMIT, "") for target in left_out} | {
            name: (NEVER_ANSWERED, error) for name, error in silent.items()
        }
        if left_out:
            errors[TARGET_LIMIT] = len(left_out)
        listed = left_out[: self._max_targets]  # the others are counted only
        pages += [_scrape(target, None, TARGET_LIMIT) for target in listed]
        now = time()
        inside = [i for feed in feeds.values() if (i := feed.inside) is not None and now - i.time <= FRESH_SECONDS]
        return Reading(
            pages=tuple(sorted(pages, key=lambda page: page.target)),
            targets=(*feeds, *(target.name for target in listed)),
            allocator=tuple(reading for i in inside for reading in i.allocator),
            steps=tuple(stats for i in inside for stats in i.steps),
            caches=self._events.readings(),
            errors=dict(errors),
        )

    def _follow_discovery(self) -> None:
        """Scrape configured targets and those of pods. For a target that is both, discovery's entry is used, which
        knows more.
        """
        owning = self._shared.owning
        if (self._shared.targets, owning) != (self._discovered, self._owning):
            self._discovered, self._owning = self._shared.targets, owning
            known: dict[str, Target] = {}
            for target in self._discovered:
                known.setdefault(target.name, target)
            self.set_targets((*(known.get(target.name, target) for target in self._given), *self._discovered))

    def _is_due(self, feed: _Feed) -> bool:
        """Whether to scrape the target now: not while its last scrape runs, and at its interval."""
        return not feed.in_flight and (feed.pace is None or feed.pace.due(monotonic()))

    def _collect(self, awaited: set[_Feed]) -> list[tuple[_Feed, Scrape]]:
        """All finished scrapes, after waiting a while for those of ``awaited``."""
        until = monotonic() + self._wait
        results: list[tuple[_Feed, Scrape]] = []
        while True:
            try:
                left = until - monotonic()
                feed, page, errors = self._results.get(block=bool(awaited) and left > 0, timeout=max(left, 0))
            except Empty:
                break
            feed.in_flight = False
            self._errors.update(errors)
            page = page or feed.failed()
            feed.answered = feed.answered or page.error is None
            feed.silent = "" if feed.answered else page.error or ""
            if feed.pace is not None:
                with isolated(f"target {feed.target.name}", self._errors):
                    feed.pace.observe(page, monotonic(), feed.scan_seconds)
            feed.late = page.duration_seconds is not None and page.duration_seconds > self._wait
            awaited.discard(feed)
            results.append((feed, page))
        for feed in awaited:
            feed.late = True
        return results

    def _work(self, feed: _Feed) -> None:
        """Run by a pool thread. There is always a result, because a target without one would never be asked again."""
        page: Scrape | None = None
        errors: Counter[str] = Counter()
        try:
            with isolated(f"target {feed.target.name}", {}):  # counted with its scrape, which has failed
                page = feed.page(self.keep_exposition, errors)
        finally:
            self._results.put((feed, page, errors))

    def close(self) -> None:
        """Close all connections; threads end when their fetch does."""
        self._closed = True  # a read may be under way, and discovery go on
        self.set_targets(())
        self._events.keep(())
        self._pool.close()
