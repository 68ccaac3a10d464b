"""Becomes less than root, the way a container does: another user, or root without capabilities.

As a program: ``python -m lab.gpu.privileges IDENTITY COMMAND...`` drops and then becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Final

AS_IS: Final = "as started"
USER: Final = "uid 65532"
NO_CAPABILITIES: Final = "root without capabilities"
IDENTITIES: Final = (AS_IS, USER, NO_CAPABILITIES)

UID: Final = 65532
LAST_CAPABILITY: Final = 63  # the kernel says EINVAL above the last one it knows

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522


def become(identity: str) -> None:
    """Drop for good. Raises ``OSError`` when that is refused, e.g. because this process is not root."""
    if identity == AS_IS:
        return
    if os.getuid() != 0:
        raise PermissionError(f"only root can become {identity!r}")
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if identity == USER:
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
    _clear_capabilities(libc)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def facts() -> dict[str, str]:
    """Who this process is, in the kernel's words."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: " ".join(value.split())
        for name, _, value in lines
        if name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
    }


def _clear_capabilities(libc: Any) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


if __name__ == "__main__":
    become(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
