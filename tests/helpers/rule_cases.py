"""The readable cases of alerts and recordings (``tests/bundle/situations``) as unit tests for promtool.

Each case is a cluster of its own, so that one test holds them all, and what fires for one must be silent for its
neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Final

import yaml

from kvpressure.bundle.rules import Options, load_groups
from kvpressure.bundle.spec import SUBJECTS, Alert, AlertLevel, RuleGroup
from kvpressure.settings.thresholds import builtin
from tests.helpers.situations import FILE, MINUTES, doubled, in_cluster, named, pools, samples

FOLDER: Final = FILE.parent
STEP: Final = 60.0
"""Seconds between samples, and between evaluations."""
RECORDED_AT: Final = 15
"""Minute at which a recording is asked for, where its case names no other."""
OPT_OUT: Final = 'kvpressure_container_alerts_info{$C,alerts="off"}'

PACKS: Final = {
    "kvpressure": Options(builtin()),
    "vllm": Options(builtin(), source="vllm"),
    "literal": Options(builtin(), profile="literal"),
}
GROUPS: Final = {pack: load_groups(options) for pack, options in PACKS.items()}
Series = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Case:
    """Series in a cluster of their own, and whether the alert fires for them."""

    cluster: str
    series: Mapping[str, str]
    fires: bool


@dataclass(frozen=True, slots=True)
class Level:
    """One level of an alert; ``after``: minutes from the first sample until it fires. ``kept``: minutes for which it
    stays active after the last sample of ``recovering``, which is at ``after``.
    """

    alert: str
    specified: AlertLevel
    after: int
    cases: tuple[Case, ...]
    kept: int = 0
    recovering: Case | None = None


def alerts(pack: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The alerts of one pack of the file: name -> level -> its row."""
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = _read("alerts")[pack]
    return found


def recordings(pack: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The recordings of one pack: name -> what is given and what is expected."""
    found: Mapping[str, Sequence[Mapping[str, Any]]] = _read("recordings").get(pack, {})
    return found


def levels(alert: str, pack: str, groups: Sequence[RuleGroup]) -> list[Level]:
    """Every level of ``alert``, with the cases that are added to each: two exporters, opted out, and over."""
    (found,) = (one for group in groups for one in group.alerts if one.name == alert)
    specified = {level.name: level for level in found.levels}
    return [_level(found, specified[name], row) for name, row in alerts(pack)[alert].items()]


def _level(alert: Alert, level: AlertLevel, row: Mapping[str, Any]) -> Level:
    opted_out = any(item.name == "opt_out" for item in level.conditions)
    cases = tuple(_cases(row, level.name, alert.subject, opted_out))
    found = Level(alert.name, level, _minutes(row.get("after", "0m")), cases)
    fires = row["fires"] if isinstance(row["fires"], Mapping) else row["fires"][0]
    if not level.keep_seconds or any(isinstance(value, str) for value in fires.values()):
        return found
    series = {name: f"{found.after + 1}m {value}; 1m -" for name, value in fires.items()}
    recovering = Case(f"{level.name} over", _written_out(series), True)
    kept = ceil((level.keep_seconds + (30 if level.lasted_seconds else 0)) / STEP)  # it asks for half a minute ago, too
    return replace(found, cases=(*cases, recovering), kept=kept, recovering=recovering)


def _minutes(text: str) -> int:
    return int(text.removesuffix("m"))


def _cases(row: Mapping[str, Any], name: str, subject: str, opted_out: bool) -> Iterator[Case]:
    for key in ("fires", "silent", "boundary_fires", "boundary_silent"):
        items = row.get(key, ())
        for index, series in enumerate([items] if isinstance(items, Mapping) else items, 1):
            yield Case(f"{name} {key} {index}", _written_out(series), key.endswith("fires"))
    fires = row["fires"] if isinstance(row["fires"], Mapping) else row["fires"][0]
    if "node" not in SUBJECTS[subject]:
        yield Case(f"{name} seen by two exporters", doubled(_written_out(fires)), True)
    if opted_out:
        yield Case(f"{name} opted out", _written_out({**fires, OPT_OUT: 1}), False)


def _written_out(series: Series) -> dict[str, str]:
    """The series with all labels, and a single value as one that never changes."""
    written = {
        named(name, labels()): f"999m {value}" if isinstance(value, int | float) else value
        for name, value in series.items()
    }
    return written | pools(written, MINUTES)


def _with_labels(name: str) -> str:
    return re.sub(r"\$(\w+)", lambda match: labels()[match[1]], name)


@cache
def labels() -> dict[str, str]:
    """Short names of labels, as every file of the folder may use them."""
    return {
        name: text for file in ("situations", "alerts", "recordings") for name, text in _read(file)["labels"].items()
    }


@cache
def _read(name: str) -> Any:
    return yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def needed_by(name: str, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a rule file with the rules called ``name`` and the recordings that they read alone: promtool
    evaluates each minute what it loads.
    """
    exprs: dict[str, str] = {}
    for rule in (rule for group in groups for rule in group["rules"]):
        exprs[_called(rule)] = exprs.get(_called(rule), "") + rule["expr"]
    wanted, added = set[str](), {name}
    while added:
        wanted |= added
        added = {other for other in exprs.keys() - wanted if any(other in exprs[one] for one in wanted)}
    kept = ({**group, "rules": [rule for rule in group["rules"] if _called(rule) in wanted]} for group in groups)
    return [group for group in kept if group["rules"]]


def _called(rule: Mapping[str, str]) -> str:
    return rule.get("record") or rule["alert"]


def alert_test(rules: Path, alert: str, pack: str, groups: Sequence[RuleGroup]) -> dict[str, Any]:
    """The document for ``promtool test rules``: silent two minutes before its time, firing then, the others silent; and
    what is over is so after the time that the rule keeps it.
    """
    found = levels(alert, pack, groups)
    last = max(level.after + level.kept for level in found) + 2
    checks = [check for level in found for check in _checks(level)]
    return _document(rules, last, [case for level in found for case in level.cases], checks, alert)


def _checks(level: Level) -> Iterator[dict[str, Any]]:
    firing = [case for case in level.cases if case.fires]
    if level.after:
        yield _check(level, max(level.after - 2, 0), [])
    yield _check(level, level.after, firing)
    if level.recovering:
        yield _check(level, level.after + level.kept, firing)
        yield _check(level, level.after + level.kept + 1, [case for case in firing if case is not level.recovering])


def _check(level: Level, minute: int, firing: Sequence[Case]) -> dict[str, Any]:
    rule = level.specified
    which = f'alertname="{level.alert}",severity="{rule.severity}",documented_level="{rule.documented}"'
    active = f'{which},alertstate="firing",cluster=~"{rule.name} .*"'
    expected = [{"labels": f'{{cluster="{case.cluster}"}}', "value": 1} for case in firing]
    return {"expr": f"count by (cluster) (ALERTS{{{active}}})", "eval_time": f"{minute}m", "exp_samples": expected}


def recording_test(rules: Path, recording: str, pack: str) -> dict[str, Any]:
    """The document for the values of one recording, to four decimals, because rates differ in the last bits."""
    cases, checks = [], []
    for index, row in enumerate(recordings(pack)[recording], 1):
        cluster = f"case {index}"
        cases.append(Case(cluster, _written_out(row["given"]), False))
        checks.append(
            {
                "expr": f'round({recording}{{cluster=~"{cluster}(/.*)?"}}, 0.0001)',
                "eval_time": f"{row.get('at', RECORDED_AT)}m",
                "exp_samples": [
                    {"labels": in_cluster(_with_labels(name), cluster).replace(",}", "}"), "value": value}
                    for name, value in row["expect"].items()
                ],
            }
        )
    last = max(row.get("at", RECORDED_AT) for row in recordings(pack)[recording]) + 1
    return _document(rules, last, cases, checks, recording)


def _document(
    rules: Path, last: int, cases: Sequence[Case], checks: Sequence[Mapping[str, Any]], name: str
) -> dict[str, Any]:
    series = [
        {"series": in_cluster(one, case.cluster), "values": samples(values, last, STEP)}
        for case in cases
        for one, values in case.series.items()
    ]
    order = [group["name"] for group in yaml.load(rules.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]]
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{STEP:g}s",
        "group_eval_order": order,
        "tests": [{"name": name, "interval": f"{STEP:g}s", "input_series": series, "promql_expr_test": list(checks)}],
    }
