"""``docs/verdicts.md`` and ``docs/verdict-rows.md``: the rules of the diagnosis in words, written from the tables that
are evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvpressure.diagnosis import facts, hysteresis, rules
from kvpressure.diagnosis.evaluate import GRADE_CONFIDENCE, Grade, Row, Verdict, decide
from kvpressure.diagnosis.logic import Condition
from kvpressure.settings.thresholds import Thresholds

SHOWN_FILE: Final = Path(__file__).with_name("rows_shown.json")
"""Which recordings show which row, written by ``make accuracy``."""

ROWS_PAGE: Final = "verdict-rows.md"

_INTRO: Final = """\
# Verdicts

One engine has one verdict at a time. This page says how it is found; [{rows}]({rows}) has every row of the rules, with the recordings
that show it. Both are generated from `exporter/kvpressure/diagnosis/rules.py`, the tables that are evaluated.

* Every input is true, false or **unknown**. A missing input is unknown, and no rule reads it as false.
* Each answer has a **grade**: {grades}. Below {bar} it is not confident:
  no alert pages on it at once, and the plan says to look first.
* One scrape alone gives at most {one_scrape}.
* Every answer names its row: `row` in `/api/v1/diagnosis` and in `kvpressure replay --format json`, and on the triage page. `runner_up` is
  another verdict that fits nearly as well.

## The questions, in this order

The first one that is answered with yes gives the verdict.

| | if | verdict | confident if |
|---|---|---|---|
"""  # noqa: E501

_ROWS_INTRO: Final = """\
# Every row of the verdicts

The tables behind [verdicts](verdicts.md), generated from `exporter/kvpressure/diagnosis/rules.py` and `facts.py`.

* "not X" means that X is known to be false.
* The first table that **applies** and has a row that holds gives the answer; within a table the first row that holds counts.
* **Shown by** says on what the row was seen: *real* = telemetry or captures of real servers, *incidents* = rebuilt from public incidents;
  *synthetic* = made-up servers in the tests alone. No row of grade likely or above rests on synthetic evidence.
"""  # noqa: E501

_NONE: Final = dict.fromkeys((fact.name for fact in facts.FACTS), False)
WORKING: Final = {
    **_NONE,
    **dict.fromkeys(
        (
            "page_fresh",
            "work_present",
            "tokens_flow",
            "something_runs",
            "several_run",
            "ever_useful",
            "any_prompt_fits",
        ),
        True,
    ),
    "limit_is_told": True,
    "finishing": True,
}
_QUEUE: Final = dict.fromkeys(
    ("queue_present", "waiting_now", "waited_lately", "many_wait_now", "queue_for_capacity", "queue_for_capacity_now"),
    True,
)
_FULL: Final = dict.fromkeys(("kv_full", "kv_near_full", "kv_near_full_now", "kv_warm"), True)
_AT_LIMIT: Final = {"running_at_limit": True, "running_at_limit_now": True}
_STUCK: Final = {"tokens_flow": False, "finishing": False, "no_progress": True, "no_progress_long": True}
EXAMPLES: Final[tuple[tuple[str, Mapping[str, bool | None]], ...]] = (
    ("KV usage 99 %; 40 requests run of `max_num_seqs` 256, 12 wait", {**_FULL, **_QUEUE}),
    ("KV usage 60 %; 64 requests run of `max_num_seqs` 64, 30 wait", {**_QUEUE, **_AT_LIMIT, "kv_warm": True}),
    (
        "KV usage 98 %; 64 requests run of `max_num_seqs` 64, 30 wait, none is preempted",
        {**_FULL, **_QUEUE, **_AT_LIMIT},
    ),
    (
        "KV usage 40 %; 10 run of 256, 30 wait; nearly all tokens are prompts; GPU activity: unknown",
        {**_QUEUE, "prefill_dominates": True, "gpu_saturated": None},
    ),
    (
        "6 run, 10 wait, and all ten are deferred",
        {**_QUEUE, "queue_for_capacity": False, "queue_for_capacity_now": False},
    ),
    ("Tokens flow, nobody waits, latency is near its baseline", {}),
    ("Tokens flow, nobody waits, latency is 4 × its baseline", {"latency_multiplied": True}),
    ("No request is in flight, no token comes", {"work_present": False, "tokens_flow": False, "something_runs": False}),
    ("8 run, nothing has come out for half a minute, the GPU is at 100 %", {**_STUCK, "gpu_saturated": True}),
    (
        "100 run, 20 wait, no gauge has moved for half a minute; nothing is known of GPU and clients",
        {**_STUCK, **_QUEUE, "gauges_still": True, "gpu_idle": None, "clients_gone": None, "clients_came": None},
    ),
    (
        "CPU throttled most of the time, steps and latency three times as long, KV usage 30 %",
        {"cpu_throttled": True, "cpu_throttled_mostly": True, "steps_slower": True, "latency_multiplied": True},
    ),
    ("The last scrape is a minute old", {"page_fresh": False}),
)
"""Situations in words, as facts on top of a busy server; the page gives the answers of the rules."""


def render_verdicts(t: Thresholds) -> str:
    """The page for people: the questions in order, examples, and how one answer follows another."""
    lines = [
        _INTRO.format(
            rows=ROWS_PAGE,
            grades=", ".join(
                f"{grade.name.lower()} {GRADE_CONFIDENCE[grade]:g}" for grade in sorted(Grade, reverse=True) if grade
            ),
            bar=t.entry("confident").text,
            one_scrape=rules.DOUBTFUL.name.lower(),
        ).rstrip()
    ]
    levels = facts.Levels(t)
    asked = [table for place, table in enumerate(rules.TABLES) if place != rules.DEFERRED_HOST]
    for place, table in enumerate(asked, start=1):
        sure = table.sure.format_map(levels) or "never"
        lines.append(f"| {place} | {table.when.format_map(levels)} | `{table.name}` | {sure} |")
    lines += ["", *_stages(rules.KV_PRESSURE, t)]
    lines += ["", "## Examples", "", "| situation | verdict | grade | row |", "|---|---|---|---|"]
    for words, known in EXAMPLES:
        found = decide(rules.TABLES, {**WORKING, **known})
        lines.append(f"| {words} | `{found.verdict}` | {found.grade.name.lower()} | {found.row} |")
    lines += _changes(t)
    return "\n".join(lines).rstrip() + "\n"


def render_rows(t: Thresholds) -> str:
    """The reference: every row of every table in words, and what shows it."""
    shown = json.loads(SHOWN_FILE.read_text(encoding="utf-8"))
    lines = [_ROWS_INTRO]
    for table in rules.TABLES:
        if table is rules.TABLES[rules.DEFERRED_HOST]:
            lines += ["", f"*{table.title}* (below) is asked here first where every waiting request is deferred."]
            continue
        lines += _table(table, shown, t)
    lines += _named(t)
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Verdict, shown: Mapping[str, Any], t: Thresholds) -> Iterator[str]:
    answer = "" if table.name == "unknown" else f": `{table.name}`"
    yield f"\n## {table.title}{answer}\n"
    if table.requires.kind != "always":
        yield f"Applies if {_words(table.requires, t)}."
    for one in table.unless:
        yield f"Does not apply if {_words(one, t)}."
    yield "\n| row | if | answer | grade | shown by |\n|---|---|---|---|---|"
    for row in table.rows:
        yield (
            f"| {row.name} | {_when(table, row, t)} | {_answer(table, row)} | {row.grade.name.lower()} |"
            f" {_shown(table, row, shown)} |"
        )
    if table.lower:
        yield ""
    for lower in table.lower:
        effect = f"{lower.by} grades lower" if lower.by else f"at most {lower.at_most.name.lower()}"
        if lower.by or lower.at_most < Grade.CERTAIN:
            yield f"* {effect} if {_words(lower.when, t)}"
    if len(table.stages) > 1:
        yield ""
        yield from _stages(table, t)


def _stages(table: Verdict, t: Thresholds) -> Iterator[str]:
    yield (
        f"Stage of `{table.name}`: "
        + "; ".join(
            f"**{name}**" + (f" if {_words(when, t)}" if when.kind != "always" else " else")
            for name, when in table.stages
        )
        + "."
    )


def _when(table: Verdict, row: Row, t: Thresholds) -> str:
    return "always" if row.when.kind == "always" and len(table.rows) == 1 else _words(row.when, t)


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


def _words(condition: Condition, t: Thresholds, *, open_: bool = False) -> str:
    return condition.words(lambda name: facts.title(name, t), open_=open_)


def _named(t: Thresholds) -> Iterator[str]:
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
        yield f"* *{name}*: {_words(condition, t, open_=True)}"


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
