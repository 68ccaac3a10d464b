"""One container's log on the node: ``/var/log/pods/<ns>_<pod>_<uid>/<container>/<restarts>.log`` and its rotations;
and a file to which the runs of a server append.

Bounded whatever the container writes: bytes per read, line length, memory. Only the first ``MAX_LINE`` bytes of a
line are used. The runtime's format (CRI, or Docker's JSON) is removed, and lines that it split are joined.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpressure.engines.registry import log_words
from kvpressure.files import open_file, open_packed
from kvpressure.model.log_events import MAX_LINE
from kvpressure.parsed import json_of, mapping, moment, text

CHUNK_BYTES: Final = 65536
HEAD_BYTES: Final = 512 * 1024  # of a log that is new here: its start-up lines
TAIL_BYTES: Final = 256 * 1024  # and its end
SKIP_BYTES: Final = 16 * 1024 * 1024  # a log with more unread bytes is followed from its end again
MAX_FILES: Final = 1000  # names in one directory that are looked at

_LIVE: Final = re.compile(r"(\d{1,9})\.log")
_ROTATED: Final = re.compile(r"(\d{1,9})\.log\.(\d{8}-\d{6})(\.gz)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the container: text without line end, and the runtime's time stamp as written."""

    stamp: str
    text: str

    @property
    def time(self) -> float | None:
        """The stamp as Unix seconds; None without one."""
        return moment(self.stamp)


class _Joiner:
    """Removes the runtime's format and joins the parts (``P``) of a long line up to its end (``F``)."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    @property
    def open(self) -> bool:
        """Whether a line is incomplete."""
        return bool(self._parts)

    def entry(self, line: bytes) -> Entry | None:
        """The message that ``line`` completes; None for a part."""
        if line.startswith(b'{"log":'):
            return _docker(line)
        fields = line.split(b" ", 3)
        if len(fields) < 3 or fields[1] not in (b"stdout", b"stderr") or fields[2][:1] not in (b"F", b"P"):
            return Entry("", line.decode("utf-8", "replace"))
        message = fields[3] if len(fields) == 4 else b""
        stream = fields[1]
        if fields[2][:1] == b"P" or stream in self._parts:
            held = self._parts.setdefault(stream, bytearray())
            held += message[: max(0, MAX_LINE - len(held))]
            if fields[2][:1] == b"P":
                return None
            message = bytes(self._parts.pop(stream))
        return Entry(fields[0].decode("ascii", "replace"), message[:MAX_LINE].decode("utf-8", "replace"))


def _docker(line: bytes) -> Entry:
    whole = line.decode("utf-8", "replace")
    document = mapping(json_of(whole))
    message = document.get("log")
    return Entry(text(document.get("time")), message.rstrip("\n") if isinstance(message, str) else whole)


class Tail:
    """An open file, read from ``offset`` up to ``end`` (None = follow). ``cut``: it starts in the middle of a line."""

    def __init__(self, path: Path, offset: int = 0, end: int | None = None, cut: bool = False) -> None:
        self._words = tuple(word.encode() for word in log_words())
        self.path = path
        self.offset = offset  # of the next byte to read
        self.end = end
        self._file = open_file(path)
        self._fd = self._file.fileno()
        self.inode = os.fstat(self._fd).st_ino
        self._carry = b""
        self._cut = cut  # drop everything up to the next line end
        self._joiner = _Joiner()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, budget: int) -> tuple[list[Entry], int]:
        """Messages from at most ``budget`` further bytes, and the bytes read (0 = at the end)."""
        entries: list[Entry] = []
        taken = 0
        while taken < budget:
            size = min(CHUNK_BYTES, budget - taken)
            if self.end is not None:
                size = min(size, self.end - self.offset)
            chunk = os.pread(self._fd, size, self.offset) if size > 0 else b""
            if not chunk:
                break
            taken += len(chunk)
            self.offset += len(chunk)
            entries += self._entries(chunk)
        return entries, taken

    def backlog(self) -> int:
        """Unread bytes; below 0, the file is shorter than what was read."""
        return os.fstat(self._fd).st_size - self.offset

    def catch_up(self) -> bool:
        """Begin again after a truncation, and near the end of more than ``SKIP_BYTES``; whether bytes were skipped."""
        backlog = self.backlog()
        if backlog < 0:
            self._restart(0, cut=False)
        elif backlog > SKIP_BYTES:
            self._restart(self.offset + backlog - TAIL_BYTES, cut=True)
        return backlog > SKIP_BYTES

    def _restart(self, offset: int, cut: bool) -> None:
        """Continue from ``offset`` and drop incomplete lines."""
        self.offset = offset
        self._carry = b""
        self._cut = cut
        self._joiner = _Joiner()

    def _entries(self, chunk: bytes) -> Iterator[Entry]:
        """Messages completed by ``chunk``; a chunk without any keyword is not even split into lines."""
        lines, end, rest = chunk.rpartition(b"\n")
        if not end:
            self._keep(chunk)
            return
        text = lines if self._cut else self._carry + lines
        first_is_rest, self._cut = self._cut, False
        self._carry = b""
        self._keep(rest)
        if self._joiner.open or b" P " in text or any(word in text for word in self._words):
            found = text.split(b"\n")
            for line in found[1:] if first_is_rest else found:
                entry = self._joiner.entry(line)
                if entry is not None:
                    yield entry

    def _keep(self, rest: bytes) -> None:
        """Keep the beginning of an incomplete line, at most ``MAX_LINE`` bytes of it."""
        if not self._cut:
            room = MAX_LINE + 64 - len(self._carry)  # the runtime's prefix stands in front
            self._carry += rest[: max(0, room)]


@dataclass(frozen=True, slots=True)
class LogFolder:
    """Files in a container's log directory."""

    live: tuple[int, ...]  # restart counts with a log, ascending
    rotated: tuple[str, ...]  # names, oldest first


def list_files(directory: Path) -> LogFolder:
    """Logs in ``directory``. Raises ``OSError``."""
    live: list[int] = []
    rotated: list[tuple[int, str, str]] = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_FILES:
                break
            if found := _LIVE.fullmatch(entry.name):
                live.append(int(found[1]))
            elif found := _ROTATED.fullmatch(entry.name):
                rotated.append((int(found[1]), found[2], entry.name))
    return LogFolder(tuple(sorted(live)), tuple(name for _, _, name in sorted(rotated)))


def head_of(path: Path) -> list[Entry] | None:
    """Messages at the beginning of a rotated log, compressed or not; None if unreadable."""
    try:
        with open_packed(path) as file:
            data = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return None
    joiner = _Joiner()
    return [entry for line in data.split(b"\n")[:-1] if (entry := joiner.entry(line)) is not None]


def _plain(names: Iterable[str]) -> frozenset[str]:
    """Names without ``.gz``, because logs are compressed later."""
    return frozenset(name.removesuffix(".gz") for name in names)


class ContainerLog:
    """Follows a container's log through rotations and restarts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.skipped = 0  # how often unread bytes or rotated files were skipped
        self._current = 0  # restart count of the log being followed
        self._segments: deque[Tail] = deque()
        self._heads: list[Entry] = []
        self._rotation_seen = False
        self._before: frozenset[str] = frozenset()  # rotated files that are older than the one being followed

    def close(self) -> None:
        """Close all files."""
        while self._segments:
            self._segments.popleft().close()

    def read(self, budget: int) -> tuple[list[Entry], int]:
        """Messages from at most ``budget`` bytes, and the bytes read. Raises ``OSError``."""
        if not self._segments:
            self._begin()
        entries, self._heads = self._heads, []
        taken = 0
        while taken < budget and self._segments:
            tail = self._segments[0]
            if tail.end is None:
                self.skipped += tail.catch_up()
            found, size = tail.read(budget - taken)
            entries += found
            taken += size
            if size == 0 and not self._advance(tail):
                break
        return entries, taken

    # --- where to begin -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        files = list_files(self.directory)
        if not files.live:
            return
        self._current = files.live[-1]
        try:
            self._start(files)
        except OSError:
            self.close()
            raise

    def _start(self, files: LogFolder) -> None:
        """Begin a new log: the end of the previous container's, the start-up lines, then the end."""
        current = files.live[-1]
        path = self.directory / f"{current}.log"
        size = path.stat().st_size
        self._before = _plain(files.rotated)
        if len(files.live) > 1:
            self._open_end(self.directory / f"{files.live[-2]}.log", follow=False)
        older = [name for name in files.rotated if name.startswith(f"{current}.log.")]
        if older:
            head = head_of(self.directory / older[0])
            self._heads, self.skipped = head or [], self.skipped + (head is None)
        if size > HEAD_BYTES + TAIL_BYTES:
            self._segments.append(Tail(path, 0, HEAD_BYTES))
            self._open_end(path, follow=True)
        else:
            self._segments.append(Tail(path))

    def _open_end(self, path: Path, follow: bool) -> None:
        size = path.stat().st_size
        start = max(0, size - TAIL_BYTES)
        self._segments.append(Tail(path, start, None if follow else size, cut=start > 0))

    # --- how to go on -------------------------------------------------------------------------------------------

    def _advance(self, tail: Tail) -> bool:
        """At the end of ``tail``: whether another file continues at once."""
        if tail.end is not None:
            self._segments.popleft().close()
            return True
        following = self._following(tail)
        if following is None or not self._rotation_seen:
            self._rotation_seen = following is not None  # the writer may still be busy with the old file: once more
            return False
        self._rotation_seen = False
        if following == self._current:
            self._count_rotated()
        self._segments.append(Tail(self.directory / f"{following}.log"))
        self._segments.popleft().close()
        self._current = following
        return True

    def _count_rotated(self) -> None:
        """Count the files that were rotated after the one being followed, and not read."""
        rotated = list_files(self.directory).rotated
        newer = _plain(name for name in rotated if name.startswith(f"{self._current}.log.")) - self._before
        self.skipped += max(0, len(newer) - 1)
        self._before = _plain(rotated)

    def _following(self, tail: Tail) -> int | None:
        """Restart count of the file that continues ``tail`` (the same after a rotation, higher after a restart), or
        None.
        """
        try:
            if (self.directory / f"{self._current}.log").stat().st_ino != tail.inode:
                return self._current
        except FileNotFoundError:
            pass  # between rename and reopen, or removed with its container
        return next((count for count in list_files(self.directory).live if count > self._current), None)


class AppendedLog(Tail):
    """Follows one file, to which several runs of a server may append."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._before = self.backlog()  # bytes that were there when it was opened

    def messages(self, budget: int) -> tuple[list[Entry], bool]:
        """Messages from at most ``budget`` bytes, and whether they were there before the file was opened, so that their
        age is unknown where the writer gives no time.
        """
        if self.backlog() < 0:
            self._before = 0
        self.catch_up()
        rest = self._before - self.offset
        return self.read(min(budget, rest) if rest > 0 else budget)[0], rest > 0
