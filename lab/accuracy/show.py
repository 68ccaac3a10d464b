"""The harness on a terminal: a terse summary, and for tuning the details of every wrong item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.accuracy.incidents import Answer, histogram
from lab.accuracy.run import Tick
from lab.accuracy.score import Rates, Result
from lab.accuracy.telemetry import EPISODE, NO_CLAIM, OTHER, POSITIVE, Window


def ratio(part: int, whole: int) -> str:
    """``3 of 4 (75.0 %)``, or a dash when there is nothing."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def summary(result: Result) -> Iterator[str]:
    """A few lines, one a question."""
    if result.windows:
        for title, rates in (("with counter", result.rates()), ("without counter", result.rates(without_counter=True))):
            yield _rates_line(title, rates)
        for title, found in (("with", result.detections), ("without", result.detections_without_counter)):
            delays = sorted(item.delay for item in found if item.delay is not None)
            if found:
                yield (
                    f"detection {title} counter: {len(delays)} of {len(found)} runs, delay median "
                    f"{delays[len(delays) // 2]:.0f} s, largest {delays[-1]:.0f} s"
                    if delays
                    else f"detection {title} counter: 0 of {len(found)} runs"
                )
        worst = max(result.flaps, key=lambda item: item[1])
        yield f"verdict changes per recording: largest {worst[1]} ({worst[0]})"
    if result.answers:
        graded = result.graded()
        yield (
            f"incidents (A, B): right {ratio(sum(a.right for a in graded), len(graded))}, verdict right "
            f"{sum(a.outcome == 'right' for a in graded)}, abstained {sum(a.outcome == 'abstained' for a in graded)}, "
            f"wrong {sum(a.outcome == 'wrong' for a in graded)}, wrong and confident "
            f"{sum(a.wrong_and_confident for a in result.answers)}, conditions wrong "
            f"{sum(not a.conditions_right for a in graded)}, confident forbidden ticks "
            f"{sum(a.forbidden_ticks for a in result.answers)}"
        )
    if result.captures:
        yield f"live captures: right {ratio(sum(c.right for c in result.captures), len(result.captures))}"
    yield from (f"problem: {problem}" for problem in result.problems[:10])


def _rates_line(title: str, rates: Rates) -> str:
    return (
        f"windows {title}: recall {ratio(rates.found, rates.positive)} (most frequent {rates.found_most}), episode "
        f"{ratio(rates.episode_found, rates.episode)}, false {rates.false} of {rates.other} (most frequent "
        f"{rates.false_most}, full with queue {rates.false_full}), informative "
        f"{ratio(rates.informative, rates.other)}, near full claimed {rates.neutral_claimed} of {rates.neutral}, "
        f"claimed unrecorded {rates.claimed_unrecorded} of {rates.not_recorded}"
    )


def wrong_items(result: Result, *, scored_only: bool = False) -> Iterator[str]:
    """Details of everything that is not right in what may be tuned on, or in what is scored only."""
    for title, found in (("", result.windows), (" without counter", result.windows_without_counter)):
        for window in found:
            if _wrong(window) and window.scored_only == scored_only:
                yield (
                    f"\n{window.recording}{title} {window.start:.0f} s: was {window.kind}"
                    f"{' (full with queue)' if window.full_with_queue else ''}, said {histogram(window.ticks)}"
                )
                yield from _details(window.ticks, window.verdict)
    for title, detections in (("", result.detections), (" without counter", result.detections_without_counter)):
        for item in detections:
            if (item.delay is None or item.delay > 10) and item.scored_only == scored_only:
                yield f"\n{item.recording}{title}: onset {item.onset:.0f} s, delay {item.delay}"
    for answer in result.answers:
        if (not answer.right or answer.forbidden_ticks) and answer.incident.scored_only == scored_only:
            yield from _answer(answer)
    for capture in result.captures:
        if not capture.right and not scored_only:
            wanted = "|".join(sorted(capture.capture.most))
            yield (
                f"\n{capture.capture.name} engine {capture.capture.engine}, {capture.capture.what}: wanted {wanted}, "
                f"said {histogram(capture.ticks)}, never-ticks {capture.never_ticks}"
            )
            yield from _details(capture.ticks, capture.verdict)


def _wrong(window: Window) -> bool:
    if window.kind in (POSITIVE, EPISODE):
        return not window.claimed
    if window.kind == OTHER:
        return window.claimed or window.verdict == "unknown"
    return window.kind == NO_CLAIM and window.claimed


def _answer(answer: Answer) -> Iterator[str]:
    item = answer.incident
    yield (
        f"\n{item.name} [{item.kind} {item.grade}] {item.start:.0f}-{item.end:.0f} s: {answer.outcome}, wanted "
        f"{'|'.join(sorted(item.expected))}, said {histogram(answer.ticks)}, mean confidence "
        f"{answer.confidence:.2f}, confident forbidden ticks {answer.forbidden_ticks}"
    )
    if not answer.conditions_right:
        yield (
            f"  conditions: true {', '.join(answer.conditions_true) or 'none'}; wanted one of "
            f"{'|'.join(sorted(item.expected_conditions)) or 'none'}; forbidden "
            f"{'|'.join(sorted(item.forbidden_conditions)) or 'none'}"
        )
    yield from _details(answer.ticks, answer.verdict)


def _details(ticks: Sequence[Tick], verdict: str) -> Iterator[str]:
    """Evidence and conditions at the middle one of the ticks that carry the verdict."""
    carrying = [tick for tick in ticks if tick.verdict == verdict]
    tick = carrying[len(carrying) // 2]
    low, high = min(t.confidence for t in carrying), max(t.confidence for t in carrying)
    yield (
        f"  {verdict} at {tick.t:.0f} s, confidence {tick.confidence:.2f} (over its ticks {low:.2f}-{high:.2f}), stage"
        f" {tick.stage}"
    )
    for title, names in (("evidence", tick.evidence), ("conditions", tick.conditions)):
        for word, value in (("true", True), ("false", False), ("not known", None)):
            listed = sorted(name for name, seen in names.items() if seen is value)
            if listed:
                yield f"  {title} {word}: {', '.join(listed)}"
