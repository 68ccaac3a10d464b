"""When the plugin reports, and that nothing of it raises into vLLM."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Final, ParamSpec

EVERY_SECONDS: Final = 1.0
COST_SHARE: Final = 0.001  # of the process's time: a report that costs more is made less often
LONGEST_SECONDS: Final = 5.0  # but often enough to count as alive

_P = ParamSpec("_P")
_told: set[str] = set()

log = logging.getLogger("kvpressure.plugin")


def switched_on() -> bool:
    """Whether reports are switched on for this process."""
    return os.environ.get("KVPRESSURE_PLUGIN") == "1"


def guarded(function: Callable[_P, None]) -> Callable[_P, None]:
    """``function`` without exceptions: each type is logged once, and vLLM continues."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            kind = f"{function.__qualname__}: {type(error).__name__}"
            if kind not in _told:
                _told.add(kind)
                log.warning("kvpressure plugin: %s: %s (repetitions are not logged)", kind, error)

    return call


def repeat(report: Callable[[], None]) -> None:
    """Call ``report`` about once a second forever, less often if it takes more than its share of time."""
    while True:
        began = time.thread_time()
        report()
        spent = time.thread_time() - began
        time.sleep(min(max(EVERY_SECONDS, spent / COST_SHARE), LONGEST_SECONDS))
