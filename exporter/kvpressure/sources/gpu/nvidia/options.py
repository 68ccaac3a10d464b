"""Settings of the NVIDIA source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHARE_OF_DEADLINE: Final = 0.8
"""A reading abandons hanging calls at this share of the source's deadline, so that the other GPUs' readings arrive in
time.
"""


@dataclass(frozen=True, slots=True)
class NvidiaOptions:
    """``gpm``: read SM, tensor and DRAM activity. ``budget_seconds``: how long one reading may wait for calls.
    ``host_sys``: the host's sysfs.
    """

    gpm: bool = False
    budget_seconds: float = 4.0
    host_sys: Path = Path("/sys")

    @classmethod
    def of(cls, settings: Any) -> NvidiaOptions:
        """From ``kvpressure.settings.settings.Settings``; missing attributes have their defaults."""
        collector = getattr(settings, "collectors", {}).get("nvidia")
        return cls(
            gpm=getattr(settings, "nvidia_gpm", False),
            budget_seconds=SHARE_OF_DEADLINE * (collector.deadline_seconds if collector else 5.0),
            host_sys=Path(getattr(settings, "host_sys", "/sys")),
        )
