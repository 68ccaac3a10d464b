"""Read a recording tick by tick: gzip or plain, memory independent of its length, damage reported and skipped."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvpressure.errors import InputError, refused_file
from kvpressure.files import open_packed
from kvpressure.model.readings import Scrape, Snapshot
from kvpressure.model.reasons import DNS, REASONS, REFUSED, RESET, TIMEOUT, UNREACHABLE
from kvpressure.recording.fields import MalformedTick
from kvpressure.recording.format import Header, header_from_json, tick_from_json
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape

MAX_LINE_BYTES: Final = 16 * 1024 * 1024  # a tick of a node full of engines is below 5 MiB
"""One line of a recording. Beyond: the tick is skipped. Shown as: reported by the command."""
_MAX_SCANNERS: Final = 1024


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """A line that was skipped, or the place where a damaged file ends."""

    line: int
    text: str


class Reader(AbstractContextManager["Reader"]):
    """Iterate over the snapshots of one recording; use as a context manager.

    ``on_problem`` is called for every skipped line and for a truncated end; the rest is read. ``keep_exposition``
    keeps the raw text in the pages (for recording again). ``rewrite`` edits every page's text before it is parsed.
    Raises ``InputError`` when the file cannot be opened or its first line is no header.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        on_problem: Callable[[ReadProblem], None] | None = None,
        keep_exposition: bool = False,
        rewrite: Callable[[str], str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._on_problem = on_problem or (lambda _problem: None)
        self._keep = keep_exposition
        self._rewrite = rewrite
        self._scanners: OrderedDict[str, Scanner] = OrderedDict()
        self._line = 0
        self._open = ExitStack()
        try:
            self._stream = self._open.enter_context(open_packed(self.path, pipe=True))
        except OSError as error:
            raise InputError(refused_file(str(path), error, "a recording (kvpressure record writes one)")) from error
        try:
            self.header: Header = header_from_json(self._first_line(), str(path))
        except BaseException:
            self._open.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[Snapshot]:
        while True:
            line = self._next_line()
            if line is None:
                return
            if line.isspace():
                continue
            try:
                yield tick_from_json(line, self._page)
            except MalformedTick as error:
                cut = "" if line.endswith(b"\n") else "cut off: "
                self._on_problem(ReadProblem(self._line, f"{cut}{error}"))

    def _first_line(self) -> bytes:
        try:
            line = self._read_line()
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"{self.path}: damaged: {error}; give a complete recording") from error
        return line or b""

    def _next_line(self) -> bytes | None:
        """The next line that is short enough; None at the end, be it a damaged one."""
        while True:
            try:
                line = self._read_line()
            except (EOFError, OSError, zlib.error) as error:
                self._on_problem(ReadProblem(self._line + 1, f"file ends here: {error}"))
                return None
            if line is not None:
                return line or None
            self._on_problem(ReadProblem(self._line, f"longer than {MAX_LINE_BYTES} bytes"))

    def _read_line(self) -> bytes | None:
        """A line with its end, empty at the end of the file, None for one that was too long (it is skipped)."""
        line = self._stream.readline(MAX_LINE_BYTES)
        if line:
            self._line += 1
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            return line
        while line and not line.endswith(b"\n"):
            line = self._stream.readline(MAX_LINE_BYTES)
        return None

    def _page(self, text: str | None, *, target: str, error: str | None = None, **identity: Any) -> Scrape:
        """One engine's page; a scanner per target remembers the page's layout, which makes replay fast."""
        scanner = self._scanners.get(target)
        if scanner is None:
            scanner = self._scanners[target] = Scanner()
            if len(self._scanners) > _MAX_SCANNERS:
                self._scanners.popitem(last=False)
        if text is not None and self._rewrite is not None:
            text = self._rewrite(text)
        reason = None if error is None else _reason(error)
        return parse_scrape(text, target=target, error=reason, scanner=scanner, keep_text=self._keep, **identity)


_WORDS: Final = {"refused": REFUSED, "timed out": TIMEOUT, "timeout": TIMEOUT, "reset": RESET, "resolve": DNS}


@lru_cache(maxsize=256)
def _reason(error: str) -> str:
    """A recorded failure as one of the closed set of reasons; recordings of other makers hold free text."""
    if error in REASONS:
        return error
    return next((reason for word, reason in _WORDS.items() if word in error.lower()), UNREACHABLE)
