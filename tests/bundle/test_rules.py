"""The generated rules, judged by promtool and by their syntax trees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser as pp
import pytest
import yaml

from kvpressure.bundle.rules import Options, load_groups, metrics_read, rule_file
from kvpressure.bundle.spec import FAMILIES, SEVERITIES, SUBJECTS, RuleGroup
from kvpressure.bundle.text import to_yaml, words
from kvpressure.bundle.values import BundleValues
from kvpressure.publish.metrics import METRICS
from kvpressure.settings.thresholds import builtin
from tests.bundle.promql import SCRAPE, metric_labels, metrics, result_labels, selectors, walk
from tests.helpers.prometheus import accepted
from tests.helpers.rule_cases import GROUPS, PACKS

pytestmark = pytest.mark.live

# Recordings that read themselves, with the labels that they declare.
REMEMBERING = {
    "pool:kvpressure_answered:last_timestamp_seconds": frozenset({*SUBJECTS["pool"], "revision"}),
    "workload:vllm_engines:last_timestamp_seconds": frozenset({"cluster", "namespace", "workload", "model_name"}),
    "exporter:kvpressure_build_info:last_timestamp_seconds": frozenset({"cluster", "job", "instance"}),
}
VARIANTS = list(PACKS)
LOOK_BACK_SECONDS = 300  # of a query, by default


def rules_of(variant: str) -> list[dict[str, Any]]:
    return [rule for group in rule_file(GROUPS[variant], BundleValues())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_promtool_accepts_the_rules(tmp_path: Path, variant: str) -> None:
    (tmp_path / "rules.yaml").write_text(to_yaml(rule_file(GROUPS[variant], BundleValues())))
    accepted("promtool", "check", "rules", tmp_path / "rules.yaml")


def test_labels_and_annotations_are_complete(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in SEVERITIES
        assert rule["labels"].get("documented_level") in (None, "critical", "warning")
        assert rule["labels"]["kvpressure_family"] in FAMILIES
        assert (rule["labels"]["severity"] == "none") == (rule["alert"] == "KvpressureWatchdog")
        assert set(rule["annotations"]) == {"summary", "description"}, "no link without an address"
        assert all(rule["annotations"].values())
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", rule["alert"])


def test_what_wakes_somebody_is_felt_by_users_and_never_a_documented_number(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if rule.get("labels", {}).get("severity") == "critical":
            assert "documented_level" not in rule["labels"], rule["alert"]
            assert rule["labels"]["kvpressure_family"] in (
                "objectives",
                "pressure",
                "harm",
                "failure",
                "hardware",
            ), rule["alert"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parser_overlooks_no_metric(variant: str) -> None:
    """Or the tests that ask it would pass whatever stands there."""
    for rule in rules_of(variant):
        bare = re.sub(r'"[^"]*"|\b(?:by|on|group_left)\s*\([^)]*\)', "", rule["expr"])
        named = set(
            re.findall(
                r"(?:\w+:)*\w*kvpressure\w*(?::\w+)?|(?:(?:engine|pod|workload):)?vllm\w*:\w+(?::\w+)?|gpu:dcgm\w*:\w+|http_requests_total|DCGM_\w+|kube_\w+|\b(?:up|ALERTS|process_start_time_seconds)\b",
                bare,
            )
        )
        assert named, rule
        assert metrics(rule["expr"]) == named, rule.get("alert") or rule["record"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_in_annotations_ask_for_what_exists(variant: str) -> None:
    known = {metric.full_name: {*metric.labels, *SCRAPE} for metric in METRICS}
    asked = [
        match
        for rule in rules_of(variant)
        if "alert" in rule
        for text in rule["annotations"].values()
        for match in re.finditer(r"\((kvpressure_\w+)\{(.*?)\}\)", text)
    ]
    assert asked or variant == "vllm"
    for match in asked:
        assert set(re.findall(r"(\w+)=", match[2])) <= known[match[1]], match[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_matched_label_exists(variant: str) -> None:
    rules = rules_of(variant)
    recorded = recorded_labels(rules)
    for rule in rules:
        for selector in selectors(rule["expr"]):
            name = str(selector.name)
            known = recorded[name] if name in recorded else set(metric_labels(name)) | SCRAPE
            for matcher in selector.matchers.matchers:
                assert matcher.name in known, f"{name}{{{matcher.name}}}"


def recorded_labels(rules: list[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """By recording; one may read another that stands further down, in a group of another evaluation interval."""
    waiting = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    found: dict[str, frozenset[str]] = {}
    while waiting:
        ready = [name for name, expr in waiting.items() if not metrics(expr) & (waiting.keys() - found.keys())]
        if not ready:  # one that reads itself, or two that read each other, have the labels they declare
            assumed = {name: REMEMBERING[name] for name in waiting.keys() & REMEMBERING.keys() - found.keys()}
            assert assumed, f"recordings read each other: {sorted(waiting)}"
            found |= assumed
        for name in ready:
            found[name] = result_labels(waiting.pop(name), found)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_recordings_have_the_labels_they_declare(variant: str) -> None:
    found = recorded_labels(rules_of(variant))
    for group in GROUPS[variant]:
        for recording in group.recordings:
            assert found[recording.name] == set(recording.labels), recording.name
            assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", recording.name), "level:metric:operation"


@pytest.mark.parametrize("variant", VARIANTS)
def test_annotations_use_only_labels_that_the_expression_returns(variant: str) -> None:
    rules = rules_of(variant)
    recorded = recorded_labels(rules)
    for rule in rules:
        if "alert" not in rule:
            continue
        returned = result_labels(rule["expr"], recorded)
        for name, text in rule["annotations"].items():
            used = set(re.findall(r"\$labels\.(\w+)", text))
            assert used <= returned, f"{rule['alert']} {name}: {used - returned} not in {sorted(returned)}"


def test_descriptions_say_value_and_documented_threshold(groups: tuple[RuleGroup, ...]) -> None:
    documented = [entry for entry in builtin().entries() if entry.documented]
    judged = 0
    for alert in (alert for group in groups for alert in group.alerts):
        for level in alert.levels:
            numbers = {float(number) for number in re.findall(r"[<>]=? ([\d.]+)", level.expr)} - {0, 1}
            for entry in (one for one in documented if one.value in numbers and alert.name in one.rule):
                assert any(text in level.description for text in (words(entry), entry.text)), alert.name
                assert "$value" in level.description, alert.name
                judged += 1
    assert judged >= 5


def test_what_an_alert_needs_without_links_is_in_its_text(rules: list[dict[str, Any]]) -> None:
    """A command to type first; pools and pages have theirs in their own tests."""
    ours = ("load", "memory", "hardware", "self")
    alerts = [rule for rule in rules if rule.get("labels", {}).get("kvpressure_family") in ours]
    without = {rule["alert"] for rule in alerts if "Run" not in rule["annotations"]["description"]}
    assert without <= {"InferenceHostBound", "InferenceHostMemoryNearLimit", "KvpressureWatchdog"}


def test_no_command_names_an_empty_namespace(groups: tuple[RuleGroup, ...]) -> None:
    """A server of a bare host has none; only containers of pods always have one."""
    for alert in (alert for group in groups for alert in group.alerts if alert.subject != "container"):
        for text in (level.description for level in alert.levels):
            assert "-n {{ $labels.namespace }}" not in text, alert.name


def test_links_lead_to_a_dashboard_and_its_variables(files: dict[str, str]) -> None:
    site = BundleValues(dashboard_base_url="https://grafana.internal")
    rules = [rule for group in rule_file(GROUPS["kvpressure"], site)["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    for rule in alerts:
        link = re.fullmatch(r"https://grafana\.internal/d/([\w-]+)\?(.*)", rule["annotations"]["dashboard_url"])
        assert link is not None, rule["alert"]
        dashboard = json.loads(files[f"dashboards/{link[1]}.json"])
        assert dashboard["uid"] == link[1]
        assert set(re.findall(r"var-(\w+)=", link[2])) <= {
            variable["name"] for variable in dashboard["templating"]["list"]
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_identity_labels_survive(variant: str) -> None:
    recorded = recorded_labels(rules_of(variant))
    for group in GROUPS[variant]:
        for alert in group.alerts:
            for level in alert.levels:
                returned = result_labels(level.full_expr(), recorded)
                assert set(SUBJECTS[alert.subject]) <= returned, f"{alert.name} {level.severity}"
                assert "job" not in returned, "would change with the scrape configuration"


def test_nothing_that_old_or_other_evaluators_lack(files: dict[str, str], rules: list[dict[str, Any]]) -> None:
    for word in ("query_offset", "fuzzy_compare", "limitk", "info("):
        assert word not in files["alerts/kvpressure-rules.yaml"]
    for rule in rules:
        for node in walk(pp.parse(rule["expr"])):
            flaps = str(getattr(node, "op", "")) in ("topk", "bottomk")  # but among equal values the first stays
            assert not flaps or all(
                name.endswith(("_gpu_info", "_pool_info", "kvpressure_finding", "kvpressure_harm"))
                for name in metrics(str(node.expr))
            ), "topk in an alert flaps"


def _once_a_subject(node: pp.Expr) -> bool:
    """Whether copies of its series (federation, a second exporter) are one in its result."""
    if isinstance(node, pp.BinaryExpr):
        sides = [node.lhs] if str(node.op) in ("and", "unless") else [node.lhs, node.rhs]
        return all(map(_once_a_subject, sides))
    inner = getattr(node, "expr", None)
    return isinstance(node, (pp.AggregateExpr, pp.NumberLiteral)) or (inner is not None and _once_a_subject(inner))


def test_a_copy_of_a_series_on_the_one_side_of_a_match_fails_no_rule(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        for node in walk(pp.parse(rule["expr"])):
            match = getattr(node, "modifier", None)
            if match is not None and "ManyToOne" in str(getattr(match, "card", "")):
                assert _once_a_subject(node.rhs), (rule, str(node.rhs))


def test_one_missed_evaluation_leaves_no_hole() -> None:
    recording = [group for group in load_groups(Options(builtin())) if group.recordings]
    assert recording
    assert all(2 * group.interval < LOOK_BACK_SECONDS for group in recording)


def test_the_series_that_the_rules_read_are_less_than_half(rules: list[dict[str, Any]]) -> None:
    read = set().union(*(metrics(rule["expr"]) for rule in rules)) & {metric.full_name for metric in METRICS}
    kept = set(metrics_read({"groups": [{"rules": rules}]}))
    assert read <= kept <= {metric.full_name for metric in METRICS}
    assert len(kept) < len(METRICS) / 2


def test_other_forms_carry_the_same_groups(files: dict[str, str]) -> None:
    plain = yaml.safe_load(files["alerts/kvpressure-rules.yaml"])
    crd = yaml.safe_load(files["alerts/prometheusrule.yaml"])
    assert crd["spec"] == plain
    assert (crd["apiVersion"], crd["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
