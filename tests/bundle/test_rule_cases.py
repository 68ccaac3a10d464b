"""Each alert has a case that fires, one that does not, and its boundary; each recording its values. promtool judges."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpressure.bundle.rules import metrics_read, rule_file
from kvpressure.bundle.spec import AlertLevel
from kvpressure.bundle.text import to_yaml
from kvpressure.bundle.values import BundleValues
from kvpressure.publish.metrics import PREFIXED
from tests.helpers.rule_cases import GROUPS, PACKS, alert_test, alerts, levels, needed_by, recording_test, recordings
from tests.helpers.situations import load

pytestmark = pytest.mark.live

LEVELS = {
    (pack, alert.name, level.name): level
    for pack, groups in GROUPS.items()
    for group in groups
    for alert in group.alerts
    for level in alert.levels
}
BY_SITUATIONS = {  # of hours, or of a Prometheus that has no series at all
    *(("kvpressure", name) for situation in load() for name in (*situation.by, *situation.ticket_by)),
    ("vllm", "InferenceMetricsAbsent"),
}
CLAIMED = re.compile(r"\b(?:for|over|in the last)(?: more than| the last)? (\d+) ?(s|second|minute|hour|day)s?\b", re.I)
CASES = "see tests/bundle/situations/alerts.yaml or recordings.yaml"
UNIT_SECONDS = {"s": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400}


def promtool(document: dict[str, Any], folder: Path) -> str:
    """What promtool does not find as the document says; empty where all is."""
    path = folder / "test.yaml"
    path.write_text(json.dumps(document))
    result = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120)
    return f"{result.stdout}{result.stderr}\n{CASES}" if result.returncode else ""


def rules_for(name: str, pack: str, folder: Path, values: BundleValues | None = None) -> Path:
    groups = needed_by(name, rule_file(GROUPS[pack], values or BundleValues())["groups"])
    (folder / "rules.yaml").write_text(to_yaml({"groups": groups}))
    return folder / "rules.yaml"


@pytest.mark.parametrize(("pack", "alert"), [(pack, alert) for pack in PACKS for alert in alerts(pack)])
def test_it_fires_where_it_should_and_nowhere_else(tmp_path: Path, pack: str, alert: str) -> None:
    document = alert_test(rules_for(alert, pack, tmp_path), alert, pack, GROUPS[pack])
    assert promtool(document, tmp_path) == ""


@pytest.mark.parametrize(("pack", "recording"), [(pack, name) for pack in PACKS for name in recordings(pack)])
def test_it_records_what_is_expected(tmp_path: Path, pack: str, recording: str) -> None:
    document = recording_test(rules_for(recording, pack, tmp_path), recording, pack)
    assert promtool(document, tmp_path) == ""


@pytest.mark.parametrize("alert", alerts("kvpressure"))
def test_with_the_kept_series_alone_the_same_alerts_fire(tmp_path: Path, alert: str) -> None:
    kept = re.compile("|".join(metrics_read(rule_file(GROUPS["kvpressure"], BundleValues()))))
    document = alert_test(rules_for(alert, "kvpressure", tmp_path), alert, "kvpressure", GROUPS["kvpressure"])
    (test,) = document["tests"]
    given = test["input_series"]
    test["input_series"] = [
        one
        for one in given
        if not one["series"].startswith("kvpressure_") or kept.fullmatch(one["series"].split("{")[0])
    ]
    assert test["input_series"]
    assert test["input_series"] == given or promtool(document, tmp_path) == ""


@pytest.mark.parametrize(
    ("pools", "spare"),
    [
        (
            {
                "decode": {"saturated": (1, 1), "spare_capacity": (0, 0)},
                "prefill": {"saturated": (0,) * 6, "spare_capacity": (1,) * 6},
            },
            ',spare="prefill"',
        ),
        ({"decode": {"saturated": (1, 1, 1, 1), "spare_capacity": (0, 0, 0, 0), "slow": (1, 0, 0, 0)}}, ""),
    ],
    ids=["six idle prefill servers", "no prefill server is seen, and one decode server is slow"],
)
def test_full_decode_servers_are_told_of_another_side_only_where_it_has_room(
    tmp_path: Path, pools: dict[str, dict[str, tuple[int, ...]]], spare: str
) -> None:
    """By the shares of each pool, one alert names decode alone."""
    of_pool = {role: f'namespace="inf",model_name="m",pool="chat-{role}",role="{role}"' for role in pools}
    found = [(role, name, values) for role, findings in pools.items() for name, values in findings.items()]
    given = [
        {
            "series": f'kvpressure_finding{{{of_pool[role]},pod="{role}-{n}",engine="0",finding="{name}"}}',
            "values": f"{value}x40",
        }
        for role, name, values in found
        for n, value in enumerate(values)
    ]
    given += [
        {"series": f'kvpressure_engine_pool_info{{{labels},pod="{role}-0",engine="0",pair="chat"}}', "values": "1x40"}
        for role, labels in of_pool.items()
    ]
    alert = "InferencePoolImbalanced"
    firing = f'{{__name__="ALERTS",alertname="{alert}",alertstate="firing",severity="warning",{of_pool["decode"]}'
    expected = [
        {
            "expr": "ALERTS",
            "eval_time": "30m",
            "exp_samples": [{"labels": f'{firing}{spare},kvpressure_family="pressure"}}', "value": 1}],
        },
    ]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expected}
    rules = rules_for(alert, "kvpressure", tmp_path)
    assert promtool({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}, tmp_path) == ""


def owned_by_the_scraper(series: str) -> str:
    """The series as a scraper that owns namespace and pod stores it; the exporter publishes the engine's names."""
    metric, _, labels = series.partition("{")
    if metric.startswith("kube_") or metric == "up":
        return series
    labels = re.sub(r"\b(namespace|pod)=", lambda label: f"{PREFIXED[label[1]]}=", labels)
    return f"{metric}{{{labels}" if ":" in metric else f'{metric}{{namespace="monitoring",pod="kvpressure-1",{labels}'


@pytest.mark.parametrize("alert", alerts("kvpressure"))
def test_where_the_scraper_owns_namespace_and_pod_the_same_alerts_fire(tmp_path: Path, alert: str) -> None:
    rules = rules_for(alert, "kvpressure", tmp_path, BundleValues(engine_labels="prefixed"))
    document = alert_test(rules, alert, "kvpressure", GROUPS["kvpressure"])
    for test in document["tests"]:
        for one in test["input_series"]:
            one["series"] = owned_by_the_scraper(one["series"])
    assert promtool(document, tmp_path) == ""


def test_every_alert_and_recording_has_its_cases() -> None:
    known = {(pack, alert, severity) for pack in PACKS for alert, row in alerts(pack).items() for severity in row}
    assert known - LEVELS.keys() == set(), f"cases of no alert: {CASES}"
    without = {key for key in LEVELS.keys() - known if key[:2] not in BY_SITUATIONS and key[0] != "literal"}
    assert without == set(), f"an alert without cases: {CASES}"
    for pack in ("kvpressure", "vllm"):
        assert set(recordings(pack)) == {item.name for group in GROUPS[pack] for item in group.recordings}


def test_alerts_that_the_literal_profile_changes_have_their_own_cases() -> None:
    default = {(alert, severity): level for (pack, alert, severity), level in LEVELS.items() if pack == "kvpressure"}
    changed = {
        alert
        for (pack, alert, severity), level in LEVELS.items()
        if pack == "literal" and level.expr != default[alert, severity].expr
    }
    assert changed <= set(alerts("literal"))


def claimed_minutes(level: AlertLevel) -> float:
    """The longest time of which the level's texts say that something lasted as long; 0 if they say none."""
    found = CLAIMED.findall(f"{level.summary}. {level.description}")
    return max((int(count) * UNIT_SECONDS[unit.lower()] for count, unit in found), default=0) / 60


@pytest.mark.parametrize(("pack", "alert"), [(pack, alert) for pack in PACKS for alert in alerts(pack)])
def test_what_a_text_says_of_a_time_is_true_of_younger_series(pack: str, alert: str) -> None:
    """A range holds what there is of it: two samples a second apart are a rate over five minutes. The cases begin with
    their series, and fire no earlier than ``after``.
    """
    for level in levels(alert, pack, GROUPS[pack]):
        assert level.after >= claimed_minutes(level.specified), level.specified.name
