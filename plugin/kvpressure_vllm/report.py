"""Reports as one small JSON file per process, replaced atomically, about once a second.

Directory: ``KVPRESSURE_PLUGIN_DIR``. Names: ``worker-<pid>.json``, ``frontend-<pid>.json``. Every file has its writer
(``namespace`` and ``pod`` from ``POD_NAMESPACE`` and ``POD_NAME``, ``pid``), the start of that process (``started``)
and the time of the report (``written``), both Unix seconds, so that a reader recognises files of earlier runs. A
missing or full directory is no error: the next second tries again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Final, ParamSpec

VERSION: Final = 1
EVERY_SECONDS: Final = 1.0
COST_SHARE: Final = 0.001  # of the process's time: a report that costs more is made less often
LONGEST_SECONDS: Final = 5.0  # but often enough to count as alive
LEFTOVER_SECONDS: Final = 60.0  # files that nobody has written for this long are removed by the next process
NAME: Final = re.compile(r"(?:worker|frontend)-\d{1,10}\.json")

_P = ParamSpec("_P")
_told: set[str] = set()

log = logging.getLogger("kvpressure.plugin")


def switched_on() -> bool:
    """Whether reports are switched on for this process."""
    return os.environ.get("KVPRESSURE_PLUGIN") == "1"


def directory() -> str | None:
    """Directory of the files; ``None`` = none."""
    return os.environ.get("KVPRESSURE_PLUGIN_DIR") or None


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


class ReportFile:
    """The file of this process for one kind of report ("worker" or "frontend")."""

    def __init__(self, kind: str, path: str) -> None:
        self._kind = kind
        self._directory = path
        self._name = os.path.join(path, f"{kind}-{os.getpid()}.json")  # noqa: PTH118
        self._new = os.path.join(path, f".{kind}-{os.getpid()}.new")  # noqa: PTH118
        self._started = time.time()
        self._tidied = False

    def write(self, values: Mapping[str, object]) -> bool:
        """Replace the file. False when the directory cannot be written."""
        body = {
            "kvpressure": VERSION,
            "kind": self._kind,
            "pid": os.getpid(),
            "started": self._started,
            "written": time.time(),
            "namespace": os.environ.get("POD_NAMESPACE", ""),
            "pod": os.environ.get("POD_NAME", ""),
            **values,
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        try:
            self._tidy()
            handle = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                os.fchmod(handle, 0o644)  # the exporter runs as another user, whatever the umask here
                os.write(handle, data)
            finally:
                os.close(handle)
            os.replace(self._new, self._name)  # noqa: PTH105
        except OSError:
            return False
        return True

    def _tidy(self) -> None:
        """Remove files of earlier processes, once."""
        if self._tidied:
            return
        with os.scandir(self._directory) as entries:
            old = [
                entry.path
                for entry in entries
                if NAME.fullmatch(entry.name)
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFTOVER_SECONDS
            ]
        for path in old:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        self._tidied = True
