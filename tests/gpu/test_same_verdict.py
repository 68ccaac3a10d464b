"""The same recorded load gives the same verdict on an NVIDIA and on an AMD node.

Recordings of real servers are replayed as recorded (NVML utilization) and with their GPU as AMD's sysfs would show it:
busy percent, and power, which was not recorded and follows from it by the share documented for decoding.
``test_evidence_levels.py`` has the other kinds of evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader

pytestmark = pytest.mark.slow

RECORDINGS = Path(__file__).parents[1] / "fixtures/recordings"
LOADS = {
    "h100/llama-2-7b-046": "kv_pressure",
    "h100/opt-1.3b-018": "concurrency_limited",
    "burstgpt/scale-300": "healthy",
    "incidents/CPU7": "host_bound",
}
"""Recordings and the verdict that most of their ticks get."""

IDLE_POWER, BUSY_POWER = 0.12, 0.45  # of the limit: at rest, and what decoding all the time adds

Show = Callable[[GpuReading], GpuReading]


def amd(gpu: GpuReading) -> GpuReading:
    """A GPU with as much memory, so that defaults by GPU are the same."""
    busy = gpu.utilization_ratio
    return replace(
        gpu,
        uuid="GPU-8f6c2a1d4e3b5a70",
        vendor="amd",
        name="AMD Instinct MI210",
        power_limit_watts=300.0,
        power_watts=None if busy is None else 300.0 * (IDLE_POWER + BUSY_POWER * busy),
        sm_activity_ratio=None,
        tensor_activity_ratio=None,
        dram_activity_ratio=None,
    )


NODES: Mapping[str, Show] = {"as recorded": lambda gpu: gpu, "amd": amd}


def shown(snapshot: Snapshot, show: Show) -> Snapshot:
    """The snapshot with its GPUs as this node shows them, under the same owner."""
    gpus = {gpu.uuid: show(gpu) for gpu in snapshot.gpus}
    pages = tuple(
        replace(page, gpus=tuple(gpus[uuid].uuid if uuid in gpus else uuid for uuid in page.gpus))
        for page in snapshot.pages
    )
    return replace(snapshot, gpus=tuple(gpus.values()), pages=pages)


@dataclass(frozen=True)
class Tick:
    verdict: str
    confidence: float
    stage: str | None
    conditions: Mapping[str, bool | None]
    signature: Mapping[str, bool | None]


def replay(name: str, node: str) -> tuple[Tick, ...]:
    pipeline = Pipeline()
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        engines = [engine for snapshot in reader for engine in pipeline.observe(shown(snapshot, NODES[node])).engines]
    return tuple(
        Tick(
            e.diagnosis.verdict,
            e.diagnosis.confidence,
            e.diagnosis.stage,
            e.diagnosis.conditions,
            e.diagnosis.documented_signature,
        )
        for e in engines
    )


@pytest.mark.parametrize("name", LOADS)
def test_amd_gives_what_nvidia_gave_tick_by_tick(name: str) -> None:
    """Verdict, stage, confidence, conditions, signature: nothing hangs on the vendor."""
    recorded, other = replay(name, "as recorded"), replay(name, "amd")
    assert Counter(tick.verdict for tick in other).most_common(1)[0][0] == LOADS[name]
    assert recorded == other
