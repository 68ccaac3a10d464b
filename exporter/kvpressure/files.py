"""Names and files from outside: the one way to make a path component of text, and the one way to open a file.

Whoever may create a pod chooses names, and whoever shares a volume decides what a name in it is: a link, a pipe
without a writer, a device without an end. Nothing here waits for one, except for a pipe that a person named.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

MAX_COMPONENT_BYTES: Final = 255  # of one name, in every file system of Linux
_CHUNK_BYTES: Final = 64 * 1024
_WAITS: Final = "waits for more data, so it is not a regular file"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_NEVER_WAITING: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def component(text: str) -> str | None:
    """``text`` as one component of a path; None where it cannot be one: empty, dots only, with a separator, or too long
    for a file system.
    """
    try:
        size = len(os.fsencode(text))
    except UnicodeEncodeError:
        return None
    usable = text.strip(".") and not {"/", "\0"} & set(text) and size <= MAX_COMPONENT_BYTES
    return text if usable else None


def below(root: Path, *names: str) -> Path | None:
    """The path of ``names`` below ``root``, None where one of them cannot be a component."""
    return None if any(component(name) is None for name in names) else root.joinpath(*names)


def open_file(path: str | Path, *, root: Path | None = None, pipe: bool = False) -> io.BufferedReader:
    """The regular file at ``path``, opened for reading without waiting.

    ``root``: the file has to be below it, and no link below it is followed. ``pipe``: a person named the file, so it
    may be a pipe, whose writer is waited for. Raises ``OSError``, for anything that is not such a file as well.
    """
    with _plainly_refused(path):
        return io.BufferedReader(_Regular(_opened(path, root, pipe), "rb"))


def read_file(path: str | Path, most: int, *, root: Path | None = None, pipe: bool = False) -> bytes:
    """The first ``most`` bytes of a file, opened as by ``open_file``. Raises ``OSError``."""
    parts, left = [], most
    with _plainly_refused(path):
        descriptor = _opened(path, root, pipe)
        try:
            while left and (part := os.read(descriptor, min(left, _CHUNK_BYTES))):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(descriptor)
    return b"".join(parts)


@contextlib.contextmanager
def open_packed(path: str | Path, *, pipe: bool = False) -> Iterator[BinaryIO]:
    """The content of a file, unpacked if it is gzip; opened as by ``open_file``. Raises ``OSError``."""
    with open_file(path, pipe=pipe) as file:
        if not file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast("BinaryIO", unpacked)


def checked(path: str | Path) -> str:
    """``path``, for a library that opens files by name. Raises ``OSError`` where ``open_file`` does."""
    open_file(path).close()
    return str(path)


def open_to_write(path: Path, mode: int = 0o666) -> int:
    """A descriptor to write the regular file at ``path``, made if missing, not emptied. A link is not followed. Raises
    ``OSError``.
    """
    with _plainly_refused(path):
        return _checked(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | _NEVER_WAITING, mode), path)


@contextlib.contextmanager
def _plainly_refused(path: str | Path) -> Iterator[None]:
    """Raise ``OSError`` with plain words where Python or the system says what nobody understands."""
    try:
        yield
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "not a path", str(path)) from error
    except BlockingIOError as error:
        raise BlockingIOError(errno.EAGAIN, _WAITS, str(path)) from error


class _Regular(io.FileIO):
    """Fails where there is no data for now: a file with an end always has some, or ends (``/proc/kmsg`` does not)."""

    def readinto(self, buffer: Any) -> int:
        count = cast("int | None", super().readinto(buffer))
        if count is None:
            raise BlockingIOError(errno.EAGAIN, _WAITS)
        return count


def _opened(path: str | Path, root: Path | None, pipe: bool) -> int:
    """A descriptor of the file, as ``open_file`` says."""
    waits = pipe and stat.S_ISFIFO(Path(path).stat().st_mode)
    flags = os.O_CLOEXEC if waits else _NEVER_WAITING
    return _checked(os.open(path, flags) if root is None else _open_below(root, str(path), flags), path, pipe)


def _open_below(root: Path, path: str, flags: int) -> int:
    parts = path.removeprefix(f"{root}/").split("/") if path.startswith(f"{root}/") else [""]
    if None in map(component, parts):
        raise OSError(errno.EINVAL, f"not a file below {root}", path)
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            outer, at = at, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(outer)
        return os.open(parts[-1], flags | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)


def _checked(descriptor: int, path: str | Path, pipe: bool = False) -> int:
    """The descriptor if it is of a regular file, or of a pipe that may be one."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode)):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "neither a regular file nor a pipe" if pipe else "not a regular file", str(path))
