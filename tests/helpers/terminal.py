"""A command in a real pseudo-terminal: what its screen shows, keys, and another size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from contextlib import suppress

_HOME = b"\x1b[H"
_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``kvpressure`` with a terminal of ``columns`` and ``rows``; a screen begins with the cursor at home."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, environ: Mapping[str, str] = {}) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "kvpressure", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=plain | {"TERM": "xterm-256color"} | environ,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # it is told of another size
        )
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.wait(10)
        os.close(self._theirs)

    def _read(self) -> None:
        with suppress(OSError):  # the terminal is closed
            while data := os.read(self._ours, 65536):
                self.written += data

    @property
    def screen(self) -> list[str]:
        """The lines of the newest screen, or all that was printed; without colours."""
        text = _SEQUENCE.sub(b"", self.written.rpartition(_HOME)[2]).decode()
        return [line.rstrip() for line in text.replace("\r", "").split("\n")]

    @property
    def text(self) -> str:
        return "\n".join(self.screen)

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal's settings are those of before the command."""
        return termios.tcgetattr(self._theirs) == self.before

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def resize(self, columns: int, rows: int) -> None:
        """Another size, as when a window is dragged."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def ends(self) -> int:
        return self.child.wait(20)
