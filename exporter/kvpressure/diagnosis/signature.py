"""The documented signature, condition by condition, as the guide "KV Cache Diagnostics" states it.

Published beside the verdict because readers of the guide look for it. On recorded servers it finds no KV pressure;
``note`` explains a disagreement.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpressure.diagnosis.numbers import percent
from kvpressure.engines.registry import dialect
from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds


def conditions(s: Signals, t: Thresholds) -> dict[str, bool | None]:
    """The five documented conditions: GPU memory above 85 %, GPU utilization below 60 % while traffic is present,
    batch p95 down to about 1-2, p95/p99 latency rising, throughput flat or falling.
    """
    traffic = s.progress.work_present
    memory, used = s.memory.device_used_ratio, s.compute.gpu_utilization
    ratios = s.latency.baseline_ratios
    return {
        "gpu_memory_high": None if memory is None else memory > t["signature_memory_ratio"],
        "gpu_utilization_low": None
        if used is None or traffic is None
        else traffic and used < t["signature_utilization_ratio"],
        "batch_collapsed": None
        if s.batch.batch_p95 is None or traffic is None
        else traffic and s.batch.batch_p95 <= t["signature_batch_size"],
        "latency_rising": max(ratios.values()) >= t["latency_rising_ratio"] if ratios else None,
        "throughput_flat": None if traffic is None else (s.throughput.throughput_flat if traffic else False),
    }


def met(values: Mapping[str, bool | None]) -> bool | None:
    """Whether most conditions hold; ``None`` where the unknown ones could change that."""
    found = list(values.values())
    true, false, open_ = found.count(True), found.count(False), found.count(None)
    if true > false + open_:
        return True
    return False if true + open_ <= false else None


def note(s: Signals, verdict: str, is_met: bool | None) -> str:
    """Why signature and verdict differ, in words; "" when they agree or the signature is unknown."""
    if is_met is None or is_met == (verdict == "kv_pressure"):
        return ""
    level = s.kv.kv_used_ratio_max
    used = "KV cache usage: unknown" if level is None else f"KV cache peak {percent(level)}"
    if is_met:
        return (
            f"Documented signature met, but no KV pressure ({used}). {dialect(s.dialect).title} reserves its memory"
            " at start, so device memory is high with an empty cache. A small model or a busy host keeps GPU"
            " utilization low."
        )
    return (
        f"Documented signature not met, but KV pressure ({used}, requests waiting). Decoding keeps a kernel running"
        " nearly all the time, so GPU utilization stays high under KV pressure."
    )
