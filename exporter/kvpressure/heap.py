"""Keeps the C library from holding on to memory that is free again.

glibc gives every thread an arena of its own, and after the first large block it keeps all blocks of that size in them.
A process with a thread for each engine then holds many times what its largest pages took: 108 instead of 49 MiB with
sixteen pages of 4 MiB.
"""

from __future__ import annotations

import ctypes
from typing import Final

# Numbers of <malloc.h>, and what to set. A fixed threshold is one that does not grow with use.
_TRIM_THRESHOLD: Final = (-1, 128 * 1024)
_MMAP_THRESHOLD: Final = (-3, 64 * 1024)
_ARENA_MAX: Final = (-8, 2)


def keep_small() -> bool:
    """Tell the C library, before threads are started. False where it is not glibc, which changes nothing else."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    answers = [mallopt(*setting) for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX)]
    return all(answer == 1 for answer in answers)
