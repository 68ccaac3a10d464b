"""The source: one call reads every GPU of the vendor."""

from __future__ import annotations

from typing import Any

from kvpressure.model.readings import GpuReading
from kvpressure.sources.base import Reading


class ToySource:
    """Two GPUs, one of them lost."""

    name = "toy"

    def __init__(self, _settings: Any) -> None:
        """Nothing is opened before the first reading."""

    def read(self) -> Reading:
        """Read once, now."""
        sound = GpuReading("TOY-0", 0, "toy", "Toy 9000", memory_total_bytes=64 * 2**30, memory_used_bytes=16 * 2**30)
        return Reading(gpus=(sound, GpuReading("TOY-1", 1, "toy", error="lost")), expected_gpus={"toy": 2})

    def close(self) -> None:
        """Nothing is held."""
