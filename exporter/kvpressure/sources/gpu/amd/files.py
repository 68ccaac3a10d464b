"""Reads the driver's small text files, and tells why one could not be read."""

from __future__ import annotations

import errno
import os
from typing import Final

from kvpressure.files import read_file
from kvpressure.sources.base import CountedFailures

NO_PERMISSION: Final = "no_permission"
BUSY: Final = "busy"
LOST: Final = "lost"
IO_ERROR: Final = "io_error"
INVALID_DATA: Final = "invalid_data"  # impossible content
PARTITIONS_UNSEEN: Final = "partitions_unseen"  # a GPU is split, and KFD does not show into what

_MAX_BYTES: Final = 16384  # a KFD node's properties are about 1 KiB
_REASON_BY_ERRNO: Final = {
    errno.EACCES: NO_PERMISSION,
    errno.EPERM: NO_PERMISSION,  # also while the GPU is being reset, and for KFD nodes outside our device cgroup
    errno.EBUSY: BUSY,
    errno.EAGAIN: BUSY,
    errno.ENODEV: LOST,
    errno.ENXIO: LOST,
}
_NORMAL: Final = frozenset(
    {  # the GPU does not have this value; the file may exist all the same
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.ENOSYS,
        errno.ENODATA,
    }
)


class CountingFiles(CountedFailures):
    """Reads files and counts failures by reason; what the hardware does not have is no failure."""

    def text(self, path: str) -> str | None:
        """The stripped content, or None when it cannot be read or is empty."""
        with self.isolated(f"file {path}"):
            return self._text(path)
        return None

    def _text(self, path: str) -> str | None:
        try:
            raw = read_file(path, _MAX_BYTES)
        except OSError as error:
            if error.errno not in _NORMAL:
                self._errors[_REASON_BY_ERRNO.get(error.errno or 0, IO_ERROR)] += 1
            return None
        return raw.decode("utf-8", "replace").strip() or None

    def number(self, path: str) -> int | None:
        """The file's non-negative integer, or None."""
        text = self.text(path)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > 20:
            self.reject()
            return None
        return int(text)

    def label(self, path: str) -> str | None:
        """The content as a label value: printable and at most 100 characters, or None."""
        text = self.text(path)
        return text[:100] if text is not None and text.isprintable() else None

    def reject(self, reason: str = INVALID_DATA) -> None:
        """Count an impossible value, or another reason."""
        self._errors[reason] += 1


def names(path: str) -> list[str]:
    """Entries of a directory, none when it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []
