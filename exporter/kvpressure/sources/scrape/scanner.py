"""The scanner of one target's pages: text in, readings out; and short, stable names for replicas whose identifiers
change at every start.

A new name is a new series in every Prometheus, so a replica is named by its place among those of its model; a new one
takes the place of one that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, count
from operator import ne
from sys import getsizeof
from typing import Final

from kvpressure.engines import other_software, registry
from kvpressure.engines.base import SampleName
from kvpressure.model.ceilings import number_in
from kvpressure.model.readings import EngineReading, PageText, Scrape
from kvpressure.model.reasons import (
    BAD_TIMESTAMPS,
    EMPTY,
    HTML,
    INVALID_UTF8,
    JSON,
    NO_ENGINE_METRICS,
    SERIES_COLLIDE,
    TOO_LARGE,
)
from kvpressure.printable import visible
from kvpressure.sources.scrape.layout import (
    LAYOUT_BYTES,
    MAX_ENGINES,
    NO_SERIES,
    SMALL_PAGE_BYTES,
    BadLine,
    HistogramsRead,
    Layout,
    ScrapeLimits,
    Series,
    SeriesOwner,
    classify,
    labels_of,
    name_of,
    sample_of,
)


class Replicas:
    """Places of one target's replicas by server, model and identifier; as many as there were at once."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], dict[str, int]] = {}

    def name(self, engines: Sequence[EngineReading]) -> tuple[EngineReading, ...]:
        """The engines with their replicas' places in their names: ``0/r1`` is rank 0 of the second replica."""
        present: dict[tuple[str, str], set[str]] = {}
        for engine in engines:
            if engine.replica:
                present.setdefault((engine.dialect, engine.model_name), set()).add(engine.replica)
        if not present:
            self._places.clear()
            return tuple(engines)
        self._places = {whose: self._placed(whose, replicas) for whose, replicas in present.items()}
        return tuple(
            replace(
                engine,
                engine=f"{engine.engine}/r{self._places[engine.dialect, engine.model_name][engine.replica]}",
            )
            if engine.replica
            else engine
            for engine in engines
        )

    def _placed(self, whose: tuple[str, str], replicas: set[str]) -> dict[str, int]:
        places = dict(self._places.get(whose, {}))
        gone = sorted((place, each) for each, place in places.items() if each not in replicas)
        for replica in sorted(replicas - places.keys()):
            place = len(places)
            if gone:
                place, predecessor = gone.pop(0)
                del places[predecessor]
            places[replica] = place
        return places


MAX_LINES: Final = 100_000  # 64 engines have about 30 000
MAX_KEY_CHARS: Final = 4_096
OWNERS_EACH: Final = 4  # for each engine: its model, server and configuration
CUT_ENGINES: Final = "engines"
CUT_SERIES: Final = "series"
CUT_COLLISIONS: Final = "collisions"
CUT_TIMESTAMPS: Final = "timestamps"
MAX_AGE_SECONDS: Final = 120.0
"""A sample with a timestamp of its own that is further than this from the scrape describes another moment: two
scrapes of the server behind a federated page, at Prometheus' default interval of a minute.
"""
LINE_BYTES: Final = 48  # of a kept line beside its text: its series and its value
FAMILY_BYTES: Final = 40  # of a kept family beside its text
_FAMILY: Final = b"\n# TYPE "  # what parts a page's families, whose first lines are comments
SERIES_BYTES: Final = 300  # of a series: what it is, and its place in a layout
OWNER_BYTES: Final = 1_024  # of an engine or a model, beside its name
_ENTRY_BYTES: Final = 96  # of a remembered line beside its text: an entry of a dictionary that has just grown


@dataclass(slots=True)
class _PageLines:
    """A page's lines as series and values; both ``None`` for a line without a wanted sample."""

    series: list[Series | None] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    bad_lines: int = 0
    untimely: int = 0  # with a timestamp far from the scrape
    refused: int = 0  # for want of room
    plain: bool = True  # what follows the last space of a wanted one is its value: no timestamp, no exemplar

    @property
    def sound(self) -> bool:
        """Whether all were taken, and those of the next page can be taken alike."""
        return self.plain and not (self.bad_lines or self.untimely or self.refused)


class Scanner:
    """Parses the pages of one target; remembers what their lines are, so that only the first is slow.

    What is remembered affects only speed and replicas' names. It is bounded, as are a page's engines, by this
    target's part of ``bounds``, which the node shares. Not thread-safe.
    """

    def __init__(self, bounds: ScrapeLimits | None = None) -> None:
        self._bounds = bounds or ScrapeLimits()
        self._shares = (self._bounds.engines, self._bounds.remembered)
        for share in self._shares:
            share.join(self)
        self._most_bytes = 0
        self._names = registry.samples()
        self._replicas = Replicas()
        self._forget()

    def close(self) -> None:
        """Release this target's part."""
        for share in self._shares:
            share.leave(self)

    def _forget(self) -> None:
        self._known: dict[str, Series | None] = {}  # name and labels as written -> what they are; None: not wanted
        self._owners: dict[tuple[str, ...], SeriesOwner] = {}
        self._layout = Layout([], {})
        self._histograms: HistogramsRead = {}
        self._key_bytes = self._series_bytes = 0  # of memory for these
        self._forget_page()

    def _forget_page(self) -> None:
        self._families: Sequence[int] = ()  # their hashes on the last page, of 64 bits each
        self._starts: tuple[int, ...] = ()  # the place of each one's first line
        self._samples = _PageLines()
        self._page_bytes = 0

    @property
    def _bytes(self) -> int:
        """Memory for all that is remembered, rather over- than underestimated."""
        return self._key_bytes + self._series_bytes + self._page_bytes + getsizeof(self._layout.series)

    def scan(self, text: str | PageText, now: float | None = None) -> Scrape:
        """Parse one page, of no target yet. ``now``: Unix seconds of the scrape, against which timestamps are checked;
        ``None`` = unchecked.
        """
        # What no server can have sent (half a surrogate pair, from a recording) would come out as a name that cannot be
        # printed.
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        if len(raw) > MAX_LINES and raw.count(b"\n") > MAX_LINES:
            return _failed(TOO_LARGE)
        self._most_bytes = self._bounds.remembered.allowed(self)
        fresh = not self._series_bytes
        try:
            samples = self._scan_page(raw, now)
            if samples.refused and not fresh:  # earlier pages may have filled it
                self._forget()
                samples = self._scan_page(raw, now)
        except UnicodeDecodeError:
            return _failed(INVALID_UTF8)
        if samples.series != self._layout.series:
            self._layout = self._bounds.layout(samples.series, self._known)
            self._histograms = {}
            if self._layout.lines == self._known:
                self._known = self._layout.lines
        samples.series = self._layout.series
        engines, page, unsound = self._layout.read(samples.values, self._histograms)
        engines = self._replicas.name(engines)
        allowed = min(MAX_ENGINES, self._bounds.engines.allowed(self))
        left_out = {
            CUT_ENGINES: len(engines) - allowed,
            CUT_SERIES: samples.refused + self._layout.refused,
            CUT_COLLISIONS: self._layout.collisions,
            CUT_TIMESTAMPS: samples.untimely,
        }
        cut = {reason: count for reason, count in left_out.items() if count > 0}
        engines = engines[:allowed]
        self._keep_within(len(engines), allowed)
        bad_lines = samples.bad_lines + unsound
        if not engines:
            emptied = SERIES_COLLIDE if self._layout.collisions else _why_no_engines(raw)
            error = BAD_TIMESTAMPS if samples.untimely else emptied
            rivals = _rival_label(raw, self._layout.rival_lines) if error == SERIES_COLLIDE else ""
            return replace(_failed(error), page=page, bad_lines=bad_lines, cut=cut, rival_label=rivals)
        whose = engines[0].dialect
        of_dialect = [engine for engine in engines if engine.dialect == whose]
        return Scrape(
            "",
            0.0,
            engines=engines,
            page=page,
            flavour=registry.dialect(whose).flavour(raw, of_dialect),
            dialect=whose,
            bad_lines=bad_lines,
            cut=cut,
        )

    def _keep_within(self, engines: int, allowed: int) -> None:
        """Report this page's use of the shared limits, and forget what exceeds this target's part."""
        if self._bytes > self._most_bytes:
            self._forget_page()
        if self._bytes > self._most_bytes or len(self._owners) > OWNERS_EACH * allowed:
            self._forget()
        self._bounds.engines.use(self, engines)
        self._bounds.remembered.use(self, self._bytes)

    def _scan_page(self, raw: PageText, now: float | None) -> _PageLines:
        """A small page by its changed lines, a large one in parts: all its lines at once take twice its memory."""
        small = len(raw) <= SMALL_PAGE_BYTES
        families = raw.split(_FAMILY) if small else ()
        hashes = [*map(hash, map(bytes, families))]
        if small and self._only_values_differ(families, hashes, now):
            return self._samples
        self._forget_page()
        samples, start = _PageLines(), 0
        while start < len(raw):
            end = raw.find(b"\n", start + SMALL_PAGE_BYTES)
            end = len(raw) if end < 0 else end
            self._scan_lines(raw[start:end].decode().split("\n"), now, samples)
            start = end + 1
        if small and raw and samples.sound:
            lines = (family.count(b"\n") + 1 for family in families)
            self._families, self._starts, self._samples = hashes, tuple(accumulate(lines, initial=0)), samples
            self._page_bytes = LINE_BYTES * len(samples.series) + FAMILY_BYTES * len(families)
        return samples

    def _only_values_differ(self, families: Sequence[PageText], hashes: Sequence[int], now: float | None) -> bool:
        """Whether these have the lines of the last page with other sound values, which are then taken. Most families
        are as they were, and are not taken apart.
        """
        before, self._families = self._families, ()  # of a page that fails half way nothing may stay
        if len(hashes) != len(before):
            return False
        for changed in compress(count(), map(ne, hashes, before)):
            lines, samples = families[changed].decode().split("\n"), _PageLines()
            if changed:
                lines[0] = ""  # the rest of the line by which families are parted
            self._scan_lines(lines, now, samples)
            place = slice(*self._starts[changed : changed + 2])
            if not samples.sound or samples.series != self._samples.series[place]:
                return False
            self._samples.values[place] = samples.values
        self._families = hashes
        return True

    def _scan_lines(self, lines: list[str], now: float | None, samples: _PageLines) -> None:
        """Add the samples of these lines. The loop dominates the cost of a scan: keep it short."""
        known, add_series, add_value = self._known.get, samples.series.append, samples.values.append
        for line in lines:
            key, _, number = line.rpartition(" ")
            series = known(key, NO_SERIES)
            value = None
            if series is NO_SERIES and (not line or line[0] == "#"):
                series = None
            elif series is not None:
                try:
                    value = float(number)
                except ValueError:
                    value = -1.0
                if not 0.0 <= value <= series.ceiling or "_" in number:
                    series, value = self._careful(line, now, samples)
            add_series(series)
            add_value(value)

    def _careful(self, line: str, now: float | None, samples: _PageLines) -> tuple[Series | None, float | None]:
        """A line that is new or bad, or has more than a value."""
        name = name_of(line)
        sample = self._names.get(name)
        if sample is None:
            key = line.rpartition(" ")[0]
            if key.endswith("}") or key == name:  # else a timestamp follows, and no two lines are alike
                self._remember(key, None)
            return None, None
        try:
            head, number, time = sample_of(line)
            series = self._known.get(head, NO_SERIES)
            if series is NO_SERIES:
                if self._series_bytes > max(self._most_bytes, LAYOUT_BYTES):
                    samples.refused += 1
                    return None, None
                series = self._new_series(head, sample)
            if series is None:
                return None, None
            samples.plain &= line == f"{head} {number}"
            if time is None or now is None or abs(now - time) <= MAX_AGE_SECONDS:
                value = number_in(number, series.ceiling)
                if value is None:
                    raise BadLine("impossible value")
                return series, value
            samples.untimely += 1
        except BadLine:
            samples.bad_lines += 1
        return None, None

    def _new_series(self, head: str, sample: SampleName) -> Series | None:
        owners = len(self._owners)
        series = classify(sample, labels_of(head), self._owners)
        if series is not None:
            has_texts = bool(series.family.label) or isinstance(series.identity.part, tuple)
            self._series_bytes += SERIES_BYTES + has_texts * getsizeof(head)
            self._series_bytes += (len(self._owners) - owners) * (OWNER_BYTES + 4 * getsizeof(head))
        self._remember(head, series)
        return series

    def _remember(self, key: str, series: Series | None) -> None:
        if 0 < len(key) <= MAX_KEY_CHARS and self._key_bytes + self._series_bytes <= self._most_bytes:
            if self._known is self._layout.lines:  # which others may read
                self._known = dict(self._known)
            self._known[key] = series
            self._key_bytes += getsizeof(key) + _ENTRY_BYTES


def _rival_label(text: PageText, places: Sequence[int]) -> str:
    """The first label in which the series of these lines differ."""
    one, other = (text.split(b"\n", place + 1)[place].decode() for place in places)
    differing = {name for name, _ in labels_of(sample_of(one)[0]).items() ^ labels_of(sample_of(other)[0]).items()}
    return visible(min(differing))


def _why_no_engines(text: PageText) -> str:
    start = text[:1024].decode(errors="replace").lstrip()
    if not start and not text.strip():
        return EMPTY
    if start.startswith("<"):
        return HTML
    named = other_software.name_of_page(text)
    if named is not None:
        return named
    if start.startswith(("{", "[")) and not name_of(start):  # a quoted metric name begins with a brace too
        return JSON
    return NO_ENGINE_METRICS


def parse_scrape(
    text: str | PageText | None,
    *,
    target: str,
    time: float,
    namespace: str = "",
    pod: str = "",
    container: str = "",
    gpus: Sequence[str] = (),
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    version: str | None = None,
    error: str | None = None,
    duration_seconds: float | None = None,
    scanner: Scanner | None = None,
    keep_text: bool = False,
    dialect: str = "",
) -> Scrape:
    """The scrape of ``target`` at ``time`` (Unix seconds), deterministic.

    ``error``: why the scrape failed; ``text`` is then ignored. ``scanner``: the target's own, for speed.
    ``keep_text``: keep the raw text, for a recording. ``dialect``: the server according to discovery.
    """
    if error is not None:
        result = _failed(error)
    elif text is None:
        result = _failed(EMPTY)
    else:
        result = (scanner or Scanner()).scan(text, time)
    kept = text.decode(errors="replace") if isinstance(text, bytes | bytearray) and keep_text else text
    return replace(
        result,
        target=target,
        time=time,
        namespace=namespace,
        pod=pod,
        container=container,
        gpus=tuple(gpus),
        args=tuple(args),
        env=dict(env or {}),
        version=version,
        duration_seconds=duration_seconds,
        exposition=kept if keep_text and isinstance(kept, str) else None,
        dialect=result.dialect or dialect,
    )


def _failed(error: str) -> Scrape:
    return Scrape("", 0.0, error=error)
