"""Three loads as each kind of evidence sees them: decode at a full cache, prefill, and a GPU that its host cannot feed.

Shares are those measured or documented for H100 and A100 (activity and power by NVIDIA's guidance and DCGM fields;
power 0.4-0.7 of the limit while decoding, 0.9-1.0 in prefill, below 0.35 when starved; FLOPs per byte from the
roofline).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, GpuReading, Scrape, Snapshot

LOADS: Final = ("decode", "prefill", "host")

#: Fields of a GPU, or rates of the engine's own estimate, by level of evidence and load.
SEEN: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "profiling": {
        "decode": {"tensor_activity_ratio": 0.08, "dram_activity_ratio": 0.78, "sm_activity_ratio": 0.9},
        "prefill": {"tensor_activity_ratio": 0.6, "dram_activity_ratio": 0.3, "sm_activity_ratio": 0.9},
        "host": {"tensor_activity_ratio": 0.01, "dram_activity_ratio": 0.06, "sm_activity_ratio": 0.08},
    },
    "power": {
        "decode": {"power_watts": 385.0, "power_limit_watts": 700.0},
        "prefill": {"power_watts": 665.0, "power_limit_watts": 700.0},
        "host": {"power_watts": 150.0, "power_limit_watts": 700.0},
    },
    "estimated_flops": {
        "decode": {r.ESTIMATED_FLOPS: 4e13, r.ESTIMATED_READ_BYTES: 2.0e12, r.ESTIMATED_WRITE_BYTES: 1e10},
        "prefill": {r.ESTIMATED_FLOPS: 5.5e14, r.ESTIMATED_READ_BYTES: 8e11, r.ESTIMATED_WRITE_BYTES: 1e10},
        "host": {r.ESTIMATED_FLOPS: 3e12, r.ESTIMATED_READ_BYTES: 1.5e11, r.ESTIMATED_WRITE_BYTES: 1e9},
    },
    "utilization_weak": {
        "decode": {"utilization_ratio": 0.92},
        "prefill": {"utilization_ratio": 0.99},
        "host": {"utilization_ratio": 0.08},
    },
}
LEVELS: Final = tuple(SEEN)


def snapshot(t: float, load: str, *levels: str, vendor: str = "nvidia") -> Snapshot:
    """A tick in which the given levels of evidence are to be had. The GPU has its memory full, as always."""
    fields: dict[str, Any] = {}
    counters = {
        r.PROMPT_TOKENS: t * (40_000 if load == "prefill" else 300),
        r.GENERATION_TOKENS: t * (40 if load == "prefill" else 900),
    }
    for level in levels:
        seen = SEEN[level][load]
        if level == "estimated_flops":
            counters |= {name: rate * t for name, rate in seen.items()}
        else:
            fields |= seen
    gpu = GpuReading(
        "GPU-1",
        0,
        vendor,
        "NVIDIA H100 80GB HBM3" if vendor == "nvidia" else "AMD Instinct MI300X OAM",
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=74 * 2**30,
        **fields,
    )
    gauges = {
        r.RUNNING: 40.0,
        r.WAITING: 0.0 if load == "host" else 12.0,
        r.KV_USAGE: 0.99 if load == "decode" else 0.4,
    }
    target, engines = "http://10.0.0.5:8000/metrics", (EngineReading("m", "0", gauges, counters),)
    args = ("--max-num-seqs", "256")
    page = Scrape(target, t, "inference", "chat-0", "vllm", gpus=("GPU-1",), args=args, engines=engines)
    return Snapshot(t, gpus=(gpu,), pages=(page,))
