"""``docs/verdicts.md``: the rules of the diagnosis in words, written from the tables that are evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvpressure.diagnosis import facts, hysteresis, rules
from kvpressure.diagnosis.evaluate import GRADE_CONFIDENCE, Grade, Row, Verdict
from kvpressure.diagnosis.logic import Condition
from kvpressure.settings.thresholds import Thresholds

SHOWN_FILE: Final = Path(__file__).with_name("rows_shown.json")
"""Which recordings show which row, written by ``make accuracy``."""

_INTRO: Final = """\
# Verdicts

How the verdict of an engine follows from what is known about it. This page is generated from `exporter/kvpressure/diagnosis/rules.py`
and `facts.py`: the tables below are the ones that are evaluated.

* Every input is a **fact**: true, false or **unknown**. "not X" means that X is known to be false.
* The tables are asked from top to bottom. The first table that **applies** and has a row that holds gives the answer; within a table
  the first row that holds counts.
* Each row has a **grade**. {grades}.
  Below {bar} an answer is not confident: no alert pages on it and the plan says to look first. One scrape alone never gives more than
  {one_scrape}.
* Every answer names its row: `row` in `/api/v1/diagnosis` and in `kvpressure replay --format json`, and on the triage page. `runner_up` is
  another verdict whose table holds with nearly the same grade.
* **Shown by** says on what the row was seen: *real* = telemetry or captures of real servers, *incidents* = rebuilt from public incidents;
  *synthetic* = made-up servers in the tests alone. No row of grade likely or above rests on synthetic evidence.
"""  # noqa: E501


def render_verdicts(t: Thresholds) -> str:
    """The page."""
    shown = json.loads(SHOWN_FILE.read_text(encoding="utf-8"))
    lines = [
        _INTRO.format(
            grades=", ".join(
                f"{grade.name.lower()} {GRADE_CONFIDENCE[grade]:g}" for grade in sorted(Grade, reverse=True) if grade
            ),
            bar=t.entry("confident").text,
            one_scrape=rules.DOUBTFUL.name.lower(),
        )
    ]
    for table in rules.TABLES:
        if table is rules.TABLES[rules.DEFERRED_HOST]:
            lines += ["", f"*{table.title}* (below) is asked here first where every waiting request is deferred."]
            continue
        lines += _table(table, shown)
    lines += _named()
    lines += _changes(t)
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Verdict, shown: Mapping[str, Any]) -> Iterator[str]:
    answer = "" if table.name == "unknown" else f": `{table.name}`"
    yield f"\n## {table.title}{answer}\n"
    if table.requires.kind != "always":
        yield f"Applies if {_words(table.requires)}."
    for one in table.unless:
        yield f"Does not apply if {_words(one)}."
    yield "\n| row | if | answer | grade | shown by |\n|---|---|---|---|---|"
    for row in table.rows:
        yield (
            f"| {row.name} | {_when(table, row)} | {_answer(table, row)} | {row.grade.name.lower()} |"
            f" {_shown(table, row, shown)} |"
        )
    if table.lower:
        yield ""
    for lower in table.lower:
        effect = f"{lower.by} grades lower" if lower.by else f"at most {lower.at_most.name.lower()}"
        if lower.by or lower.at_most < Grade.CERTAIN:
            yield f"* {effect} if {_words(lower.when)}"
    if len(table.stages) > 1:
        yield (
            "\nStage: "
            + "; ".join(
                f"**{name}**" + (f" if {_words(when)}" if when.kind != "always" else " else")
                for name, when in table.stages
            )
            + "."
        )


def _when(table: Verdict, row: Row) -> str:
    return "always" if row.when.kind == "always" and len(table.rows) == 1 else _words(row.when)


def _answer(table: Verdict, row: Row) -> str:
    if row.verdict == "":
        return "next table"
    return f"`{row.verdict or table.name}`"


def _shown(table: Verdict, row: Row, shown: Mapping[str, Any]) -> str:
    found = shown.get(f"{table.title}: {row.name}", {})
    parts = []
    for kind in ("real", "incidents"):
        names = found.get(kind, [])
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            parts.append(f"{kind}: {', '.join(names[:2])}{more}")
    return "; ".join(parts) or "synthetic"


def _words(condition: Condition, *, open_: bool = False) -> str:
    return condition.words(facts.title, open_=open_)


def _named() -> Iterator[str]:
    yield "\n## Named conditions\n"
    found: dict[str, Condition] = {}
    for table in rules.TABLES:
        every = (
            table.requires,
            *table.unless,
            *(row.when for row in table.rows),
            *(lower.when for lower in table.lower),
            *(when for _, when in table.stages),
        )
        for condition in every:
            _collect(condition, found)
    for name, condition in sorted(found.items()):
        yield f"* *{name}*: {_words(condition, open_=True)}"


def _collect(condition: Condition, found: dict[str, Condition]) -> None:
    if condition.parts:
        if condition.name:
            found.setdefault(condition.name, condition)
        for part in condition.parts:
            _collect(part, found)


def _changes(t: Thresholds) -> Iterator[str]:
    yield "\n## From one answer to the next\n"
    yield "The published verdict changes only after another one has been found for a while, so that it does not flap.\n"
    yield "| change | found in a row | published one not found for |\n|---|---|---|"
    for change in hysteresis.CHANGES:
        samples = f"{change.samples} scrapes" if change.samples else "at once"
        seconds = f"{t.entry(change.seconds).text} s" if change.seconds else "at once"
        yield f"| {change.words} | {samples} | {seconds} |"
    yield ""
    yield (
        f"Where scrapes are more than {t.entry('verdict_unconfirmed_seconds').text} s apart the first one is enough,"
        " but not to leave KV pressure while a queue remains, and not to `unknown`. While something else is found,"
        " `idle` and `healthy` are at most doubtful."
    )
