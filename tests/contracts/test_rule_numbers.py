"""Rules do not judge again: what they compare with is published, documented, a time, or stands here with its reason."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from kvpressure.bundle.spec import EVALUATION_INTERVALS
from kvpressure.diagnosis.findings import PUBLISHED
from kvpressure.model.state import SIGNATURE_CONDITIONS
from kvpressure.settings.thresholds import builtin

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alerts/kvpressure-rules.yaml"
CLUSTER = {
    ("InferenceObjectiveBurn", 14.4): "SRE workbook: 2 % of a month's budget in an hour",
    ("InferenceObjectiveBurn", 6): "SRE workbook: 5 % of a month's budget in six hours",
    ("InferenceObjectiveBurn", 3): "SRE workbook: 10 % of a month's budget in a day",
    ("pool:kvpressure_objective_burn_rate", 100): "fewer requests than that are no share of a budget",
    ("KvpressureExportersDown", 0.6): "more than a drained node in a cluster of three",
    ("KvpressureExporterImpaired", 6): "scrapes, counted by Prometheus: a rate needs two in its window",
    ("InferencePoolImbalanced", 0.5): "most engines of a pool, and most of the last minutes of an engine",
    ("InferenceCrashLoop", 3): "restarts, counted by PromQL because an exporter's count ends with its own restart",
}
"""Numbers of the rules that are neither documented nor times, by rule and value, each with its reason."""

NUMBER = re.compile(r"(?<![\w.:])\d+(?:\.\d+)?(?![\w.:])")
COUNTED = "|".join(map(str, EVALUATION_INTERVALS.values()))
NO_NUMBER = re.compile(rf'"[^"]*"|\[[^\]]*\]|\boffset \w+|\* (?:{COUNTED})\b')  # text, windows, evaluations as seconds
FINDING = re.compile(r'\bfinding=~?\\?"([^"\\]+)')


def compared() -> set[tuple[str, float]]:
    """Rule and number of every expression, without 0, 1 and times (whole half-minutes)."""
    rules = [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    found = {
        (re.sub(r"(burn_rate):\w+", r"\1", rule.get("alert") or rule["record"]), float(number))
        for rule in rules
        for number in NUMBER.findall(NO_NUMBER.sub("", rule["expr"]))
    }
    return {(rule, number) for rule, number in found if (number > 1 and number % 30) or 0 < number < 1}


def test_a_rule_compares_with_documented_numbers_and_those_of_the_table() -> None:
    documented = {
        (rule, entry.value) for entry in builtin().entries() if entry.documented for rule in entry.rule.split(", ")
    }
    assert compared() - documented == CLUSTER.keys()
    assert len(CLUSTER) <= 10


def test_the_published_findings_are_those_that_a_rule_or_dashboard_reads() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (RULES, *(ROOT / "dashboards").rglob("*.json"))]
    patterns = {pattern for text in texts for pattern in FINDING.findall(text)}
    published = {*PUBLISHED, *(f"signature_{name}" for name in SIGNATURE_CONDITIONS)}
    read = {name for name in published for pattern in patterns if re.fullmatch(pattern, name)}
    assert read == published
    alone = {name for pattern in patterns if "*" not in pattern for name in pattern.split("|")}
    assert alone <= published
