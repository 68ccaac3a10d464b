"""A flag that signal handlers set."""

from __future__ import annotations

import signal
from collections.abc import Iterable


class SignalFlag:
    """Whether one of some signals came.

    It takes no lock, unlike ``threading.Event``: a handler runs in the main thread, between any two instructions, and
    would wait for ever for a lock that this thread holds.
    """

    def __init__(self) -> None:
        self._is_set = False

    def follow(self, numbers: Iterable[signal.Signals]) -> None:
        """From now on these signals set the flag, and do nothing else. Only for the main thread."""
        for number in numbers:
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        """A signal came."""
        self._is_set = True

    def clear(self) -> None:
        """Forget it."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether a signal came since the flag was last cleared."""
        return self._is_set
