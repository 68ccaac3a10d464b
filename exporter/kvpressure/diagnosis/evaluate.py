"""The evaluator of the rules: the first table that applies gives verdict, row, grade and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import Final

from kvpressure.diagnosis.logic import ALWAYS, Condition, Facts
from kvpressure.model.frozen import frozen


class Grade(IntEnum):
    """How reliable an answer is. Confidence begins at ``LIKELY``."""

    NOTHING = 0  # no data
    GUESS = auto()
    DOUBTFUL = auto()
    LIKELY = auto()
    STRONG = auto()
    CERTAIN = auto()

    @property
    def confidence(self) -> float:
        """The published confidence, 0 to 1."""
        return GRADE_CONFIDENCE[self]


GRADE_CONFIDENCE: Final = (0.0, 0.4, 0.6, 0.75, 0.85, 0.95)


GOOD: Final = frozenset({"healthy", "idle"})  # they hold only where no other does
ONE_SCRAPE_AT_MOST: Final = Grade.DOUBTFUL  # whatever the table says


@frozen
class Row:
    """One line of a verdict: its condition, and the grade it gives. ``missing``: what would have to be known.
    ``verdict`` replaces the table's; "" = the table does not apply, ask the next one.
    """

    name: str
    when: Condition
    grade: Grade
    missing: str = ""
    verdict: str | None = None


@frozen
class Lower:
    """Lowers the grade by ``by`` grades, and to ``at_most``, where ``when`` holds."""

    when: Condition
    by: int = 0
    at_most: Grade = Grade.CERTAIN
    missing: str = ""
    against: tuple[str, ...] = ()


@frozen
class Verdict:
    """A verdict as a table. ``supports`` and ``against``: leaves whose fact's sentence is shown where they hold.
    ``missing``: (fact, text) shown where the fact is unknown. ``at_once``: published without a second sample.
    ``when`` and ``confident`` state in a sentence when the verdict is given, and when with confidence ("" = never);
    ``{threshold}`` is replaced by its value.
    """

    name: str
    title: str
    rows: Sequence[Row]
    requires: Condition = ALWAYS
    unless: Sequence[Condition] = ()
    lower: Sequence[Lower] = ()
    stages: Sequence[tuple[str, Condition]] = ()
    supports: Sequence[Condition] = ()
    against: Sequence[Condition] = ()
    missing: Sequence[tuple[str, str]] = ()
    at_once: bool = False
    when: str = ""
    confident: str = ""


@frozen
class Answer:
    """Result of the tables. ``supporting`` and ``opposing`` name facts; ``missing`` are texts, ``{fact}`` in them is
    replaced by that fact's sentence. ``inputs``: those of ``missing`` that a setting or a source can provide.
    """

    verdict: str
    grade: Grade
    row: str = ""
    stage: str | None = None
    supporting: tuple[str, ...] = ()
    opposing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    at_once: bool = False
    runner_up: str | None = None
    inputs: tuple[str, ...] = ()

    @property
    def confidence(self) -> float:
        """The grade as the published number."""
        return self.grade.confidence


def find(table: Verdict, facts: Facts) -> Answer | None:
    """The finding of one table; ``None`` where it does not apply."""
    if not table.requires.test(facts):
        return None
    for condition in table.unless:  # loops, not generators: every engine asks every table in each tick
        if condition.test(facts):
            return None
    for row in table.rows:
        if row.when.test(facts):
            break
    else:
        return None
    if row.verdict == "":
        return None
    most = ONE_SCRAPE_AT_MOST if facts["first_reading"] else Grade.CERTAIN
    grade, lowered = min(row.grade, most), [one for one in table.lower if one.when.test(facts)]
    for one in lowered:
        grade = min(grade, one.at_most, Grade(max(Grade.GUESS, grade - one.by)) if grade else grade)
    said = [text for text in (row.missing, *(one.missing for one in lowered)) if text]
    against = [leaf.name for leaf in table.against if leaf.test(facts)]
    against += [name for one in lowered for name in one.against if name not in against]
    inputs = tuple(text for name, text in table.missing if facts[name] is None)
    return Answer(
        row.verdict or table.name,
        grade,
        f"{table.title}: {row.name}",
        None if (row.verdict or table.name) == "unknown" else _stage(table, facts),
        tuple(leaf.name for leaf in table.supports if _speaks(leaf, facts) and leaf.name not in against),
        tuple(against),
        (*said, *inputs),
        table.at_once,
        inputs=inputs,
    )


def _speaks(leaf: Condition, facts: Facts) -> bool:
    """Whether a leaf holds by a known fact: an unknown one is no evidence."""
    return facts[leaf.name] is not None and leaf.test(facts)


def _stage(table: Verdict, facts: Facts) -> str | None:
    return next((stage for stage, when in table.stages if when.test(facts)), None)


def decide(tables: Sequence[Verdict], facts: Facts) -> Answer:
    """The first finding, with the next other verdict as runner-up if it is at most one grade worse and no guess."""
    found = _findings(tables, facts)
    first = next(found)
    if first.grade <= Grade.GUESS or first.at_once or first.verdict in GOOD:
        return first
    close = (
        other.verdict
        for other in found
        if other.verdict not in (first.verdict, "unknown") and other.grade >= max(Grade.DOUBTFUL, first.grade - 1)
    )
    return _with_runner_up(first, next(close, None))


def _findings(tables: Sequence[Verdict], facts: Facts) -> Iterator[Answer]:
    for table in tables:
        found = find(table, facts)
        if found is not None:
            yield found


def _with_runner_up(found: Answer, runner_up: str | None) -> Answer:
    if runner_up is None:
        return found
    return Answer(
        found.verdict,
        found.grade,
        found.row,
        found.stage,
        found.supporting,
        found.opposing,
        found.missing,
        found.at_once,
        runner_up,
        found.inputs,
    )
