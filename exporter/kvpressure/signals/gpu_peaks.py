"""Peak compute and memory bandwidth of a GPU by its driver's name, against which vLLM's estimates are judged."""

from __future__ import annotations

import re
from typing import Final

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import GpuReading


@frozen
class Peak:
    """Peaks from the vendor's data sheet: dense 16-bit FLOP/s and bytes/s of device memory."""

    flops: float
    bytes: float


#: The first pattern found in the name holds. Dense BF16 without sparsity; of a GPU with two dies, one die, which is
#: what drivers show as a device. Where a name covers several products the strongest stands here, so that a share of the
#: peak is rather too small than too large.
_PEAKS: Final[tuple[tuple[re.Pattern[str], Peak], ...]] = tuple(
    (re.compile(name), Peak(flops, size))
    for name, flops, size in (
        (r"\bG?B200\b", 2.5e15, 8.0e12),
        (r"\bH200\b|\bGH200\b", 0.99e15, 4.9e12),
        (r"\bH100 NVL\b", 0.835e15, 3.9e12),
        (r"\bH100 PCIe\b", 0.756e15, 2.0e12),
        (r"\bH100\b", 0.99e15, 3.35e12),
        (r"\bA100\b", 0.312e15, 2.04e12),
        (r"\bL40S?\b", 0.362e15, 0.864e12),
        (r"\bL4\b", 0.121e15, 0.3e12),
        (r"\bA10\b", 0.125e15, 0.6e12),
        (r"\bMI325X\b", 1.307e15, 6.0e12),
        (r"\bMI300X\b", 1.307e15, 5.3e12),
        (r"\bMI250X?\b", 0.192e15, 1.6e12),
        (r"\bMI210\b", 0.181e15, 1.6e12),
    )
)


def peak(gpu: GpuReading) -> Peak | None:
    """The GPU's peaks; None for unknown GPUs and for instances and partitions, which have only a share of a GPU."""
    if gpu.name is None or gpu.parent_uuid is not None:
        return None
    return next((found for pattern, found in _PEAKS if pattern.search(gpu.name)), None)
