"""From the text of a metrics page to an ``EnginePage``: what live fetching and replay of recordings have in common.

Lines are picked by sample name, so that classic text and OpenMetrics, wrong ``TYPE`` lines (vLLM's Rust frontend)
and any mixture are read alike. Nothing that a page may contain raises: a bad line costs that line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpressure.readings import (
    GENERATION_RATE,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PROCESS_CPU_SECONDS,
    PROCESS_RSS_BYTES,
    PROCESS_START,
    PROMPT_RATE,
    SWAPPED,
    EnginePage,
    EngineReading,
)
from kvpressure.sources.vllm.aliases import SAMPLES
from kvpressure.sources.vllm.layout import UNWANTED, Layout
from kvpressure.sources.vllm.reasons import (
    EMPTY,
    HTML,
    INVALID_UTF8,
    JSON,
    NO_VLLM_METRICS,
    TOO_LARGE,
)
from kvpressure.sources.vllm.series import MAX_LINE_CHARS, BadLine, labels_from, name_of, number_from

MAX_LINES: Final = 100_000  # 64 engines have about 30 000
MAX_KEY_CHARS: Final = 4_096
MAX_REMEMBERED_BYTES: Final = 8 * 1024 * 1024  # about, per scanner; a page of one engine needs 0.1 MiB
_ENTRY_BYTES: Final = 100  # what remembering costs beside the text itself


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a page holds. ``error`` says why there are no engines; the other fields are as in ``EnginePage``."""

    engines: tuple[EngineReading, ...] = ()
    page: Mapping[str, float] = field(default_factory=dict)
    flavour: str | None = None
    multi_process: bool | None = None
    bad_lines: int = 0
    error: str | None = None


class Scanner:
    """Reads pages of one target. Remembers the page's layout, so that only the first page is slow.

    What it remembers changes the speed, never the result, and is bounded. Not for use by two threads at once.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._layout = Layout()
        self._slots: dict[str, int] = {}  # text of a line up to its value -> slot or UNWANTED
        self._remembered_bytes = 0

    def scan(self, text: str | bytes) -> ScanResult:
        """Read one page."""
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError:
                return ScanResult(error=INVALID_UTF8)
        if text.count("\n") > MAX_LINES:
            return ScanResult(error=TOO_LARGE)
        fresh = not self._slots
        values, bad_lines = self._scan_lines(text)
        if self._layout.full and not fresh:  # perhaps only earlier pages filled it
            self._forget()
            values, bad_lines = self._scan_lines(text)
        engines, page, dropped = self._layout.read(values)
        bad_lines += dropped
        if self._layout.full or self._layout.crowded or self._remembered_bytes > MAX_REMEMBERED_BYTES:
            self._forget()
        if not engines:
            return ScanResult(bad_lines=bad_lines, page=page, error=_why_no_engines(text))
        flavour = _flavour(text, engines)
        return ScanResult(engines, page, flavour, _multi_process(text, page, flavour), bad_lines)

    def _scan_lines(self, text: str) -> tuple[list[float | None], int]:
        """The values by slot and the number of bad lines. The loop below is the cost of a scan: keep it short."""
        bad_lines = 0
        slot_of = self._slots.get
        ceilings = self._layout.ceilings
        values: list[float | None] = [None] * len(ceilings)
        for line in text.split("\n"):
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
        return values, bad_lines

    def _careful(self, line: str, values: list[float | None]) -> bool:
        """Read a line in an unknown form, remember the form, store its value. True = a wanted line was bad."""
        key, _, last = line.rpartition(" ")
        if not line or line.startswith("#"):
            self._remember(key, UNWANTED)
            return False
        name, end = name_of(line[:MAX_LINE_CHARS])
        sample = SAMPLES.get(name)
        if sample is None:
            if key.endswith("}") or key == name:  # else a timestamp follows, and no two lines are alike
                self._remember(key, UNWANTED)
            return False
        try:
            if len(line) > MAX_LINE_CHARS:
                raise BadLine("too long")
            labels, end = labels_from(line, end)
            number = number_from(line, end)
            slot = self._layout.place(sample, labels)
            if slot == len(values):
                values.append(None)
                self._remembered_bytes += len(line)
            if number == last and line[end:].strip(" \t") == number:
                self._remember(key, slot)
            if slot == UNWANTED:
                return False
            value = float(number)
        except ValueError:
            return True
        if "_" in number or not 0.0 <= value <= self._layout.ceilings[slot]:
            return True
        values[slot] = value
        return False

    def _remember(self, key: str, slot: int) -> None:
        if key and len(key) <= MAX_KEY_CHARS and self._remembered_bytes <= MAX_REMEMBERED_BYTES:
            self._slots[key] = slot
            self._remembered_bytes += len(key) + _ENTRY_BYTES


def _why_no_engines(text: str) -> str:
    start = text[:1024].lstrip()
    if not start and not text.strip():
        return EMPTY
    if start.startswith("<"):
        return HTML
    if start.startswith(("{", "[")) and not name_of(start)[0]:  # a quoted metric name begins with a brace too
        return JSON
    return NO_VLLM_METRICS


def _has_label(text: str, name: str) -> bool:
    return f'{{{name}="' in text or f',{name}="' in text


def _is_openmetrics(text: str) -> bool:
    return text[-16:].rstrip().endswith("# EOF")


def _flavour(text: str, engines: Sequence[EngineReading]) -> str | None:
    """Which vLLM wrote the page, where the page tells.

    V0 alone had swapping and throughput gauges. Of the rest, only the Rust frontend answers OpenMetrics under names
    with a colon, and it has no ``cache_config_info``. V1 alone has an engine label (from 0.8 on), prefix cache
    counters and ``kv_cache_usage_perc``; before it had the label, V1 counted no preemptions. Ray relabels.
    """
    v0_only = {SWAPPED, GENERATION_RATE, PROMPT_RATE}
    if any(v0_only & engine.gauges.keys() for engine in engines):
        return "v0"
    if _is_openmetrics(text) and "cache_config_info" not in text and "vllm:num_requests_running" in text:
        return "rust"
    counters = {name for engine in engines for name in engine.counters}
    if _has_label(text, "engine") or "kv_cache_usage_perc" in text or PREFIX_QUERIES in counters:
        return "v1"
    if PREEMPTIONS in counters and "ray_vllm" not in text:
        return "v0"
    return None


def _multi_process(text: str, page: Mapping[str, float], flavour: str | None) -> bool | None:
    """Several API servers behind this page? ``None`` when it cannot be told.

    Python's client shows ``process_*`` with one process only, so those settle it, and so do ``pid`` labels. Their
    absence alone proves nothing: the Rust frontend, V0 and Ray never had them, recorders strip lines. It counts on
    a classic V1 page that still has its HELP lines, that is, one as served.
    """
    if page.keys() & {PROCESS_CPU_SECONDS, PROCESS_RSS_BYTES, PROCESS_START}:
        return False
    if _has_label(text, "pid"):
        return True
    if flavour == "v1" and "# HELP vllm:" in text and not _is_openmetrics(text):
        return True
    return None


def page_from_text(
    text: str | bytes | None,
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
) -> EnginePage:
    """The page of ``target`` as read at ``time`` (Unix seconds). The same text always gives the same page.

    ``error`` is the reason why the scrape failed; then ``text`` is not looked at. ``scanner`` is the target's own,
    for speed. ``keep_text`` puts the raw text into the page, for a recording.
    """
    if error is not None:
        result = ScanResult(error=error)
    elif text is None:
        result = ScanResult(error=EMPTY)
    else:
        result = (scanner or Scanner()).scan(text)
    kept = text.decode(errors="replace") if isinstance(text, bytes) and keep_text else text
    return EnginePage(
        target=target, time=time, namespace=namespace, pod=pod, container=container,
        gpus=tuple(gpus), args=tuple(args), env=dict(env or {}), version=version,
        engines=result.engines, page=result.page, flavour=result.flavour, multi_process=result.multi_process,
        bad_lines=result.bad_lines, error=result.error, duration_seconds=duration_seconds,
        exposition=kept if keep_text and isinstance(kept, str) else None,
    )
