"""promtool unit tests, generated from the same specification as the rules.

For every level of every alert: boundaries around each threshold, one evaluation before and at ``for``, recovery with
and without ``keep_firing_for``, missing series, NaN, counter resets, and conditions met on another subject only.
Annotations are not tested here: a live Prometheus checks them once. Samples lie on the evaluation grid, and nothing
is asserted within two steps of the end of a range, so that the tests hold for Prometheus 2.42 and for the left-open
ranges of 3.x.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final, TypeVar

from kvpressure.bundle.rules import PREFIX, labels_of
from kvpressure.bundle.spec import Alert, AlertLevel, Recording, RecordingTest, RuleGroup
from kvpressure.bundle.text import duration
from kvpressure.bundle.values import BundleValues
from kvpressure.bundle.variants import (
    COMPARE,
    QUIET_SECONDS,
    TAIL_STEPS,
    Builder,
    CaseTimeline,
    InputSeries,
    Variant,
    recorded_at,
    recorded_line,
)

_Value = TypeVar("_Value")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_TOLD_BY: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (name,) for name in ("cluster", "model_name", "engine", "container")},
    **{name: (name, f"exported_{name}") for name in ("namespace", "pod")},
    "node": ("node", "exported_node", "Hostname"),
    "uuid": ("uuid", "UUID"),
    "workload": ("pod", "exported_pod", "workload", "deployment", "statefulset"),
}
"""Labels that tell subjects apart, and the labels of inputs that they come from."""


def test_files(groups: Sequence[RuleGroup], values: BundleValues, rule_file: str) -> dict[str, dict[str, Any]]:
    """One test file per family: file name -> document for ``promtool test rules``."""
    order = [PREFIX + group.name for group in groups]
    recorded = {recording.name: recording.labels for group in groups for recording in group.recordings}
    files: dict[str, dict[str, Any]] = {}
    for group in groups:
        tests = [test for alert in group.alerts for test in _alert_tests(alert, group.interval, values, recorded)]
        tests += [test for recording in group.recordings for test in _recording_tests(recording, group.interval)]
        if tests:
            files[f"{group.name}.yaml"] = {
                "rule_files": [rule_file],
                "evaluation_interval": duration(group.interval),
                "group_eval_order": order,
                "tests": tests,
            }
    return files


def _recording_tests(recording: Recording, step: float) -> Iterable[dict[str, Any]]:
    """Tests of the recorded values after a quiet period; rounded, because rates differ in the last bits between
    versions.
    """
    for number, test in enumerate(recording.tests, 1):
        after = test.after or QUIET_SECONDS
        line = recorded_line(step, after)
        inputs, expected = _everywhere(recording, test.inputs), _everywhere(recording, test.expect)
        for label in recording.labels:
            for more, recorded in _apart(test, _TOLD_BY.get(label, ())):
                inputs |= more
                expected |= recorded
        series = [InputSeries(name, f"{samples}x{line.length - 1}") for name, samples in inputs.items()]
        samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
        yield _test(
            f"recording {recording.name} {number}",
            line,
            series,
            {
                "promql_expr_test": [
                    {
                        "expr": f"round({recording.name}, 0.0001)",
                        "eval_time": duration(recorded_at(step, after)),
                        "exp_samples": samples,
                    }
                ]
            },
        )


def _everywhere(recording: Recording, series: Mapping[str, _Value]) -> dict[str, _Value]:
    """The series, and once more for every identity label with another value of that label alone, because a rule that
    joins or sums without the label mixes the two.
    """
    found = dict(series)
    for label in recording.labels:
        if label in _TOLD_BY:
            found |= {_moved(name, _TOLD_BY[label]): value for name, value in series.items()}
    return found


def _apart(test: RecordingTest, names: Sequence[str]) -> Iterable[tuple[dict[str, str], dict[str, float]]]:
    """One input at a time, and one veto, on a subject that differs in ``names`` alone."""
    for index, one in enumerate(test.inputs if test.needed else ()):
        if _moved(one, names) != one:
            rest = {_moved(name, names, f"without-{index}-"): test.inputs[name] for name in test.inputs if name != one}
            yield {**rest, _moved(one, names, f"only-{index}-"): test.inputs[one]}, {}
    for index, (veto, samples) in enumerate(test.vetoes.items()):
        for place, silent in ((f"silenced-{index}-", True), (f"spared-{index}-", False)):
            if _moved(veto, names) != veto:
                inputs = {_moved(name, names, place): values for name, values in test.inputs.items()}
                vetoed = {_moved(veto, names, place if silent else f"beside-{index}-"): samples}
                recorded = {_moved(name, names, place): value for name, value in test.expect.items()}
                yield inputs | vetoed, {} if silent else recorded


def _moved(series: str, names: Sequence[str], to: str = "other-") -> str:
    """The series with other values of ``names``, where it has them; in another cluster also where it names none."""
    start = series.index("{")
    labels = dict(_LABEL.findall(series[start:]))
    moved = {name: f"{to}{value}" if value and name in names else value for name, value in labels.items()}
    if "cluster" in names:
        moved.setdefault("cluster", to)
    return f"{series[:start]}{_braces(moved)}"


def timeline(level: AlertLevel, step: float) -> CaseTimeline:
    """When the driver is on, and how long the test runs."""
    window = max((item.window for case in level.cases for item in case.inputs), default=0.0)
    onset = ceil((QUIET_SECONDS + window) / step)
    end = onset + ceil((level.for_seconds + window) / step) + TAIL_STEPS
    driver = level.cases[0].inputs[0]
    leaves = level.keep_seconds + (driver.window if driver.op in COMPARE else 0)
    return CaseTimeline(step, onset, end, end + ceil(leaves / step) + 2 * TAIL_STEPS)


def _alert_tests(
    alert: Alert, step: float, values: BundleValues, recorded: Mapping[str, tuple[str, ...]]
) -> Iterable[dict[str, Any]]:
    for level in alert.levels:
        if not level.cases:  # tested by situations that take hours instead
            continue
        line = timeline(level, step)
        builder = Builder(alert.subject, level, line, recorded)
        variants = builder.all()
        title = f"{alert.name} {level.severity}"
        if alert.subject == "none":
            for variant in variants:
                yield _situations(f"{title}: {variant.name}", alert, level, line, [variant], values)
        else:
            yield _situations(f"{title}: boundaries, waits, gaps and neighbours", alert, level, line, variants, values)


def _situations(
    title: str, alert: Alert, level: AlertLevel, line: CaseTimeline, variants: list[Variant], values: BundleValues
) -> dict[str, Any]:
    firing = [variant for variant in variants if variant.fires]
    return _test(
        title,
        line,
        [series for variant in variants for series in variant.series],
        {
            "promql_expr_test": [
                _assertion(alert, level, step * line.step, firing if fires else [], values)
                for step, fires in _moments(level, line)
            ],
        },
    )


def _moments(level: AlertLevel, line: CaseTimeline) -> list[tuple[int, bool]]:
    """(step, whether the firing variants fire then)."""
    wait, keep = ceil(level.for_seconds / line.step), ceil(level.keep_seconds / line.step)
    moments = [(line.onset + wait - 1, False), (line.onset + wait, True)]
    driver = level.cases[0].inputs[0]
    if driver.op in ("counts", "events"):
        over = line.onset + ceil(driver.window / line.step)
        return [*moments, (over - 2, True), (over + keep + 2, False)]
    if driver.op == "flat":
        flat = line.onset + ceil(driver.window / line.step) - 1
        return [(flat + wait - 1, False), (flat + wait, True), (line.end - 1, True), (line.end + 2, False)]
    moments.append((line.end - 1, True))
    if level.share_seconds:  # it leaves the window only after this time
        keep += ceil((level.share_seconds - level.for_seconds) / line.step)
        return [*moments, (line.end + keep - 3, True), (line.end + keep + 1, False)]
    if driver.window:  # judged over a window: ends as long after
        return [*moments, (line.end + ceil(driver.window / line.step) + keep + 1, False)]
    if keep:
        moments.append((line.end + keep - 1, True))
    return [*moments, (line.end + keep, False)]


def _assertion(
    alert: Alert, level: AlertLevel, at: float, firing: list[Variant], values: BundleValues
) -> dict[str, Any]:
    matcher = {"alertname": alert.name, "alertstate": "firing", "severity": labels_of(alert, level, values)["severity"]}
    samples = []
    for variant in firing:
        labels = {**matcher, **labels_of(alert, level, values), **variant.labels}
        samples.append({"labels": f"ALERTS{_braces(labels)}", "value": 1})
    return {"expr": f"ALERTS{_braces(matcher)}", "eval_time": duration(at), "exp_samples": samples}


def _test(title: str, line: CaseTimeline, series: list[InputSeries], assertions: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": title,
        "interval": duration(line.step),
        "input_series": [{"series": item.name, "values": item.values} for item in series],
        **assertions,
    }


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
