"""What ``kvpressure top`` shows: a table of engines, the worst first, or one engine's evidence and actions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpressure.advice.wording import name_of
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import EngineState
from kvpressure.printable import duration, say, visible
from kvpressure.publish.collector import worst_first
from kvpressure.publish.page.view import headline, said, verdict_in_words
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox import report
from kvpressure.toolbox.history import Case, FoundEngines

KEYS: Final = "up/down select, enter or 1-9 open, q quit"
OPEN_KEYS: Final = "up/down scroll, enter back, q quit"
_STYLES: Final = {
    "stalled": "bold red",
    "kv_pressure": "bold red",
    "transfer_bound": "yellow",
    "concurrency_limited": "yellow",
    "host_bound": "yellow",
    "compute_bound": "yellow",
    "unknown": "magenta",
    "healthy": "green",
    "idle": "cyan",
}
_Figure = tuple[str, int, Callable[[EngineState], str]]
_FIGURES: Final[Sequence[_Figure]] = (
    ("SINCE", 6, lambda engine: _in_short(duration(engine.signals.time - engine.diagnosis.since))),
    ("KV", 5, lambda engine: _figure(engine, engine.signals.kv.kv_used_ratio, "ratio")),
    ("WAIT", 6, lambda engine: _figure(engine, engine.signals.load.waiting)),
    ("TTFT", 6, lambda engine: _in_short(_figure(engine, engine.signals.latency.ttft.get("0.95"), "seconds"))),
    ("TOK/S", 6, lambda engine: _figure(engine, engine.signals.throughput.generation_tokens_per_second)),
    ("GPU", 5, lambda engine: _figure(engine, engine.signals.compute.gpu_utilization, "ratio")),
)
"""Title, width and text of each column after engine and verdict; a narrow terminal lacks the last ones."""
_DIGITS: Final = "123456789"
_NUMBER_WIDTH: Final = len(">1")
_NAME_WIDTH: Final = 12
_VERDICT_WIDTH: Final = len("concurrency limited")

_INDENT: Final = "            "
_STEPS: Final = {"up": -1, "down": 1}

Place = tuple[str, EngineKey]


class LiveTable:
    """The rows, which of them is selected, and the one that is open."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._rows: dict[Place, tuple[Case, FoundEngines]] = {}
        self._notes: tuple[str, ...] = ("waiting for the first answer ...",)
        self._selected: Place | None = None
        self._open = False
        self._scrolled = 0

    def update(self, looks: Sequence[FoundEngines]) -> None:
        """Show what was found now."""
        found = [(case, look) for look in looks for case in look.cases]
        found.sort(key=lambda row: worst_first(row[0].view.engine))
        self._rows = {(look.again, case.view.engine.key): (case, look) for case, look in found}
        self._notes = tuple(note for look in looks for note in look.warnings)
        if self._selected not in self._rows:
            self._selected, self._open = next(iter(self._rows), None), False

    def press(self, key: str) -> bool:
        """React to a key; False to quit."""
        places = list(self._rows)
        if key in _DIGITS[: len(places)]:
            self._selected, self._open, self._scrolled = places[_DIGITS.index(key)], True, 0
        elif key == "enter":
            self._open, self._scrolled = not self._open and bool(places), 0
        elif key == "back":
            self._open = False
        elif key in _STEPS and self._open:
            self._scrolled = max(0, self._scrolled + _STEPS[key])
        elif key in _STEPS and places:
            at = places.index(self._selected) if self._selected in places else 0
            self._selected = places[max(0, min(len(places) - 1, at + _STEPS[key]))]
        return key != "q"

    def shown(self, width: int, height: int) -> RenderableType:
        """The whole screen."""
        if self._open and self._selected:
            body: list[RenderableType] = [*self._opened(self._selected, width, height - 1)]
            keys, used = OPEN_KEYS, len(body)
        else:
            above = self.above()
            rows = max(1, height - len(above) - 2)  # without the titles of the columns, and the keys
            body = [*above, self.table(width, rows)]
            keys, used = KEYS, len(above) + 1 + min(len(self._rows), rows)
        return Group(*body, *[Text()] * (height - 1 - used), _line(keys, "dim"))

    def above(self) -> list[Text]:
        """All engines in one sentence, and what is wrong with an input."""
        engines = [case.view.engine for case, _ in self._rows.values()]
        notes = [_line(note, "bold red") for note in self._notes]
        return notes if notes and not engines else [_line(headline(map(said, engines), len(engines)), "bold"), *notes]

    def table(self, width: int, height: int | None = None) -> Table:
        """The engines; with a ``height``, the selected one and those around it."""
        name, verdict, figures = _widths(width)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("", width=_NUMBER_WIDTH, justify="right", no_wrap=True)
        table.add_column("ENGINE", width=name, no_wrap=True)
        table.add_column("VERDICT", width=verdict, no_wrap=True)
        for title, size, _ in figures:
            table.add_column(title, width=size, justify="right", no_wrap=True)
        places = list(self._rows)
        at = places.index(self._selected) if self._selected in places else 0
        first = 0 if height is None else max(0, at + 1 - height)
        for number, place in islice(enumerate(places), first, None if height is None else first + height):
            engine = self._rows[place][0].view.engine
            selected = height is not None and place == self._selected
            table.add_row(
                f"{'>' if selected else ''}{_DIGITS[number : number + 1]}",
                _name(engine.key, name),
                Text(visible(verdict_in_words(engine)), _STYLES.get(engine.diagnosis.verdict, "")),
                *(text(engine) for _, _, text in figures),
                style="reverse" if selected else "",
            )
        return table

    def _opened(self, place: Place, width: int, height: int) -> Iterator[Text]:
        """An engine as ``diagnose`` prints it, from the line scrolled to."""
        case, look = self._rows[place]
        (answer,) = report.answers(FoundEngines((case,), look.again, {}), self._thresholds)
        lines = [*report.evidence_lines(answer), "", *report.next_lines(answer)]
        parts = [part for line in lines for part in wrapped(visible(line), width)]
        self._scrolled = max(0, min(self._scrolled, len(parts) - height))
        return map(Text, parts[self._scrolled : self._scrolled + height])


def _widths(width: int) -> tuple[int, int, list[_Figure]]:
    """Widths of the columns of engine and verdict, and the figures that fit beside them."""
    room, figures = width - _NUMBER_WIDTH - 2, list(_FIGURES)  # each column but the last has a blank after it
    while figures and room - sum(1 + size for _, size, _ in figures) < _NAME_WIDTH + _VERDICT_WIDTH:
        figures.pop()
    room -= sum(1 + size for _, size, _ in figures)
    verdict = max(_VERDICT_WIDTH, 2 * room // 5)
    return max(1, room - verdict), verdict, figures


def _line(text: str, style: str) -> Text:
    return Text(visible(text), style, no_wrap=True, overflow="ellipsis")


def _figure(engine: EngineState, value: float | None, unit: str = "") -> str:
    """A number, or "-" where it is unknown or the engine is down."""
    return say(value, unit) if engine.up and value is not None else "-"


def _in_short(time: str) -> str:
    """A time in its largest unit: ``12 min``."""
    return " ".join(time.split()[:2])


def _name(key: EngineKey, width: int) -> str:
    """The engine's name; where it is too long the pod's, whose end tells it from others."""
    if len(name := name_of(key)) > width and key.pod:
        name = visible(key.pod) + ("" if key.engine in ("", "0") else f" engine {key.engine}")
    return name if len(name) <= width else f"…{name[1 - width :]}"


def wrapped(line: str, width: int) -> list[str]:
    """A line on as many as it takes; a command so that the lines are still that command when pasted."""
    if not line.lstrip().startswith("$ "):
        return textwrap.wrap(line, width, subsequent_indent=_INDENT) or [""]
    whole = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(whole, width - 2, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    *before, last = (part.replace("\0", " ") for part in parts)
    return [*(f"{part} \\" for part in before), last]
