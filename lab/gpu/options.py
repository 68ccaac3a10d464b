"""What one run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """``reads``: readings per identity. ``phase``: seconds of each load, after ``settle``. ``leak_minutes``: of
    readings.

    ``load``: arguments of ``lab.gpu.load``. ``fragment``: the command that drives torch's allocator, where not
    ``lab.gpu.fragment``.
    """

    results: Path
    reads: int = 150
    phase: float = 20.0
    settle: float = 4.0
    leak_minutes: float = 10.0
    load: tuple[str, ...] = ()
    fragment: tuple[str, ...] = ()
