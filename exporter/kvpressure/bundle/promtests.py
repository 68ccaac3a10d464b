"""promtool unit tests, generated from the same specification as the rules.

For every level of every alert: boundaries around each threshold, one evaluation before and at ``for``, recovery with and
without ``keep_firing_for``, missing series, NaN, counter resets, and conditions met on another subject only; and the
expected text of every annotation. Samples lie on the evaluation grid, and nothing is asserted within two steps of
the end of a range, so the tests hold for Prometheus 2.42 as for the left-open ranges of 3.x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Final

from kvpressure.bundle.gotext import expand
from kvpressure.bundle.rules import PREFIX, annotations_of, labels_of
from kvpressure.bundle.spec import Alert, Group, Input, Level, Recording, TestCase
from kvpressure.bundle.text import duration
from kvpressure.bundle.values import Values
from kvpressure.bundle.variants import Builder, Series, Timeline, Variant, holds, identity, on_value, plain

_QUIET_SECONDS: Final = 360  # before anything happens; longer than the five-minute ranges of the recordings
_TAIL_STEPS: Final = 4  # after the last assertion, and slack around the end of a range
_RECOMMENDED: Final = {
    "max_num_seqs": 48.0,
    "max_num_batched_tokens": 4096.0,
    "gpu_memory_utilization": 0.7,
    "max_model_len": 16384.0,
}


def test_files(groups: Sequence[Group], values: Values, rule_file: str) -> dict[str, dict[str, Any]]:
    """One test file a family: file name -> document for ``promtool test rules``."""
    order = [PREFIX + group.name for group in groups]
    files: dict[str, dict[str, Any]] = {}
    for group in groups:
        tests = [test for alert in group.alerts for test in _alert_tests(alert, group.interval, values)]
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
    """Values of the recorded series after a quiet while; rounded, because rates differ in the last bits between versions."""
    line = Timeline(step, 0, 0, ceil(_QUIET_SECONDS / step) + _TAIL_STEPS)
    for number, (inputs, expected) in enumerate(recording.tests, 1):
        series = [Series(name, f"{samples}x{line.length - 1}") for name, samples in inputs.items()]
        samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
        yield _test(
            f"recording {recording.name} {number}",
            line,
            series,
            {
                "promql_expr_test": [
                    {
                        "expr": f"round({recording.name}, 0.0001)",
                        "eval_time": duration((line.length - 1) * step),
                        "exp_samples": samples,
                    }
                ]
            },
        )


def timeline(level: Level, step: float) -> Timeline:
    """When the driver is on, and how long the test runs."""
    window = max((item.window for case in level.cases for item in case.inputs), default=0.0)
    onset = ceil((_QUIET_SECONDS + window) / step)
    end = onset + ceil((level.for_seconds + window) / step) + _TAIL_STEPS
    return Timeline(step, onset, end, end + ceil(level.keep_seconds / step) + 2 * _TAIL_STEPS)


def _alert_tests(alert: Alert, step: float, values: Values) -> Iterable[dict[str, Any]]:
    for level in alert.levels:
        line = timeline(level, step)
        builder = Builder(alert.subject, level, line)
        variants = builder.all()
        title = f"{alert.name} {level.severity}"
        if alert.subject == "none":
            for variant in variants:
                yield _situations(f"{title}: {variant.name}", alert, level, line, [variant], values)
        else:
            yield _situations(f"{title}: boundaries, waits, gaps and neighbours", alert, level, line, variants, values)
        yield _texts(f"{title}: labels and texts", alert, level, line, builder, values)


def _situations(
    title: str, alert: Alert, level: Level, line: Timeline, variants: list[Variant], values: Values
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


def _moments(level: Level, line: Timeline) -> list[tuple[int, bool]]:
    """(step, whether the firing variants fire then)."""
    wait, keep = ceil(level.for_seconds / line.step), ceil(level.keep_seconds / line.step)
    moments = [(line.onset + wait - 1, False), (line.onset + wait, True)]
    driver = level.cases[0].inputs[0]
    if driver.op in ("counts", "events"):
        over = line.onset + ceil(driver.window / line.step)
        return [*moments, (over - 2, True), (over + keep + 2, False)]
    if driver.op == "flat":
        over = line.onset + ceil(driver.window / line.step)
        return [
            (over - 2, False),
            (over + wait - 3, False),
            (over + wait + 2, True),
            (line.end - 1, True),
            (line.end + 2, False),
        ]
    moments.append((line.end - 1, True))
    if keep:
        moments.append((line.end + keep - 1, True))
    return [*moments, (line.end + keep, False)]


def _assertion(alert: Alert, level: Level, at: float, firing: list[Variant], values: Values) -> dict[str, Any]:
    matcher = {"alertname": alert.name, "alertstate": "firing", "severity": labels_of(alert, level, values)["severity"]}
    samples = []
    for variant in firing:
        labels = {**matcher, **labels_of(alert, level, values), **variant.labels}
        samples.append({"labels": f"ALERTS{_braces(labels)}", "value": 1})
    return {"expr": f"ALERTS{_braces(matcher)}", "eval_time": duration(at), "exp_samples": samples}


def _texts(title: str, alert: Alert, level: Level, line: Timeline, builder: Builder, values: Values) -> dict[str, Any]:
    """The alert with all its labels and annotations; other severities that the same series raise are listed too."""
    case = next(case for case in level.cases if case.fires)
    variant = builder.base(case, "fires")
    at = next(step for step, fires in _moments(level, line) if fires) * line.step
    ids = identity(alert.subject, "fires")
    recommended = _RECOMMENDED if alert.subject == "engine" else {}
    series = variant.series + [
        Series(
            f"kvpressure_limit_recommended{_braces({**{k: ids[k] for k in _ENGINE}, 'limit': name})}",
            plain(value, line.length),
        )
        for name, value in recommended.items()
    ]
    expected = []
    for other in alert.levels:
        value = _value_on(other, case) if other is not level else _own_value(case)
        if value is None or other.for_seconds > level.for_seconds:
            continue
        annotations = {
            key: expand(text, variant.labels, value, recommended)
            for key, text in annotations_of(alert, other, values).items()
        }
        expected.append(
            {"exp_labels": {**labels_of(alert, other, values), **variant.labels}, "exp_annotations": annotations}
        )
    return _test(
        title,
        line,
        series,
        {"alert_rule_test": [{"eval_time": duration(at), "alertname": alert.name, "exp_alerts": expected}]},
    )


_ENGINE: Final = ("namespace", "pod", "model_name", "engine")


def _own_value(case: TestCase) -> float:
    if case.value is not None:
        return case.value
    driver = case.inputs[0]
    return 1.0 if driver.op == "veto" else on_value(driver)


def _value_on(level: Level, shown: TestCase) -> float | None:
    """The value of ``level`` when the series are those of ``shown``, or None when it does not fire then."""
    present = {(item.metric, tuple(item.labels.items())): item for item in shown.inputs if item.op != "veto"}
    for case in level.cases:
        if case.fires and all(
            _met(item, present.get((item.metric, tuple(item.labels.items())))) for item in case.inputs
        ):
            driver = case.inputs[0]
            return (
                on_value(present[driver.metric, tuple(driver.labels.items())]) if shown.value is None else shown.value
            )
    return None


def _met(wanted: Input, present: Input | None) -> bool:
    if wanted.op in ("veto", "extra"):
        return wanted.op == "extra" or present is None
    return present is not None and holds(wanted, on_value(present))


def _test(title: str, line: Timeline, series: list[Series], assertions: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": title,
        "interval": duration(line.step),
        "input_series": [{"series": item.name, "values": item.values} for item in series],
        **assertions,
    }


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
