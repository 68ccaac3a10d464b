"""The tables themselves: every row can be reached, says something of its own, and its boundary is where the
page says it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lab.accuracy.rows import SHOWN_FILE

from kvpressure.bundle.verdicts_page import render_verdicts
from kvpressure.diagnosis import conditions, logic, rules, shown
from kvpressure.diagnosis import facts as read
from kvpressure.diagnosis.diagnose import decide
from kvpressure.diagnosis.finding import FROZEN_ROWS, Recent, View
from kvpressure.diagnosis.findings import EVIDENCE, ROWS
from kvpressure.diagnosis.logic import Condition, Grade, Row, Verdict
from kvpressure.model.signals import Signals
from kvpressure.model.state import STAGES, VERDICTS
from kvpressure.printable import Asked
from kvpressure.settings.thresholds import builtin, load

Known = Mapping[str, bool | None]
ALLOWED = {
    "yes": (True,),
    "no": (False,),
    "maybe": (True, None),
    "unsure": (False, None),
    "unknown": (None,),
}
QUIET: dict[str, bool | None] = {
    **dict.fromkeys(EVIDENCE, False),
    "page_fresh": True,
    "work_present": True,
    "any_prompt_fits": True,
    "queue_for_capacity": True,
    "limit_is_stated": True,
    "running_at_limit_now": None,
    "ever_produced": True,
}


def solutions(condition: Condition, wanted: bool, known: Known) -> Iterator[Known]:
    """Assignments of facts, on top of ``known``, under which the condition is ``wanted``."""
    if condition.kind == "always":
        if wanted:
            yield known
    elif condition.kind == "not":
        yield from solutions(condition.parts[0], not wanted, known)
    elif condition.kind in ALLOWED:
        quiet = QUIET[condition.name]
        for value in sorted((True, False, None), key=lambda one: one is not quiet):  # the quiet one first: fewer to try
            if (value in ALLOWED[condition.kind]) == wanted and known.get(condition.name, value) is value:
                yield {**known, condition.name: value}
    elif (condition.kind == "and") == wanted:
        first, second = condition.parts
        for partly in solutions(first, wanted, known):
            yield from solutions(second, wanted, partly)
    else:
        for part in condition.parts:
            yield from solutions(part, wanted, known)


def cases(table: Verdict, row: Row) -> Iterator[dict[str, bool | None]]:
    """Facts under which that row is the first of its table, the others quiet."""
    before = table.rows[: table.rows.index(row)]
    demands = [(table.requires, True), (row.when, True)]
    demands += [(one, False) for one in (*table.unless, *(earlier.when for earlier in before))]

    def meet(place: int, known: Known) -> Iterator[Known]:
        if place == len(demands):
            yield known
            return
        for partly in solutions(*demands[place], known):
            yield from meet(place + 1, partly)

    for found in meet(0, {}):
        yield {**QUIET, **found}


RULES = [
    pytest.param(table, row, id=f"{table.title}: {row.name}")
    for table in dict.fromkeys(table.title for table in rules.TABLES)
    for table in [next(one for one in reversed(rules.TABLES) if one.title == table)]
    for row in table.rows
    if row.verdict != ""
]


def reached(table: Verdict, row: Row) -> dict[str, bool | None]:
    """Facts for which the whole list of tables answers with that row."""
    for place, facts in enumerate(cases(table, row)):
        if decide(rules.TABLES, facts).row == f"{table.title}: {row.name}":
            return facts
        assert place < 20_000, "no facts found for which this row answers: is it dead?"
    raise AssertionError("this row can never answer")


@pytest.mark.parametrize(("table", "row"), RULES)
def test_every_row_can_answer_and_changing_its_facts_changes_the_answer(table: Verdict, row: Row) -> None:
    facts = reached(table, row)
    found = decide(rules.TABLES, facts)
    assert found.verdict == (row.verdict or table.name)
    assert found.grade <= row.grade
    assert decide(rules.TABLES, {**facts, "first_reading": True}).grade <= logic.ONE_SCRAPE_AT_MOST
    if row.when.kind == "always" and table.requires.kind == "always" and not table.unless:
        return  # the last resort
    read = row.when.names() | table.requires.names() | frozenset().union(*(one.names() for one in table.unless))
    for earlier in table.rows[: table.rows.index(row)]:
        read |= earlier.when.names()
    others = {decide(rules.TABLES, {**facts, name: value}).row for name in read for value in (True, False, None)}
    assert len(others) > 1, "no single fact of this row makes a difference"


def test_the_bar_of_confidence_lies_between_likely_and_doubtful() -> None:
    assert logic.GRADE_CONFIDENCE[Grade.DOUBTFUL] < builtin()["confident"] <= logic.GRADE_CONFIDENCE[Grade.LIKELY]
    assert list(logic.GRADE_CONFIDENCE) == sorted(set(logic.GRADE_CONFIDENCE))


def test_rows_have_names_of_their_own_and_the_tables_name_what_exists() -> None:
    names = [f"{table.title}: {row.name}" for table in rules.TABLES for row in table.rows]
    assert len(names) - len(rules.HOST_BOUND.rows) == len(set(names)), "the host's table is asked at two places"
    assert set(FROZEN_ROWS) <= set(names)
    for table in rules.TABLES:
        conditions = (
            table.requires,
            *table.unless,
            *(row.when for row in table.rows),
            *(lower.when for lower in table.lower),
            *(when for _, when in table.stages),
            *table.supports,
            *table.against,
        )
        for condition in conditions:
            assert condition.names() <= set(EVIDENCE)
        assert {name for name, _ in table.missing} <= set(EVIDENCE)
        assert {table.name, *(row.verdict for row in table.rows if row.verdict)} <= set(VERDICTS)
        assert {name for name, _ in table.stages} <= set(STAGES)


def test_a_name_is_that_of_one_finding_and_no_rule_reads_what_reads_the_verdict() -> None:
    rows = (read.FACTS, conditions.CONDITIONS, conditions.ALERTED, conditions.SIGNATURE, shown.SHOWN)
    assert len(ROWS) == sum(map(len, rows))
    view = View(Signals(time=0.0), Recent(()), builtin(), 10)
    del view.answer, view.stage, view.ahead
    for name in EVIDENCE:
        ROWS[name].find(view)  # raises where it reads the verdict


def test_every_fact_has_a_sentence_of_its_own_for_each_value() -> None:
    for fact in ROWS.values():
        true, false, unknown = (fact.sentence(value, Asked(lambda name: name)) for value in (True, False, None))
        assert len({true, false, unknown}) == 3, fact.name
        assert ": unknown" in unknown, fact.name
        assert not re.search(r"\bno\b|\bnot\b", unknown.split(": unknown")[0]), fact.name


def test_rows_that_no_recording_shows_are_at_most_doubtful_and_no_others_are_capped() -> None:
    shown = json.loads(SHOWN_FILE.read_text(encoding="utf-8"))
    designed = {
        f"{table.title}: {row.name}": row.grade for table in rules.DESIGNED for row in table.rows if row.verdict != ""
    }
    needed = {name for name, grade in designed.items() if grade >= Grade.LIKELY and not shown.get(name)}
    assert needed == rules.SYNTHETIC, "run `make accuracy`, then let the list follow lab/accuracy/rows_shown.json"
    for table in rules.TABLES:
        for row in table.rows:
            assert row.grade <= Grade.DOUBTFUL or f"{table.title}: {row.name}" not in rules.SYNTHETIC


def test_levels_on_the_page_follow_an_override(tmp_path: Path) -> None:
    override = tmp_path / "thresholds.yaml"
    override.write_text("no_progress_seconds: 9\nstalled_seconds: 31\nprefill_patience_seconds: 77\n", "utf-8")
    changed = load(override)
    page = render_verdicts(changed)
    assert re.search(r"\b31 s", page)
    assert re.search(r"\b77 s", page)
    assert not re.search(r"\b(?:8|20|90) s", page)
