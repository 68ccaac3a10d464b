"""All findings about one engine: one table of rows, found and put into words when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, TypeVar

from kvpressure.diagnosis import conditions, facts, rules, shown
from kvpressure.diagnosis.finding import NUMBERS, TEXTS, Finding, Recent, View, names_in, parts_known
from kvpressure.diagnosis.logic import listed
from kvpressure.engines.registry import dialect
from kvpressure.model.signals import Signals
from kvpressure.model.state import ACTIONABLE, Found
from kvpressure.printable import PERCENT, Asked, say
from kvpressure.settings.thresholds import Threshold, Thresholds

ROWS: Final[Mapping[str, Finding]] = {
    row.name: row
    for row in (*facts.FACTS, *conditions.CONDITIONS, *conditions.ALERTED, *conditions.SIGNATURE, *shown.SHOWN)
}
PUBLISHED: Final = tuple(row.name for row in ROWS.values() if row.published)
EVIDENCE: Final = (
    *(row.name for row in facts.FACTS),
    "kv_held_without_load",
    "prefix_cache_collapsed",
    "gpu_out_of_memory",
    "tier_too_small",
    "tier_saturated",
    *rules.TRANSFER_SIGNS,
    "drafts_rejected",
)
"""What rules read."""
_WORDS: Final = frozenset(
    {"max_model_len", "max_num_batched_tokens", "max_num_seqs", "preempted", "preemptions"}
)  # an engine may have its own
_LEADING: Final = {
    row.name: tuple(name for name in names_in(row.seen) if name in NUMBERS and NUMBERS[name].words)
    for row in ROWS.values()
}


_V = TypeVar("_V")
_SIGNS: Final = {"ratio": "% ", "seconds": "s ", "multiple": "× "}


class Values(dict[str, bool | None]):
    """Findings by name, each found when first asked for. ``fresh``: the view without metrics that are stale."""

    __slots__ = ("_fresh", "view")

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view
        self._fresh: View | None = None

    def __missing__(self, name: str) -> bool | None:
        row = ROWS[name]
        value = self[name] = row.find((self._fresh or self.fresh) if row.fresh else self.view)
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


class _OfNames(Mapping[str, _V]):
    """Something of each of the given findings about one engine at one moment, found when read. ``prefix``: of their
    names, which the keys are without.
    """

    __slots__ = ("_names", "_prefix", "facts")

    def __init__(self, values: Values, names: tuple[str, ...] = EVIDENCE, prefix: str = "") -> None:
        self.facts, self._names, self._prefix = values, names, prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Answers(_OfNames[bool | None]):
    """The values of findings; most are read by nobody in most ticks."""

    __slots__ = ()

    def __getitem__(self, name: str) -> bool | None:
        return self.facts[self._prefix + name]


class Gathered(_OfNames[Found]):
    """Findings with their sentences, which are written when read."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Found:
        return Found(name, self.facts[name], self._sentence)

    def _sentence(self, name: str) -> str:
        row, value = ROWS[name], self.facts[name]
        view = self.facts.of(row)
        words = _words(view)
        needs = (NUMBERS[name] for name in row.needs if value is None)
        absent = dict.fromkeys(number.words.format_map(words) for number in needs if number.read(view) is None)
        return row.sentence(value, words, f"missing: {listed(list(absent))}" if absent else "")

    def filled(self, text: str) -> str:
        """A sentence about a missing input with its numbers; a text that is only ``{finding}`` becomes that finding's
        sentence.
        """
        name = text[1:-1] if text.startswith("{") and text.endswith("}") else ""
        return self[name].text if name in ROWS else text.format_map(_words(self.facts.view))

    def told(self, text: str) -> str:
        """A text with its numbers, without the parts between commas that name an unknown one."""
        return parts_known(text, _words(self.facts.view))

    def numbers_behind(self, names: Iterable[str]) -> dict[str, float]:
        """The most telling number behind each of these findings, by its name: percent for ratios, else its unit."""
        behind: dict[str, float] = {}
        for name in names:
            view = self.facts.of(ROWS[name])
            known = ((number, value) for number in _LEADING[name] if (value := NUMBERS[number].read(view)) is not None)
            for number, value in islice(known, 1):
                behind[number] = value * (PERCENT if NUMBERS[number].unit == "ratio" else 1)
        return behind


def about(s: Signals, t: Thresholds) -> Gathered:
    """The findings that signals alone decide, and their numbers; what recent samples decide is unknown."""
    return Gathered(Values(View(s, Recent(()), t, None)))


def reasons(t: Thresholds) -> dict[str, str]:
    """What may be behind a verdict that asks for action: number -> what it is, with its unit."""
    tables = (table for table in rules.TABLES if table.name in ACTIONABLE)
    rows = {name for table in tables for condition in table.supports for name in condition.names()} | {"kv_full"}
    numbers = (NUMBERS[number] for name in sorted(rows) for number in _LEADING[name])
    return {one.name: f"{_SIGNS.get(one.unit, '')}{one.words.format_map(levels(t))}" for one in numbers}


def of(name: str) -> Finding:
    """The row of this name. Raises ``KeyError``."""
    return ROWS[name]


def levels(t: Thresholds, engine: str = "") -> Asked:
    """Thresholds by name, as printed, and words as the engine has them ("" = the default engine)."""
    return Asked(lambda name: dialect(engine).called(name) if name in _WORDS else _level(t.entry(name)))


def _level(entry: Threshold) -> str:
    return say(entry.value, entry.unit)


def _words(view: View) -> Asked:
    others = levels(view.t, view.s.dialect)

    def write(name: str) -> str:
        if name in NUMBERS:
            return NUMBERS[name].text(view)
        return TEXTS[name](view) if name in TEXTS else others[name]

    return Asked(write)
