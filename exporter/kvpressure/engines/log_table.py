"""Recognises the log lines of an inference server by a table of patterns; the public part of a line is what they match.

Pure, and linear in the length of a line. Patterns hold fixed words and numbers alone, so that nothing else of a line
leaves the node. A named group is a fact of ``log_events.FACTS``, the server's version, or a number of a failed
allocation; what has one name adds up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvpressure.model import ceilings
from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import ALLOCATION_EVENTS, LogEvent

SIZE: Final = r"-?[\d.]{1,20} ?(?:bytes|B|[KMGT]iB|GB)"
"""A size with its unit, which makes a group of it bytes."""
_UNITS: Final = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "GB": 2**30}  # GB: theirs
_NUMBER: Final = re.compile(r"(-?[\d.,]+) ?([A-Za-z]*)")

Found = tuple[str, Sequence[re.Match[str]]]
"""Event of a line, and the parts of the line that say so."""


@frozen
class LineForm:
    """One form of a line: all of ``needed`` are in it, the keyword first; ``more`` may be."""

    keyword: str
    event: str
    needed: tuple[re.Pattern[str], ...]
    more: tuple[re.Pattern[str], ...]


def row(keyword: str, event: str, *needed: str, more: Iterable[str] = ()) -> LineForm:
    """A row of a table; the first whose patterns are found gives the event."""
    return LineForm(
        keyword, event, tuple(map(re.compile, (re.escape(keyword), *needed))), tuple(re.compile(one) for one in more)
    )


def asked(path: str, event: str) -> LineForm:
    """The row of an accepted POST to this path, as uvicorn logs it."""
    return row(f'"POST {path}', event, rf'"POST {path}(?=[? ])', r'HTTP/[\d.]{1,3}" 200')


def find(table: Iterable[LineForm], line: str) -> Found | None:
    """The event of a line and its matched parts; ``None`` for any other line."""
    for one in table:
        if one.keyword in line:
            found = [match for pattern in one.needed if (match := pattern.search(line)) is not None]
            if len(found) == len(one.needed):
                return one.event, [*found, *filter(None, (pattern.search(line) for pattern in one.more))]
    return None


def event_of(found: Found) -> LogEvent:
    """The event with its numbers."""
    event, matches = found
    texts = [(name, text) for match in matches for name, text in match.groupdict().items() if text is not None]
    numbers: dict[str, float] = {}
    for name, text in texts:
        number = _number(text)
        if number is not None and (number > 0 or name.endswith("_bytes")):
            numbers[name] = numbers.get(name, 0.0) + number
    if event in ALLOCATION_EVENTS:
        return LogEvent(event, allocator=_with_unallocated(numbers))
    numbers.pop("version", None)
    return LogEvent(event, numbers, version=dict(texts).get("version"))


def _number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    number = ceilings.number_in(match[1].replace(",", ""), ceilings.BYTES) if match else None
    return None if match is None or number is None else number * _UNITS.get(match[2], 1)


def _with_unallocated(sizes: dict[str, float]) -> dict[str, float]:
    """The sizes, with the difference that older allocators leave to the reader."""
    reserved, allocated = sizes.pop("reserved_bytes", None), sizes.get("allocated_bytes")
    if reserved is None or allocated is None:
        return sizes
    return {**sizes, "reserved_unallocated_bytes": max(0.0, reserved - allocated)}


def public(line: str, found: Found) -> str:
    """The matched parts of a line in their order."""
    shown, end = "", 0
    for start, stop in sorted(match.span() for match in found[1]):
        if stop > end:
            shown += (" " if shown and start > end else "") + line[max(start, end) : stop]
            end = stop
    return shown
