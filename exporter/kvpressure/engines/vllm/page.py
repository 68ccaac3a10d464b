"""Which vLLM published metrics, and whether several API servers share the endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpressure.engines.base import PageKind
from kvpressure.model.readings import (
    GENERATION_RATE,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PROCESS_CPU_SECONDS,
    PROCESS_RSS_BYTES,
    PROCESS_START,
    PROMPT_RATE,
    SWAPPED,
    EngineReading,
    PageText,
)


def kind(text: PageText, engines: Sequence[EngineReading], page: Mapping[str, float]) -> PageKind:
    """The flavour (v0, v1, rust) and whether several API servers share the endpoint, as far as it shows."""
    flavour = _flavour(text, engines)
    return PageKind(flavour, _multi_process(text, page, flavour))


def _has_label(text: PageText, name: bytes) -> bool:
    return b'{%b="' % name in text or b',%b="' % name in text


def _is_openmetrics(text: PageText) -> bool:
    return text[-16:].rstrip().endswith(b"# EOF")


def _flavour(text: PageText, engines: Sequence[EngineReading]) -> str | None:
    """Which vLLM wrote the text; ``None`` = unknown.

    Only V0 had swapping and throughput gauges. Of the rest, only the Rust frontend answers OpenMetrics under names
    with a colon, and it has no ``cache_config_info``. Only V1 has an engine label (0.8 and later), prefix cache
    counters and ``kv_cache_usage_perc``; before it had the label, V1 counted no preemptions. Ray relabels.
    """
    v0_only = {SWAPPED, GENERATION_RATE, PROMPT_RATE}
    if any(v0_only & engine.gauges.keys() for engine in engines):
        return "v0"
    if _is_openmetrics(text) and b"cache_config_info" not in text and b"vllm:num_requests_running" in text:
        return "rust"
    counters = {name for engine in engines for name in engine.counters}
    if _has_label(text, b"engine") or b"kv_cache_usage_perc" in text or PREFIX_QUERIES in counters:
        return "v1"
    if PREEMPTIONS in counters and b"ray_vllm" not in text:
        return "v0"
    return None


def _multi_process(text: PageText, page: Mapping[str, float], flavour: str | None) -> bool | None:
    """Whether several API servers share the endpoint; ``None`` = unknown.

    Python's client publishes ``process_*`` only with one process, so these decide, as do ``pid`` labels. Their
    absence alone proves nothing: the Rust frontend, V0 and Ray never had them, and recorders strip lines. It counts
    in a classic V1 text that still has its HELP lines.
    """
    if page.keys() & {PROCESS_CPU_SECONDS, PROCESS_RSS_BYTES, PROCESS_START}:
        return False
    if _has_label(text, b"pid"):
        return True
    if flavour == "v1" and b"# HELP vllm:" in text and not _is_openmetrics(text):
        return True
    return None
