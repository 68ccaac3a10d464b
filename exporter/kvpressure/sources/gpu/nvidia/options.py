"""Settings of the NVIDIA source."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

SHARE_OF_DEADLINE: Final = 0.8
"""A reading abandons hanging calls at this share of the source's deadline, so that the other GPUs' readings arrive in
time.
"""


@dataclass(frozen=True, slots=True)
class NvidiaOptions:
    """``mig``: read MIG instances. ``gpm``: read SM, tensor and DRAM activity. ``release_between_readings``: close
    the library after each reading, so that the driver can be unloaded; events and GPM need it open and are then off.
    ``budget_seconds``: how long one reading may wait for calls. ``host_sys``: the host's sysfs.
    """

    mig: bool = True
    gpm: bool = False
    release_between_readings: bool = False
    budget_seconds: float = 4.0
    host_sys: Path = Path("/sys")

    @classmethod
    def of(cls, settings: Any) -> NvidiaOptions:
        """From ``kvpressure.settings.settings.Settings``; missing attributes keep their defaults."""
        given = {
            field.name: getattr(settings, f"nvidia_{field.name}")
            for field in fields(cls)
            if hasattr(settings, f"nvidia_{field.name}")
        }
        if given.get("release_between_readings"):
            given["gpm"] = False
        if hasattr(settings, "host_sys"):
            given["host_sys"] = Path(settings.host_sys)
        collector = getattr(settings, "collectors", {}).get("nvidia")
        if collector is not None:
            given["budget_seconds"] = SHARE_OF_DEADLINE * collector.deadline_seconds
        return cls(**given)
