"""Prometheus's own rule engine over scraped series: ``promtool test rules`` with the generated rule file.

Every alert is expected not to fire; each deviation that promtool prints is an alert that fires at that moment. So
``for``, ``keep_firing_for``, recordings and their order are Prometheus's, not ours. promtool evaluates every group at
one interval, the shortest. In production groups have 60 to 240 s, by their pace.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

import yaml

from kvpressure.bundle.spec import EVALUATION_INTERVALS
from lab.alerts.series import RULES, SCRAPE_SECONDS, Series

EVALUATION_SECONDS: Final = EVALUATION_INTERVALS["steady"]
HIDDEN: Final = ("KvpressureWatchdog",)  # always fires, by design
_QUERY: Final = f'ALERTS{{alertname!~"{"|".join(HIDDEN)}"}}'
_TIME: Final = re.compile(r'expr: ".*", time: (?P<time>[0-9hms.]+),')
_OF_ALERT: Final = re.compile(r"alertname: .*, time: (?P<time>[0-9hms.]+),")
_SAMPLE: Final = re.compile(r"\{(?P<labels>[^{}]*)\} 1E\+00")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PART: Final = re.compile(r"([0-9.]+)(ms|h|m|s)")
_UNIT: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class EngineError(Exception):
    """promtool could not evaluate the rules."""


@dataclass(frozen=True, slots=True)
class Active:
    """One alert instance at one evaluation: pending or firing."""

    at: float
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the alert."""
        return self.labels["alertname"]

    @property
    def firing(self) -> bool:
        """Firing, not only pending."""
        return self.labels["alertstate"] == "firing"

    @property
    def pages(self) -> bool:
        """Wakes somebody."""
        return self.labels["severity"] == "critical"

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What tells this instance from others."""
        return tuple(sorted(item for item in self.labels.items() if item[0] != "alertstate"))


@dataclass(frozen=True, slots=True)
class Episode:
    """One alert instance from its first firing evaluation to its last; seconds from the first scrape."""

    name: str
    severity: str
    pages: bool
    start: float
    end: float
    pending_since: float


def evaluate(
    series: Series,
    first: int = 0,
    end: int | None = None,
    *,
    scrape_seconds: float = SCRAPE_SECONDS,
    evaluation_seconds: float = EVALUATION_SECONDS,
) -> list[Active]:
    """Every active alert at every evaluation of the scrapes ``first`` to ``end``, in seconds from scrape 0."""
    end = series.scrapes if end is None else end
    length = (end - first) * scrape_seconds
    moments = range(ceil(length / evaluation_seconds))
    test = {
        "interval": f"{scrape_seconds:g}s",
        "input_series": [{"series": name, "values": values} for name, values in series.between(first, end)],
        "promql_expr_test": [
            {"expr": _QUERY, "eval_time": f"{number * evaluation_seconds:g}s", "exp_samples": []} for number in moments
        ],
    }
    document = _document(test, evaluation_seconds)
    return [Active(first * scrape_seconds + at, labels) for at, labels in _deviations(_promtool(document))]


def evaluate_each(
    many: Mapping[str, Series],
    *,
    scrape_seconds: float = SCRAPE_SECONDS,
    evaluation_seconds: float = EVALUATION_SECONDS,
    rules: Path = RULES,
) -> dict[str, list[Active]]:
    """The same for many at once, by name, with the rules of a file. Each is a cluster of its own, as rules tell
    clusters apart: an evaluation costs as much for one as for all.
    """
    ends = {name: ceil(series.scrapes * scrape_seconds / evaluation_seconds) for name, series in many.items()}
    moments = range(max(ends.values(), default=0))
    test = {
        "interval": f"{scrape_seconds:g}s",
        "input_series": [
            {"series": labelled.replace("{", f'{{cluster="{name}",', 1), "values": values}
            for name, series in many.items()
            for labelled, values in series.between(0, series.scrapes)
        ],
        "promql_expr_test": [
            {"expr": _QUERY, "eval_time": f"{number * evaluation_seconds:g}s", "exp_samples": []} for number in moments
        ],
    }
    document = _document(test, evaluation_seconds, rules)
    found: dict[str, list[Active]] = {name: [] for name in many}
    for at, labels in _deviations(_promtool(document)) if moments else ():
        name = labels.pop("cluster", "")
        if name in found and at < ends[name] * evaluation_seconds:
            found[name].append(Active(at, labels))
    return found


def _document(test: Mapping[str, Any], evaluation_seconds: float, path: Path = RULES) -> dict[str, Any]:
    """One test of the delivered rules; without an order promtool takes the groups as they fall, and an
    alert may lag its recordings.
    """
    rules = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {
        "rule_files": [str(path)],
        "evaluation_interval": f"{evaluation_seconds:g}s",
        "group_eval_order": [group["name"] for group in rules["groups"]],
        "tests": [test],
    }


def _promtool(document: Mapping[str, Any]) -> str:
    """What ``promtool test rules`` prints about a file of tests. Raises ``EngineError`` when it cannot use the file, or
    when a rule fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvpressure-") as folder:
        path = Path(folder) / "test.yaml"
        path.write_text(yaml.dump(document, Dumper=yaml.CSafeDumper, sort_keys=False, width=1 << 30), encoding="utf-8")
        done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode not in (0, 1) or (done.returncode == 1 and "got:" not in output) or ", err: " in output:
        raise EngineError(f"promtool: {(done.stderr or done.stdout).strip()[:2000]}")
    return output


def _deviations(output: str) -> Iterator[tuple[float, dict[str, str]]]:
    at = 0.0
    for line in output.splitlines():
        if found := _TIME.search(line):
            at = _seconds(found["time"])
        elif "got:" in line:
            for sample in _SAMPLE.finditer(line):
                yield at, dict(_LABEL.findall(sample["labels"]))


def _seconds(duration: str) -> float:
    return sum(float(count) * _UNIT[unit] for count, unit in _PART.findall(duration))


@dataclass(frozen=True, slots=True)
class Fired:
    """One alert that fires at one evaluation, as it would be sent to Alertmanager."""

    at: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def fired(series: Series, rules: Path = RULES, evaluation_seconds: float = EVALUATION_SECONDS) -> list[Fired]:
    """Every firing alert at every evaluation of all scrapes, in seconds from scrape 0."""
    groups = yaml.load(rules.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
    names = sorted({rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule})
    moments = range(ceil(series.scrapes * SCRAPE_SECONDS / evaluation_seconds))
    test = {
        "interval": f"{SCRAPE_SECONDS:g}s",
        "input_series": [{"series": name, "values": values} for name, values in series.between(0, series.scrapes)],
        "alert_rule_test": [
            {"eval_time": f"{number * evaluation_seconds:g}s", "alertname": name, "exp_alerts": []}
            for number in moments
            for name in names
        ],
    }
    found: list[Fired] = []
    at, labels = 0.0, {}
    for line in _promtool(_document(test, evaluation_seconds, rules)).splitlines():
        if head := _OF_ALERT.search(line):
            at = _seconds(head["time"])
        elif line.lstrip().startswith("Labels:{"):
            labels = _labels(line)
        elif line.lstrip().startswith("Annotations:{"):
            found.append(Fired(at, labels, _labels(line)))
    return found


def _labels(line: str) -> dict[str, str]:
    return {name: json.loads(f'"{value}"') for name, value in _LABEL.findall(line)}


def episodes(active: Iterable[Active], evaluation_seconds: float = EVALUATION_SECONDS) -> list[Episode]:
    """Firing stretches of each instance, in order of their start."""
    found: list[Episode] = []
    by_key: dict[tuple[tuple[str, str], ...], list[Active]] = {}
    for item in active:
        by_key.setdefault(item.key, []).append(item)
    for items in by_key.values():
        found.extend(_stretches(items, evaluation_seconds))
    return sorted(found, key=lambda episode: (episode.start, episode.name))


def _stretches(items: list[Active], evaluation_seconds: float) -> Iterator[Episode]:
    """``items``: one instance in order of time. A stretch ends where an evaluation is missing."""
    stretch: list[Active] = []
    for item in [*items, None]:
        if stretch and (item is None or item.at - stretch[-1].at > 1.5 * evaluation_seconds):
            firing = [one for one in stretch if one.firing]
            if firing:
                yield Episode(
                    firing[0].name,
                    firing[0].labels["severity"],
                    firing[0].pages,
                    firing[0].at,
                    firing[-1].at,
                    stretch[0].at,
                )
            stretch = []
        if item is not None:
            stretch.append(item)
