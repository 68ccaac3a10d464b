"""The documented signature, condition by condition, as the guide "KV Cache Diagnostics" states it.

Published beside the verdict because readers of the guide look for it. On recorded servers it finds no KV pressure;
``note`` explains a disagreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvpressure.diagnosis.finding import Finding, View
from kvpressure.diagnosis.gpu_facts import NO_GPU
from kvpressure.diagnosis.numbers import at_least, say, when_known
from kvpressure.engines.registry import dialect
from kvpressure.model.signals import Signals

PREFIX: Final = "signature_"
_RUNBOOK: Final = "InferenceDocumentedSignature"


def _with_traffic(holds: Callable[[View], bool | None]) -> Callable[[View], bool | None]:
    """A condition that is false without traffic, and unknown without its number even then."""

    def find(v: View) -> bool | None:
        traffic, value = v.s.progress.work_present, holds(v)
        return None if traffic is None or value is None else traffic and value

    return find


def _throughput_flat(v: View) -> bool | None:
    traffic = v.s.progress.work_present
    return v.s.throughput.throughput_flat if traffic else traffic


SIGNATURE: Final = (
    Finding(
        "signature_gpu_memory_high",
        "more than {signature_memory_ratio} of GPU memory is used",
        "at most {signature_memory_ratio} of GPU memory is used",
        when_known(lambda v, used: used > v.t["signature_memory_ratio"], "gpu_memory_high"),
        "{gpu_memory_high}",
        NO_GPU,
        "GPU memory used",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_gpu_utilization_low",
        "GPU utilization is below {signature_utilization_ratio} with traffic",
        "GPU utilization is at least {signature_utilization_ratio}, or there is no traffic",
        _with_traffic(when_known(lambda v, used: used < v.t["signature_utilization_ratio"], "gpu_utilization")),
        "{gpu_utilization}",
        NO_GPU,
        "GPU utilization",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_batch_collapsed",
        "the p95 batch size is {signature_batch_size} or less with traffic",
        "the p95 batch size is above {signature_batch_size}, or there is no traffic",
        _with_traffic(when_known(lambda v, size: size <= v.t["signature_batch_size"], "batch_p95")),
        "p95 {batch_p95}, mean {batch_mean}",
        "too few samples",
        "batch size",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_latency_rising",
        "p95 latency is at least {latency_rising_ratio} its baseline",
        "p95 latency is below {latency_rising_ratio} its baseline",
        at_least("worst_latency", "latency_rising_ratio"),
        "{worst_phase} {worst_latency}",
        "no baseline yet, or too few requests",
        "p95 latency compared with its baseline",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_throughput_flat",
        "throughput is flat or falling although demand is not",
        "throughput follows demand, or there is no traffic",
        _throughput_flat,
        "now {throughput_trend} of the best recent minute",
        "less than two minutes of comparable load",
        "throughput compared with demand",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
)
"""Five conditions: GPU memory above 85 %, GPU utilization below 60 % while traffic is present, batch p95 down to about
1-2, p95/p99 latency rising, throughput flat or falling.
"""


def met(v: View) -> bool | None:
    """Whether most conditions hold; ``None`` where the unknown ones could change that."""
    return most([row.find(v) for row in SIGNATURE])


def most(found: Sequence[bool | None]) -> bool | None:
    """Whether most of these are true; ``None`` where the unknown ones could change that."""
    true, false, open_ = found.count(True), found.count(False), found.count(None)
    if true > false + open_:
        return True
    return False if true + open_ <= false else None


def note(s: Signals, verdict: str, is_met: bool | None) -> str:
    """Why signature and verdict differ, in words; "" when they agree or the signature is unknown."""
    if is_met is None or is_met == (verdict == "kv_pressure"):
        return ""
    level = s.kv.kv_used_ratio_max
    used = "KV cache usage: unknown" if level is None else f"KV cache peak {say(level, 'ratio')}"
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
