"""A terminal that shows a live table, and its keys."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.control import Control

from kvpressure.toolbox.history import FoundEngines
from kvpressure.toolbox.live_table import LiveTable

_KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "back",
    b"\x7f": "back",
}

Looks = Iterator[Sequence[FoundEngines]]


def is_possible() -> bool:
    """Whether this process has a terminal whose screen can be written anew, with keys."""
    streams = (sys.__stdin__, sys.__stdout__)
    return all(stream and stream.isatty() for stream in streams) and not Console(file=sys.__stdout__).is_dumb_terminal


def show(looks: Looks, table: LiveTable) -> None:
    """Show each of ``looks`` until the user quits or interrupts; raises what ``looks`` raises."""
    console = Console(file=sys.__stdout__, highlight=False)  # the streams of the commands escape what moves a cursor
    newest: deque[Sequence[FoundEngines] | BaseException] = deque(maxlen=1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGWINCH, lambda *_: None)  # wakes: the screen has another size
    interrupts: list[int] = []  # an exception of a handler is lost where it happens to fall into a finalizer
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: interrupts.append(which))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would not
    threading.Thread(target=_follow, args=(looks, newest, wake), daemon=True).start()
    with _keys_at_once() as keyboard, console.screen() as screen:
        while True:
            console.control(Control.home())
            screen.update(table.shown(*console.size))
            ready, _, _ = select.select([keyboard, woken], [], [])
            if woken in ready:
                os.read(woken, select.PIPE_BUF)
            if interrupts:
                raise KeyboardInterrupt
            while newest:
                found = newest.popleft()
                if isinstance(found, BaseException):
                    raise found
                table.update(found)
            if keyboard in ready and not all(table.press(key) for key in _keys(os.read(keyboard, select.PIPE_BUF))):
                return


def _follow(looks: Looks, newest: deque[Sequence[FoundEngines] | BaseException], wake: int) -> None:
    """Read in a thread of its own: a server that is slow must not delay a key."""
    try:
        for look in looks:
            newest.append(look)
            os.write(wake, b"\0")
    except BaseException as error:
        newest.append(error)
        os.write(wake, b"\0")


def _keys(typed: bytes) -> list[str]:
    """The keys in what a terminal sent; q where it is gone."""
    return [_NAMES.get(key, key.decode("latin-1")) for key in _KEY.findall(typed)] or ["q"]


@contextmanager
def _keys_at_once() -> Iterator[int]:
    """Standard input, each key as it is pressed and unseen."""
    keyboard = sys.__stdin__.fileno() if sys.__stdin__ else 0
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
