"""The bars the verdict is held to, on every recording, what every replay says, and the page that states the score."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor

import pytest
from lab.accuracy import ablation, data, digests, report, show
from lab.accuracy.run import replay, replay_all
from lab.accuracy.score import Rates, Result, score

pytestmark = pytest.mark.slow

RECALL = 1.0
FALSE_PER_1000 = 0.0
INFORMATIVE = 0.90
INCIDENTS = 0.95
FRESH, FRESH_STRICTLY = 0.95, 0.85
STRETCHES = {
    data.STRETCHES: (0.90, 0.90),
    data.SCHEDULER: (0.95, 0.75),
    data.EDGES: (0.95, 0.95),
}  # leniently, strictly
DETECTED_WITHIN_SECONDS = 10.0
AHEAD_SECONDS, NEARLY = 30.0, 0.95  # a slow ramp is announced so early; what is announced comes at least so near
LIMITED, NAMED_WITHOUT_ARGUMENTS = "concurrency_limited", 0.85  # of the ticks that say so with the arguments


def missed(result: Result) -> list[str]:
    """Every bar that is not reached, in words."""
    found: list[str] = []
    for title, without in (("with counter", False), ("without counter", True)):
        found += [f"{title}: {text}" for text in _missed_rates(result.rates(without_counter=without))]
        bait = result.rates(without_counter=without, part="burstgpt")
        if bait.false or not bait.other:
            found.append(f"{title}: burstgpt false {bait.false} of {bait.other}")
    for title, detections in (("with", result.detections), ("without", result.detections_without_counter)):
        found += [
            f"{item.recording} {title} counter: delay {item.delay}"
            for item in detections
            if item.delay is None or item.delay > DETECTED_WITHIN_SECONDS
        ]
    for group in (data.TUNED, data.SCORED_ONLY, data.MENDED):
        graded = [answer for answer in result.graded() if answer.incident.group == group]
        if not graded or sum(answer.right for answer in graded) < INCIDENTS * len(graded):
            found.append(f"incidents right: {sum(a.right for a in graded)} of {len(graded)} ({group})")
    labelled = [answer for answer in result.answers if answer.incident.strict]
    missed_best = {answer.incident.id for answer in labelled if not answer.strictly_right}
    if sum(answer.right for answer in labelled) < FRESH * len(labelled):
        found.append(f"fresh incidents right: {sum(a.right for a in labelled)} of {len(labelled)}")
    if len(labelled) - len(missed_best) < FRESH_STRICTLY * len(labelled):
        found.append(f"fresh incidents strictly right: all but {len(missed_best)} of {len(labelled)}")
    if missed_best != data.MISSED.keys():
        found.append(f"data.MISSED does not fit: {sorted(missed_best ^ data.MISSED.keys())}")
    found += [f"{a.incident.id}: wrong and confident" for a in result.answers if a.wrong_and_confident]
    found += [
        f"{c.capture.name} engine {c.capture.engine} {c.capture.what}: {c.histogram}"
        for c in result.captures
        if (not c.right and not c.capture.strict) or c.wrong_and_confident
    ]
    for part, bars in STRETCHES.items():
        fresh = [c for c in result.captures if c.capture.part == part]
        right = (sum(c.right for c in fresh), sum(c.strictly_right for c in fresh))
        if any(count < bar * len(fresh) for count, bar in zip(right, bars, strict=True)):
            found.append(f"stretches right, leniently and strictly: {right} of {len(fresh)} ({part})")
    found += [
        f"{one.recording}: warned at {one.begin:.0f} s, and usage went no higher than {one.peak:.2f}"
        for one in result.warned
        if one.lead is None and one.peak < NEARLY
    ]
    ramp = [one.lead for one in result.warned if "slow-ramp" in one.recording and one.lead]
    if not ramp or max(ramp) < AHEAD_SECONDS:
        found.append(f"slow ramp announced {ramp} s before the cache is full")
    return found


def _missed_rates(rates: Rates) -> list[str]:
    found = []
    if rates.recall is None or rates.recall < RECALL or rates.episode_found < rates.episode:
        found.append(f"recall {rates.found} of {rates.positive}, episode {rates.episode_found} of {rates.episode}")
    if rates.false_per_1000 is None or rates.false_per_1000 > FALSE_PER_1000:
        found.append(f"false {rates.false} of {rates.other}")
    if rates.informative_share is None or rates.informative_share < INFORMATIVE:
        found.append(f"informative {rates.informative} of {rates.other}")
    if rates.claimed_unrecorded or not rates.not_recorded:
        found.append(f"claimed where KV usage was not recorded: {rates.claimed_unrecorded} of {rates.not_recorded}")
    return found


@pytest.fixture(scope="module")
def result() -> Result:
    """Everything is replayed once, which takes half a minute."""
    return score()


def test_the_verdict_reaches_every_bar_and_the_page_says_so(result: Result) -> None:
    assert result.problems == ()
    wrong = missed(result)
    if wrong:
        pytest.fail("\n".join([*wrong, "", *show.wrong_items(result), *show.wrong_items(result, scored_only=True)]))
    # the sizes of what was scored: a label that is lost must not make a bar easier
    rates = result.rates()
    assert (rates.positive, rates.episode, rates.other, rates.neutral, rates.not_recorded) == (62, 6, 356, 6, 5)
    sizes = (len(result.answers), len(result.graded()), len(result.captures), len(result.detections))
    assert sizes == (114, 100, 178, 10), "a new label? Then these sizes grow"
    assert report.publish(result, check=True) == 0, "docs/reports/accuracy.md is out of date: run `make accuracy`"
    names = {str(path.relative_to(data.RECORDINGS)) for path in data.RECORDINGS.rglob("*.jsonl.gz")}
    unscored = replay_all([(name, False) for name in names - result.digests.keys()], os.cpu_count() or 1)
    now = {**result.digests, **{name: run.digests for (name, _), run in unscored.items()}}
    if os.environ.get("UPDATE_DIGESTS"):
        digests.write(now)
    assert digests.moved(now) == {}, "UPDATE_DIGESTS=1 rewrites lab/accuracy/digests.txt; the commit says why"


def test_a_limit_of_the_scheduler_is_named_without_arguments(result: Result) -> None:
    """It shows in running requests that come back to one maximum; a busy GPU is not taken for the reason instead."""
    limited = defaultdict[str, dict[float, str | None]](dict)  # stage by time, of each recording that shows it
    for name, ticks in [(w.recording, w.ticks) for w in result.windows] + [
        (c.capture.name, c.ticks) for c in result.captures if c.capture.engine == "0"
    ]:
        limited[name] |= {tick.t: tick.stage for tick in ticks if tick.verdict == LIMITED}
    names = sorted(name for name, seen in limited.items() if len(seen) > 5)
    answers: Counter[tuple[bool, str]] = Counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, said in zip(names, pool.map(without_arguments, names), strict=True):
            answers.update((limited[name][t] == stage, verdict) for t, stage, verdict in said if t in limited[name])
    assert len(names) > 25
    assert not [verdict for _, verdict in answers if verdict == "compute_bound"]
    assert answers[True, LIMITED] >= NAMED_WITHOUT_ARGUMENTS * answers.total()


def without_arguments(name: str) -> list[tuple[float, str | None, str]]:
    """Time, stage and verdict of each tick, where nobody sees the command line."""
    ticks = replay(name, taken=ablation.ABLATIONS["no arguments"]).said["0"]
    return [(tick.t, tick.stage, tick.verdict) for tick in ticks]
