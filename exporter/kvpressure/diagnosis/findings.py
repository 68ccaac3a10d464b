"""All findings about one engine: one table of rows, one of numbers, found and put into words when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from kvpressure.diagnosis import conditions, facts
from kvpressure.diagnosis.finding import Finding, View
from kvpressure.diagnosis.logic import listed
from kvpressure.engines.registry import dialect
from kvpressure.model.state import Found
from kvpressure.printable import Asked
from kvpressure.settings.thresholds import Thresholds

ROWS: Final[Mapping[str, Finding]] = {
    row.name: row for row in (*facts.FACTS, *conditions.CONDITIONS, *conditions.ALERTED)
}
PUBLISHED: Final = tuple(row.name for row in ROWS.values() if row.published)
NUMBERS: Final[Mapping[str, Callable[[View], str]]] = {**facts.NUMBERS, **conditions.NUMBERS}
EVIDENCE: Final = (*(row.name for row in facts.FACTS), "prefix_cache_collapsed", "gpu_out_of_memory")
"""What rules read."""
_WORDS: Final = frozenset(
    {"max_num_batched_tokens", "max_num_seqs", "preempted", "preemptions"}
)  # an engine may have its own


class Values(dict[str, bool | None]):
    """Findings by name, each found when first asked for. ``fresh``: the view without metrics that are stale."""

    __slots__ = ("_fresh", "view")

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view
        self._fresh: View | None = None

    def __missing__(self, name: str) -> bool | None:
        row = ROWS[name]
        value = self[name] = row.find(self.of(row))
        return value

    def of(self, row: Finding) -> View:
        """The view in which a row is found."""
        return self.fresh if row.fresh else self.view

    @property
    def fresh(self) -> View:
        """The view, without the engine's metrics while they are stale."""
        if self._fresh is None:
            v = self.view
            up = self["page_fresh"] is True
            self._fresh = v if up else View(v.s.without_metrics(), v.recent, v.t, v.readings, v.utilization)
        return self._fresh


class Gathered(Mapping[str, Found]):
    """Findings about one engine at one moment, of the given names; sentences are written when read."""

    __slots__ = ("_names", "facts")

    def __init__(self, values: Values, names: tuple[str, ...] = EVIDENCE) -> None:
        self.facts, self._names = values, names

    def __getitem__(self, name: str) -> Found:
        value, row = self.facts[name], ROWS[name]
        return Found(name, value, partial(_sentence, row, value, self.facts.of(row)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def filled(self, text: str) -> str:
        """A sentence about a missing input with its numbers; a text that is only ``{finding}`` becomes that finding's
        sentence.
        """
        name = text[1:-1] if text.startswith("{") and text.endswith("}") else ""
        return self[name].text if name in ROWS else text.format_map(_numbers(self.facts.view))


def _sentence(row: Finding, value: bool | None, view: View) -> str:
    numbers = _numbers(view)
    needs = (facts.INPUTS[name] for name in row.needs if value is None)
    absent = dict.fromkeys(words.format_map(numbers) for words, read in needs if read(view) is None)
    return row.sentence(value, numbers, f"missing: {listed(list(absent))}" if absent else "")


def of(name: str) -> Finding:
    """The row of this name. Raises ``KeyError``."""
    return ROWS[name]


def clause(name: str, holds: bool, levels: Mapping[str, str]) -> str:
    """A finding (``holds``) or its opposite as a short clause; ``levels``: thresholds by name, as printed."""
    return (ROWS[name].title if holds else ROWS[name].denied).format_map(levels)


def levels(t: Thresholds, engine: str = "") -> Asked:
    """Thresholds by name, as printed, and words as the engine has them ("" = the default engine)."""
    return Asked(lambda name: dialect(engine).called(name) if name in _WORDS else t.entry(name).text)


def _numbers(view: View) -> Asked:
    others = levels(view.t, view.s.dialect)
    return Asked(lambda name: NUMBERS[name](view) if name in NUMBERS else others[name])
