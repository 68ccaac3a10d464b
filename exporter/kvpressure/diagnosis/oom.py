"""Out of GPU memory, from the log: whether it happened, and torch's allocator numbers at that moment.

The error's text is the only place outside the process that shows allocated and reserved memory, and only after the
fact. It is evidence, not a reading: ``fragmentation_bytes`` comes from the plugin alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds

TRUE: Final = "the log shows that GPU memory ran out"
FALSE: Final = "the log does not show that GPU memory ran out"
QUESTION: Final = "GPU memory errors in the log"
"""Parts of the sentences of the fact and the condition ``gpu_out_of_memory``."""

OOM_EVENTS: Final = ("cuda_oom", "warmup_oom", "load_oom")
_GB: Final = 10**9
_MIB: Final = 2**20
_GIB: Final = 2**30
_PARTS: Final = (
    (("requested_bytes", "tried to allocate {}"), ("free_bytes", "{} free on the GPU"), ("total_bytes", "{} in all")),
    (
        ("allocated_bytes", "{} allocated"),
        ("private_pool_bytes", "{} of it in private pools"),
        ("reserved_unallocated_bytes", "{} reserved but unallocated"),
    ),
)


def count(s: Signals) -> int | None:
    """Out-of-memory lines of the last ten minutes; ``None`` if no log was read."""
    return sum(s.events.get(name, 0) for name in OOM_EVENTS) if s.events_known else None


def happened(s: Signals) -> bool | None:
    """Whether there are such lines; ``None`` if no log was read."""
    lines = count(s)
    return None if lines is None else lines > 0


def times(s: Signals) -> str:
    """Number of such lines: "once", "3 times"."""
    lines = count(s) or 0
    return "once" if lines == 1 else f"{lines} times"


def figures(s: Signals, t: Thresholds) -> str:
    """Allocator numbers of the last error that has some, as the end of a sentence."""
    device, torch = (
        ", ".join(form.format(_size(s.oom[name])) for name, form in part if name in s.oom) for part in _PARTS
    )
    found = (f"; last: {device}" if device else "") + (f"; PyTorch: {torch}" if torch else "") or ", without numbers"
    if fragmented(s.oom, t):
        found += f" (probably fragmented: {t['fragmentation_warning_bytes'] / _GB:.0f} GB or more lie in pieces)"
    return found


def fragmented(figures: Mapping[str, float], t: Thresholds) -> bool:
    """Whether an allocation failed although much was reserved unused: torch frees whole unused blocks first, so what
    remains are pieces of blocks in use.
    """
    return figures.get("reserved_unallocated_bytes", 0.0) >= t["fragmentation_warning_bytes"]


def _size(value: float) -> str:
    number, unit = (value / _GIB, "GiB") if value >= _GB else (value / _MIB, "MiB")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"
