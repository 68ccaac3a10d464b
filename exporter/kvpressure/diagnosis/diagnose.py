"""One engine's diagnosis over time: the verdict that the tables give now, hysteresis, evidence, stage, conditions, the
documented signature; and how engines of a pool or a pair differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Final

from kvpressure.diagnosis.conditions import NAMES, PREFIX, Ahead, HeldCache, documented, note
from kvpressure.diagnosis.finding import Recent, View, slowest
from kvpressure.diagnosis.findings import PUBLISHED, Answers, Gathered, Values
from kvpressure.diagnosis.logic import GRADE_CONFIDENCE, ONE_SCRAPE_AT_MOST, Answer, Condition, Facts, Grade, Verdict
from kvpressure.diagnosis.rules import TABLES
from kvpressure.model.frozen import frozen
from kvpressure.model.pools import OTHER_SIDE, are_pair
from kvpressure.model.signals import Signals
from kvpressure.model.state import (
    ACTIONABLE,
    ALONE_FULL,
    ALONE_SLOW,
    CALM,
    OTHER_HAS_ROOM,
    OTHER_IS_FULL,
    SIGNATURE_CONDITIONS,
    STAGES,
    STEP_TOKENS,
    Diagnosis,
    EngineState,
    Imbalance,
    Sentences,
)
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import MINUTE

Pair = Callable[[Answer, Answer], bool]
_Pool = tuple[str, str, str, str]  # namespace, model, name and role
_pool_of: Final[Callable[[EngineState], _Pool]] = attrgetter(
    "key.namespace", "key.model_name", "pool.name", "pool.role"
)


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
    if first.grade <= Grade.GUESS or first.at_once or first.verdict in CALM:
        return first
    close = (
        other.verdict
        for other in found
        if other.verdict not in (first.verdict, "unknown") and other.grade >= max(Grade.DOUBTFUL, first.grade - 1)
    )
    runner_up = next(close, None)
    return first if runner_up is None else replace(first, runner_up=runner_up)


def _findings(tables: Sequence[Verdict], facts: Facts) -> Iterator[Answer]:
    for table in tables:
        found = find(table, facts)
        if found is not None:
            yield found


@frozen
class Transition:
    """How long another verdict must be found before it is published. ``samples``: times in a row. ``seconds``: the
    threshold of how long the published verdict has not been found. ``far_apart``: at once when that was last found
    more than ``kv_recent_seconds`` ago, because waiting for a second sample would keep an outdated verdict.
    ``doubted``: what is published meanwhile is not confident.
    """

    words: str
    applies: Pair
    samples: int
    seconds: str | None
    far_apart: bool = True
    doubted: bool = False


SAMPLES: Final = 2
CHANGES: Final = (
    Transition("to a missing scrape or a lack of progress", lambda _old, new: new.at_once, 0, None),
    Transition("from unknown to anything", lambda old, _new: old.verdict == "unknown", 0, None),
    Transition("to kv_pressure", lambda _old, new: new.verdict == "kv_pressure", SAMPLES, "pressure_enter_seconds"),
    Transition("to idle", lambda _old, new: new.verdict == "idle", SAMPLES, "idle_enter_seconds", doubted=True),
    Transition(
        "from kv_pressure while requests wait beside a mostly free cache",
        lambda old, new: old.verdict == "kv_pressure" and "kv_free_beside_queue" in new.supporting,
        SAMPLES,
        "verdict_enter_seconds",
        doubted=True,
    ),
    Transition(
        "from kv_pressure while a queue remains",
        lambda old, new: old.verdict == "kv_pressure" and new.verdict != "healthy",
        SAMPLES,
        "recent_window_seconds",
        False,
    ),
    Transition(
        "from kv_pressure to healthy while requests waited recently, and not only briefly, at a nearly full cache",
        lambda old, new: (
            old.verdict == "kv_pressure"
            and {"kv_near_full", "waited_recently"} <= {*new.opposing}
            and "queue_short" not in new.supporting
        ),
        SAMPLES,
        "stalled_seconds",
        False,
        doubted=True,
    ),
    Transition(
        "from stalled, because it goes on",
        lambda old, new: old.verdict == "stalled" and new.verdict != "unknown",
        SAMPLES,
        "verdict_enter_seconds",
        doubted=True,
    ),
    Transition("to unknown", lambda _old, new: new.verdict == "unknown", SAMPLES, "verdict_enter_seconds", False),
    Transition("any other change", lambda _old, _new: True, SAMPLES, "verdict_enter_seconds"),
)


class VerdictHysteresis:
    """The published verdict of one engine; the first line of ``CHANGES`` that applies decides when it changes."""

    __slots__ = ("_away_since", "_candidate", "_candidate_ticks", "_found", "_row_found", "current", "since")

    def __init__(self) -> None:
        self.current: Answer | None = None
        self.since = 0.0
        self._found = 0.0  # when the published verdict was last found
        self._row_found = 0.0  # when the published row was last found
        self._away_since: float | None = None  # since when something else than the published verdict is found
        self._candidate: str | None = None
        self._candidate_ticks = 0

    def observe(self, t: float, finding: Answer, thresholds: Thresholds) -> Answer:
        """Take what was found now; return what is published."""
        current, self.since = self.current, min(self.since, t)  # a clock that steps back
        if current is None:
            return self._publish(t, finding, changed=True)
        if current.verdict == finding.verdict:
            return self._publish(t, self._under_its_row(t, current, finding, thresholds), changed=False)
        if self._away_since is None or t < self._away_since:
            self._away_since = t
        self._candidate_ticks = self._candidate_ticks + 1 if self._candidate == finding.verdict else 1
        self._candidate = finding.verdict
        change = next(change for change in CHANGES if change.applies(current, finding))
        wait = 0.0 if change.seconds is None else thresholds[change.seconds]
        held = self._candidate_ticks >= change.samples and t - self._away_since >= wait
        if held or (change.far_apart and t - self._found > thresholds["kv_recent_seconds"]):
            return self._publish(t, finding, changed=True)
        self.current = self._doubted(current, change)
        return self.current

    def _under_its_row(self, t: float, current: Answer, finding: Answer, thresholds: Thresholds) -> Answer:
        """``finding`` under the published row, if that was found a moment ago and nothing else differs: two rows that
        hold by turns are one reason.
        """
        alike = (finding.grade, finding.missing, finding.at_once) == (current.grade, current.missing, False)
        lately = 0 <= t - self._row_found <= thresholds["recent_window_seconds"]
        if alike and lately and current.row and finding.row != current.row:
            return replace(finding, row=current.row)
        self._row_found = t
        return finding

    def _doubted(self, current: Answer, change: Transition) -> Answer:
        """``current``; if it is healthy or idle, without confidence and without a row, because none of its rows
        holds any more; without confidence, too, where the change says so. Doubt lasts until the verdict is found
        again, whatever is found meanwhile.
        """
        if current.verdict not in CALM and not change.doubted:
            return current
        row = "" if current.verdict in CALM else current.row
        return replace(current, grade=min(current.grade, Grade.DOUBTFUL), row=row)

    def _publish(self, t: float, finding: Answer, changed: bool) -> Answer:
        if changed:
            self.since = self._row_found = t
        self.current, self._found = finding, t
        self._away_since = self._candidate = None
        self._candidate_ticks = 0
        return finding


def compared(engines: tuple[EngineState, ...], t: Thresholds) -> tuple[EngineState, ...]:
    """The engines, each with how it differs from those of its pool and of its pair's other side, as far as they are
    seen here; a pair is of one model and one deployment. The comparison of the rule InferencePoolImbalanced, now.
    """
    if len(engines) == 1:
        return engines
    pools: dict[_Pool, list[EngineState]] = {}
    for engine in engines:
        pools.setdefault(_pool_of(engine), []).append(engine)

    @cache
    def differs(pool: _Pool, full: bool, slow: bool) -> Imbalance | None:
        return _imbalance(pool, full, slow, pools, t)

    found = (
        differs(_pool_of(one), _alike([one], "saturated", True)[0] > 0, one.diagnosis.slow is not None)
        for one in engines
    )
    return tuple(
        engine if differing is None else replace(engine, imbalance=differing)
        for engine, differing in zip(engines, found, strict=True)
    )


def _imbalance(
    place: _Pool, full: bool, slow: bool, pools: Mapping[_Pool, list[EngineState]], t: Thresholds
) -> Imbalance | None:
    """How an engine of this pool that is full or slow differs."""
    if not full and not slow:
        return None
    namespace, model, _, role = place
    most, pool, side = t["most_ratio"], pools[place], OTHER_SIDE.get(role, "")
    there = [
        engine
        for (other_namespace, other_model, *_), other in pools.items()
        if (other_namespace, other_model) == (namespace, model) and are_pair(pool[0].pool, other[0].pool)
        for engine in other
    ]
    alike, seen = _alike(pool, "saturated", True)
    for kind, counts, others, name, holds in (
        (OTHER_HAS_ROOM, full and alike > most * seen, there, "spare_capacity", True),
        (OTHER_IS_FULL, full and side == "decode", there, "saturated", True),
        (ALONE_FULL, full, pool, "spare_capacity", True),
        (ALONE_SLOW, slow, pool, "slow", False),
    ):
        alike, seen = _alike(others, name, holds)
        if counts and seen and alike >= most * seen:
            return Imbalance(kind, side if others is there else "", alike, seen)
    return None


def _alike(engines: Sequence[EngineState], name: str, holds: bool) -> tuple[int, int]:
    """How many engines have this value of a published finding, and of how many it is known."""
    known = [value for engine in engines if (value := engine.diagnosis.published.get(name)) is not None]
    return known.count(holds), len(known)


class Diagnoser:
    """State that the diagnosis of one engine keeps between samples."""

    __slots__ = ("_ahead", "_held", "_seen", "_settled", "_stages", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._settled = VerdictHysteresis()
        self._held = HeldCache()
        self._ahead = Ahead()
        self._stages: dict[str, float] = {}  # of KV pressure, and when each was last found
        self._seen: dict[str, bool | None] = {}  # the named facts of the verdict, when it was last found

    def diagnose(self, s: Signals, recent: Recent, samples: int, utilization: float | None) -> Diagnosis:
        """The diagnosis now. ``samples``: readings so far, ``utilization``: the configured gpu_memory_utilization."""
        t = self._thresholds
        values = Values(View(s, recent, t, samples, utilization))
        evidence, beside = Gathered(values), Gathered(values, NAMES)
        view, now = values.fresh, values.fresh.s
        view.held = self._held.observe(now.time, now.progress.work_present, now.kv.kv_used_ratio, t)
        found = decide(TABLES, values)
        answer = self._settled.observe(s.time, found, t)
        supporting, opposing = self._for_and_against(answer, found, values)
        view.ahead = self._ahead.observe(now, answer.verdict, t)
        view.answer, view.stage = answer, self._stage_of(s.time, answer, values)
        is_met = values["documented_signature"]
        return Diagnosis(
            verdict=answer.verdict,
            held=answer.verdict != found.verdict,
            confidence=GRADE_CONFIDENCE[answer.grade],
            stage=view.stage,
            since=self._settled.since,
            evidence=evidence,
            supporting=Sentences(lambda: tuple(evidence[name].text for name in supporting)),
            opposing=Sentences(lambda: tuple(evidence[name].text for name in opposing)),
            missing=Sentences(lambda: tuple(evidence.filled(text) for text in answer.missing)),
            inputs=Sentences(lambda: tuple(evidence.filled(text) for text in answer.inputs)),
            reasons=_reasons(answer.verdict, supporting, evidence),
            row=answer.row,
            grade=answer.grade.name.lower(),
            runner_up=answer.runner_up,
            conditions=Answers(values, NAMES),
            published=Answers(values, PUBLISHED),
            documented=documented(view),
            beside=beside,
            slow=slowest(view),
            documented_signature=Answers(values, SIGNATURE_CONDITIONS, PREFIX),
            documented_signature_met=is_met,
            signature_note=note(now, answer.verdict, is_met),
        )

    def _for_and_against(self, answer: Answer, found: Answer, facts: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the supporting and opposing facts. While a verdict is held though another is found, supporting
        facts that no longer hold oppose it.
        """
        if answer.verdict == found.verdict:
            self._seen = {name: facts[name] for name in (*answer.supporting, *answer.opposing)}
        same = {name for name, value in self._seen.items() if facts[name] is value}
        over = (name for name in answer.supporting if name not in same and facts[name] is not None)
        return (
            tuple(name for name in answer.supporting if name in same),
            (*(name for name in answer.opposing if name in same), *over),
        )

    def _stage_of(self, t: float, answer: Answer, facts: Facts) -> str | None:
        """The stage; that of KV pressure is the gravest found in the last minute, because what it is found by swings
        under one steady overload. It never falls back while requests wait and none finishes.
        """
        if answer.stage in (None, STEP_TOKENS):
            self._stages.clear()
            return answer.stage
        stuck = facts["queue_present"] is True and facts["finishing"] is False
        self._stages = {stage: at for stage, at in self._stages.items() if stuck or 0 <= t - at <= MINUTE}
        self._stages[answer.stage] = t
        return max(self._stages, key=STAGES.index)


def _reasons(verdict: str, supporting: tuple[str, ...], evidence: Gathered) -> dict[str, float]:
    """The numbers behind what supports a verdict that asks for action; KV usage too where the cache is not full."""
    if verdict not in ACTIONABLE:
        return {}
    not_the_cache = ("kv_full",) if evidence["kv_full"].value is False else ()
    return evidence.numbers_behind((*supporting, *not_the_cache))
