"""Writes recordings: one file, or a directory of rotated files of bounded total size.

Ticks are gathered for a moment and written as one gzip member in one system call. A killed process loses seconds at
most, and the file stays readable. A file has the suffix ``.part`` while it is written; a directory's next recorder
completes what a killed one left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import re
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final

from kvpressure.files import open_file, open_to_write
from kvpressure.model.readings import Snapshot
from kvpressure.model.state import RecorderHealth
from kvpressure.recording.format import Header, tick_to_json

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
DEFAULT_KEEP: Final = 8
FLUSH_SECONDS: Final = 2.0
_GATHER_BYTES: Final = 4 * 1024 * 1024  # written at once from here on, whatever the time
_COMPRESSION: Final = 3
_PART: Final = ".part"


REASONS: Final = ("disk_full", "no_permission", "read_only", "removed", "io_error", "full", "slow", "internal")
"""Why a tick was not recorded. ``slow``: the disk takes less than comes; ``full``: a single file has its
largest size.
"""
_REASON_OF: Final = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EACCES: "no_permission",
    errno.EPERM: "no_permission",
    errno.EROFS: "read_only",
    errno.ENOENT: "removed",
}


def reason_of(error: Exception) -> str:
    """One of ``REASONS``."""
    if isinstance(error, OSError):
        return _REASON_OF.get(error.errno or 0, "io_error")
    return "full" if isinstance(error, RecordingFull) else "internal"


class RecordingFull(Exception):
    """A single-file recording has reached its maximum size; the file is complete."""


class _File:
    """One recording being written under ``path`` + ``.part``, locked against other recorders."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.part = path.with_name(path.name + _PART)
        self._zip = path.name.endswith(".gz")
        self._fd = open_to_write(self.part, 0o640)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise FileExistsError(errno.EEXIST, "is being written by another recorder", str(self.part)) from None
        os.ftruncate(self._fd, 0)
        self.size = 0
        self.append(self.member([header.to_json()]))
        self.empty_size = self.size
        self.finished = False

    def member(self, lines: list[str]) -> bytes:
        """The lines as one gzip member or plain bytes."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if not self._zip:
            return data
        packer = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, 31)
        return packer.compress(data) + packer.flush()

    def append(self, data: bytes) -> None:
        """Write all of ``data`` or, raising ``OSError``, nothing, because half a member would hide what follows."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)

    @property
    def lost(self) -> bool:
        """Whether the file can no longer be written: it is complete, or was removed."""
        return self.finished or os.fstat(self._fd).st_nlink == 0

    def finish(self) -> None:
        """Give the file its final name."""
        if self.finished:
            return
        self.finished = True
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
        self.part.rename(self.path)


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Writes snapshots to ``out``; not for two threads at once.

    ``out`` is a file if its name ends in ``.jsonl`` or ``.jsonl.gz``: ``write`` raises ``RecordingFull`` when it
    reaches ``max_bytes``. Otherwise it is a directory: files are rotated at ``max_bytes`` and the newest ``keep``
    stay, so that the total is at most ``max_bytes * keep``; a tick that alone exceeds ``max_bytes`` is dropped and
    counted. Raises ``OSError`` as the file system does; ticks of a failed write are dropped and counted.
    """

    def __init__(
        self,
        out: str | Path,
        header: Header,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        keep: int = DEFAULT_KEEP,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ticks = 0
        self.dropped = 0
        self._header = header
        self._max_bytes = max_bytes
        self._keep = max(1, keep)
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._gathered: list[str] = []
        self._gathered_bytes = 0
        self._flushed_at = clock()
        self._number = 0
        self._directory = None if str(out).endswith((".jsonl", ".jsonl.gz")) and not Path(out).is_dir() else Path(out)
        if self._directory is None:
            if Path(out).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
            self._file = _File(Path(out), header)
        else:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._adopt(self._directory)
            self._number = max(
                (self._number_of(path.name.removesuffix(_PART)) for path in self._directory.iterdir()), default=0
            )
            self._file = self._next_file(self._directory)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The current file's final name."""
        return self._file.path

    def write(self, snapshot: Snapshot) -> None:
        """Add a tick. Its scrapes need their exposition, or they are recorded without content."""
        line = tick_to_json(snapshot)
        self._gathered.append(line)
        self._gathered_bytes += len(line)
        due = self._clock() - self._flushed_at >= self._flush_seconds
        if due or self._gathered_bytes >= _GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the gathered ticks; starts the next file when this one would exceed its bound."""
        self._flushed_at = self._clock()
        lines, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not lines:
            return
        before = self.ticks
        try:
            self._store(lines)
        finally:
            self.dropped += len(lines) - (self.ticks - before)

    def _store(self, lines: list[str]) -> None:
        """Write what fits; recreates a removed file or directory."""
        if self._file.lost:
            if self._directory is None:
                raise self._ended()
            self._file = self._next_file(self._directory)
        data = self._file.member(lines)
        if self._directory is not None and not self._fits(data) and self._file.size > self._file.empty_size:
            self._file.finish()
            self._file = self._next_file(self._directory)
        if self._fits(data):
            self._file.append(data)
            self.ticks += len(lines)
            return
        for line in lines:  # what fits; of a directory the others are dropped, a single file ends at the first
            data = self._file.member([line])
            if self._fits(data):
                self._file.append(data)
                self.ticks += 1
            elif self._directory is None:
                self._file.finish()
                raise self._ended()

    def _ended(self) -> Exception:
        """Why a single file takes no more."""
        if not self._file.finished:
            return FileNotFoundError(errno.ENOENT, "was removed", str(self._file.part))
        return RecordingFull(f"{self._file.path} has reached {self._max_bytes} bytes")

    def _fits(self, data: bytes) -> bool:
        return self._file.size + len(data) <= self._max_bytes

    def close(self) -> None:
        """Write the rest and give the file its final name."""
        with contextlib.suppress(RecordingFull):
            self.flush()
        self._file.finish()

    def _next_file(self, directory: Path) -> _File:
        """Remove the oldest files beyond ``keep`` and open the next. Numbers tell the age: clocks step."""
        directory.mkdir(parents=True, exist_ok=True)
        finished = [path for path in directory.iterdir() if self._number_of(path.name)]
        finished.sort(key=lambda path: self._number_of(path.name))
        for path in finished[: max(0, len(finished) - self._keep + 1)]:
            path.unlink(missing_ok=True)
        self._number += 1
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return _File(directory / f"{self._prefix}{self._number:06d}-{stamp}.jsonl.gz", self._header)

    def _adopt(self, directory: Path) -> None:
        """Name the files that a killed recorder left, but none that is still being written."""
        for part in directory.glob(f"*{_PART}"):
            if not self._number_of(part.name.removesuffix(_PART)):
                continue
            with contextlib.suppress(OSError), open_file(part, root=directory) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.rename(part.with_name(part.name.removesuffix(_PART)))

    @property
    def _prefix(self) -> str:
        node = re.sub(r"[^A-Za-z0-9.-]", "_", self._header.node)[:63]
        return f"kvpressure-{node}-" if node else "kvpressure-"

    def _number_of(self, name: str) -> int:
        """The number of a file of this node, counted from 1; 0 for any other file."""
        match = re.fullmatch(re.escape(self._prefix) + r"(\d{6,})-\d{8}T\d{6}Z\.jsonl\.gz", name)
        return int(match[1]) if match else 0


class BackgroundRecorder:
    """A recorder beside the monitor: a listener that never blocks it, however slow the disk is.

    Snapshots that arrive while ``backlog`` of them wait are dropped. ``error`` is the latest reason why writing
    failed; after a failure the next ticks are tried again.
    """

    def __init__(self, recorder: Recorder, *, backlog: int = 16, wall: Callable[[], float] = time.time) -> None:
        self.recorder = recorder
        self.dropped = 0
        self.error: Exception | None = None
        self.failed = threading.Event()
        self._wall = wall
        self._health = RecorderHealth("recorder")
        self._lock = threading.Lock()
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(backlog)
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def __call__(self, snapshot: Snapshot, _state: object = None) -> None:
        """Take a snapshot: the signature of a monitor listener."""
        try:
            self._queue.put_nowait(snapshot)
        except queue.Full:
            self.dropped += 1
            self._failing("slow")

    def health(self) -> RecorderHealth:
        """Health of the recorder. Thread-safe."""
        return replace(self._health, dropped=self.dropped + self.recorder.dropped)

    def _failing(self, reason: str) -> None:
        with self._lock:  # the monitor's thread says "slow", the recorder's everything else
            self._health = self._health.failed(reason)

    def _wrote(self) -> None:
        with self._lock:
            self._health = replace(self._health, up=True, reason=None, last_success=self._wall())

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, name the file, end the thread."""
        with contextlib.suppress(queue.Full):  # the disk hangs: leave the thread to end with the process
            self._queue.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            self._try(self.recorder.write, snapshot)
        self._try(self.recorder.close)

    def _try(self, action: Callable[..., None], *arguments: Snapshot) -> None:
        before = self.recorder.ticks
        try:
            action(*arguments)
            if self.recorder.ticks > before:
                self._wrote()
        except Exception as error:  # whatever it is, the thread lives and the next tick is tried
            self._failing(reason_of(error))
            if str(error) != str(self.error):  # a full disk fails every tick and is one line
                log.warning("cannot record: %s", error)
            self.error = error
            self.failed.set()
