"""The Alertmanager example, judged by amtool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.bundle.spec import SUBJECTS
from tests.bundle.promql import result_labels
from tests.bundle.test_rules import recorded_labels
from tests.helpers.prometheus import accepted

pytestmark = pytest.mark.live


def test_amtool_accepts_the_configuration(tree: Path) -> None:
    assert "SUCCESS" in accepted("amtool", "check-config", str(tree / "alerts/alertmanager.yaml"))


def expected_receiver(labels: dict[str, str]) -> str:
    if labels["alertname"] == "KvpressureWatchdog":
        return "heartbeat"
    if labels["severity"] == "critical":
        return "pager"
    return "dashboards" if labels["severity"] == "info" else "tickets"


def receiver(tree: Path, labels: dict[str, str]) -> str:
    given = (f"{name}={value}" for name, value in labels.items())
    return accepted("amtool", "config", "routes", "test", f"--config.file={tree}/alerts/alertmanager.yaml", *given)


def test_every_rule_reaches_its_receiver(tree: Path, rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "alert" in rule:
            labels = {"alertname": rule["alert"], **rule["labels"], "namespace": "inference", "pod": "a"}
            assert receiver(tree, labels) == expected_receiver(labels), labels


def test_alerts_of_others_never_page(tree: Path) -> None:
    assert receiver(tree, {"alertname": "Other", "severity": "critical"}) == "tickets"


@pytest.fixture(scope="module")
def inhibitions(files: dict[str, str]) -> list[dict[str, Any]]:
    rules = yaml.safe_load(files["alerts/alertmanager.yaml"])["inhibit_rules"]
    assert rules
    return list(rules)


def test_inhibition_demands_the_label_that_identifies_its_subject(inhibitions: list[dict[str, Any]]) -> None:
    subject = {label for labels in SUBJECTS.values() for label in labels}
    for rule in inhibitions:
        if "alertname" in rule["equal"]:  # two of one name have the same kind of subject
            assert set(rule["equal"]) >= subject - {"node", "gpu", "vendor", "instance", "workload"}
            continue
        demanded = [
            {matcher.split("=~")[0] for matcher in rule[side] if matcher.endswith('=~".+"')} - {"kvpressure_family"}
            for side in ("source_matchers", "target_matchers")
        ]
        assert demanded[0] == demanded[1]
        assert demanded[0] & set(rule["equal"]) or rule["equal"] == ["cluster"], (
            "labels missing on both sides would count as equal"
        )


def test_matchers_name_labels_that_an_alert_has(inhibitions: list[dict[str, Any]], rules: list[dict[str, Any]]) -> None:
    """An exemption by a label that no alert has exempts nothing."""
    alerts = [rule for rule in rules if "alert" in rule]
    recorded = recorded_labels(rules)
    of_alerts = {"alertname"}.union(*({*rule["labels"], *result_labels(rule["expr"], recorded)} for rule in alerts))
    matchers = [
        matcher for rule in inhibitions for side in ("source", "target") for matcher in rule[f"{side}_matchers"]
    ]
    assert {re.split("[!=]", matcher)[0] for matcher in matchers} - of_alerts == set()
