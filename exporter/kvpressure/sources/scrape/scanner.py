"""From the text of a metrics endpoint to a ``Scrape``; shared by live scrapes and replay.

Lines are selected by sample name, so classic text, OpenMetrics, wrong ``TYPE`` lines and any mixture are read alike.
No content raises: a bad line costs only itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final

from kvpressure.engines import other_software, registry
from kvpressure.model.ceilings import number_in
from kvpressure.model.readings import EngineReading, PageText, Scrape
from kvpressure.model.reasons import BAD_TIMESTAMPS, EMPTY, HTML, INVALID_UTF8, JSON, NO_ENGINE_METRICS, TOO_LARGE
from kvpressure.sources.scrape.last_page import LastPage
from kvpressure.sources.scrape.layout import UNWANTED, Layout
from kvpressure.sources.scrape.lines import MAX_LINE_CHARS, BadLine, TooMany, labels_from, name_of, number_from
from kvpressure.sources.scrape.memory_limits import LAYOUT_BYTES, MAX_ENGINES, SMALL_PAGE_BYTES, ScrapeLimits
from kvpressure.sources.scrape.replicas import Replicas

MAX_LINES: Final = 100_000  # 64 engines have about 30 000
MAX_KEY_CHARS: Final = 4_096
PART_BYTES: Final = 64 * 1024  # of a large page, parsed at a time
CUT_ENGINES: Final = "engines"
CUT_SERIES: Final = "series"
CUT_COLLISIONS: Final = "collisions"
CUT_TIMESTAMPS: Final = "timestamps"
MAX_AGE_SECONDS: Final = 120.0
"""A sample with a timestamp of its own that is further than this from the scrape describes another moment: two
scrapes of the server behind a federated page, at Prometheus' default interval of a minute.
"""
_ENTRY_BYTES: Final = 96  # of a remembered line beside its text: an entry of a dictionary that has just grown


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Content of a page. ``error``: why there are no engines; other fields as in ``Scrape``."""

    engines: tuple[EngineReading, ...] = ()
    page: Mapping[str, float] = field(default_factory=dict)
    flavour: str | None = None
    multi_process: bool | None = None
    dialect: str = ""
    bad_lines: int = 0
    cut: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


class Scanner:
    """Parses the pages of one target; remembers their layout, so that only the first is slow.

    What is remembered affects only speed and replicas' names. It is bounded, as are a page's engines, by this
    target's part of ``bounds``, which the node shares. Not thread-safe.
    """

    def __init__(self, bounds: ScrapeLimits | None = None) -> None:
        self._bounds = bounds or ScrapeLimits()
        self._shares = (self._bounds.engines, self._bounds.remembered)
        for share in self._shares:
            share.join(self)
        self._most_bytes = 0
        self._samples = registry.samples()
        self._replicas = Replicas()
        self._now: float | None = None
        self._untimely = 0  # samples of this page with a timestamp far from the scrape
        self._forget()

    def close(self) -> None:
        """Release this target's part."""
        for share in self._shares:
            share.leave(self)

    def _forget(self) -> None:
        self._layout = Layout(max(self._most_bytes, LAYOUT_BYTES))
        self._slots: dict[str, int] = {}  # text of a line up to its value -> slot or UNWANTED
        self._line_bytes = 0  # of the lines that are remembered
        self._last = LastPage()

    @property
    def _remembered_bytes(self) -> int:
        return self._line_bytes + self._layout.bytes + self._last.bytes

    def scan(self, text: str | PageText, now: float | None = None) -> ScanResult:
        """Parse one page. ``now``: Unix seconds of the scrape, against which timestamps are checked; ``None`` =
        unchecked.
        """
        self._now, self._untimely = now, 0
        # What no server can have sent (half a surrogate pair, from a recording) would come out as a name that cannot be
        # printed.
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        if len(raw) > MAX_LINES and raw.count(b"\n") > MAX_LINES:
            return ScanResult(error=TOO_LARGE)
        self._most_bytes = self._bounds.remembered.allowed(self)
        self._layout.most_bytes = max(self._most_bytes, LAYOUT_BYTES)
        fresh = not self._slots
        try:
            values, bad_lines = self._scan_lines(raw)
            if self._layout.full and not fresh:  # earlier pages may have filled it
                self._forget()
                self._untimely = 0
                values, bad_lines = self._scan_lines(raw)
        except UnicodeDecodeError:
            return ScanResult(error=INVALID_UTF8)
        engines, page, unsound, collisions = self._layout.read(values)
        engines = self._replicas.name(engines)
        allowed = min(MAX_ENGINES, self._bounds.engines.allowed(self))
        cut = {CUT_ENGINES: len(engines) - allowed, CUT_SERIES: self._layout.refused, CUT_COLLISIONS: collisions}
        cut[CUT_TIMESTAMPS] = self._untimely
        self._keep_within(len(engines), allowed)
        engines = engines[:allowed]
        bad_lines += unsound
        cut = {reason: count for reason, count in cut.items() if count > 0}
        if not engines:
            return ScanResult(
                bad_lines=bad_lines,
                cut=cut,
                page=page,
                error=BAD_TIMESTAMPS if self._untimely else _why_no_engines(raw),
            )
        whose = engines[0].dialect
        of_dialect = [engine for engine in engines if engine.dialect == whose]
        kind = registry.dialect(whose).page_kind(raw, of_dialect, page)
        return ScanResult(engines, page, kind.flavour, kind.multi_process, whose, bad_lines, cut)

    def _keep_within(self, engines: int, allowed: int) -> None:
        """Report this page's use of the shared limits, and forget the layout if it exceeds this target's part."""
        self._bounds.engines.use(self, min(engines, allowed))
        if self._remembered_bytes > self._most_bytes:
            self._last.forget()
        if self._layout.full or self._layout.engines > 2 * allowed or self._remembered_bytes > self._most_bytes:
            self._forget()
        self._bounds.remembered.use(self, self._remembered_bytes)

    def _scan_lines(self, raw: PageText) -> tuple[list[float | None], int]:
        """(values by slot, number of bad lines): a small page by its changed lines, a large one in parts, because all
        its lines at once take twice its memory.
        """
        if len(raw) <= SMALL_PAGE_BYTES:
            return self._scan_small(raw.decode())
        self._last.forget()
        values: list[float | None] = [None] * len(self._layout.ceilings)
        bad_lines = start = 0
        while start < len(raw):
            end = raw.find(b"\n", start + PART_BYTES)
            end = len(raw) if end < 0 else end
            bad_lines += self._scan_part(raw[start:end].decode().split("\n"), values)
            start = end + 1
        return values, bad_lines

    def _scan_small(self, text: str) -> tuple[list[float | None], int]:
        lines = text.split("\n")
        values = self._last.replace(text, lines, self._slots.get, self._layout.ceilings)
        if values is not None:
            return values, 0
        values = [None] * len(self._layout.ceilings)
        bad_lines = self._scan_part(lines, values)
        if not bad_lines and not self._untimely:
            self._last.keep(text, lines, self._slots.get, values)
        return values, bad_lines

    def _scan_part(self, lines: Sequence[str], values: list[float | None]) -> int:
        """Store values; returns the number of bad lines. This loop dominates the cost of a scan: keep it short."""
        bad_lines = 0
        slot_of = self._slots.get
        ceilings = self._layout.ceilings
        for line in lines:
            key, _, number = line.rpartition(" ")
            slot = slot_of(key)
            if slot is None:
                bad_lines += self._careful(line, values)
            elif slot >= 0:
                try:
                    value = float(number)
                except ValueError:
                    bad_lines += self._careful(line, values)
                    continue
                # NaN and Inf fail here too; "1_0" is a number to Python, to nobody else
                if 0.0 <= value <= ceilings[slot] and "_" not in number:
                    values[slot] = value
                else:
                    bad_lines += 1
        return bad_lines

    def _careful(self, line: str, values: list[float | None]) -> bool:
        """Parse a line of unknown form, remember the form, store its value; returns whether a wanted line was bad."""
        key, _, last = line.rpartition(" ")
        if not line or line.startswith("#"):
            self._remember(key, UNWANTED)
            return False
        name, end = name_of(line[:MAX_LINE_CHARS])
        sample = self._samples.get(name)
        if sample is None:
            if key.endswith("}") or key == name:  # else a timestamp follows, and no two lines are alike
                self._remember(key, UNWANTED)
            return False
        try:
            if len(line) > MAX_LINE_CHARS:
                raise BadLine("too long")
            labels, end = labels_from(line, end)
            number, stamp = number_from(line, end)
            slot = self._layout.place(sample, labels)
            if slot == len(values):
                values.append(None)
            if number == last and line[end:].strip(" \t") == number:
                self._remember(key, slot)
            if slot == UNWANTED:
                return False
            if stamp is not None and self._now is not None and not abs(self._now - stamp) <= MAX_AGE_SECONDS:
                self._untimely += 1
                return False
        except TooMany:
            return False
        except ValueError:
            return True
        value = number_in(number, self._layout.ceilings[slot])
        if value is None:
            return True
        values[slot] = value
        return False

    def _remember(self, key: str, slot: int) -> None:
        if key and len(key) <= MAX_KEY_CHARS and self._remembered_bytes <= self._most_bytes:
            self._slots[key] = slot
            self._line_bytes += getsizeof(key) + _ENTRY_BYTES


def _why_no_engines(text: PageText) -> str:
    start = text[:1024].decode(errors="replace").lstrip()
    if not start and not text.strip():
        return EMPTY
    if start.startswith("<"):
        return HTML
    named = other_software.name_of_page(text)
    if named is not None:
        return named
    if start.startswith(("{", "[")) and not name_of(start)[0]:  # a quoted metric name begins with a brace too
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
        result = ScanResult(error=error)
    elif text is None:
        result = ScanResult(error=EMPTY)
    else:
        result = (scanner or Scanner()).scan(text, time)
    kept = text.decode(errors="replace") if isinstance(text, bytes | bytearray) and keep_text else text
    return Scrape(
        target=target,
        time=time,
        namespace=namespace,
        pod=pod,
        container=container,
        gpus=tuple(gpus),
        args=tuple(args),
        env=dict(env or {}),
        version=version,
        engines=result.engines,
        page=result.page,
        flavour=result.flavour,
        multi_process=result.multi_process,
        bad_lines=result.bad_lines,
        cut=result.cut,
        error=result.error,
        duration_seconds=duration_seconds,
        exposition=kept if keep_text and isinstance(kept, str) else None,
        dialect=result.dialect or dialect,
    )
