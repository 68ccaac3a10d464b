"""The bundle for scrapers that own namespace and pod (that its alerts fire alike: test_rule_cases.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kvpressure.bundle import engine_labels
from kvpressure.bundle.render import RULES, render
from kvpressure.bundle.rules import Options
from kvpressure.bundle.values import BundleValues
from kvpressure.publish.metrics import PREFIXED
from kvpressure.settings.thresholds import builtin
from tests.helpers.prometheus import accepted


@pytest.fixture(scope="module")
def prefixed() -> dict[str, str]:
    return render(Options(builtin(), BundleValues(engine_labels="prefixed", dashboard_base_url="https://g.internal")))


THEIRS = 'kube_pod_info{node="a"}'
NAMED = f'label_replace({THEIRS}, "engine_namespace", "$1", "namespace", "(.+)")'


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ('max by (namespace) (m{pod=~"a|pod"})', 'max by (engine_namespace) (m{engine_pod=~"a|pod"})'),
        ('label_replace(m, "x", "$1", "pod", "(.+)")', 'label_replace(m, "x", "$1", "engine_pod", "(.+)")'),
        ("kube_node_info and pod:x:rate", "kube_node_info and pod:x:rate"),
        ("kvpressure_build_info offset 5m", "kvpressure_build_info offset 5m"),
        ("exporter:kvpressure_build_info:time", "exporter:kvpressure_build_info:time"),
        (f"{THEIRS} == 1", f'label_replace({NAMED}, "engine_pod", "$1", "pod", "(.+)") == 1'),
    ],
)
def test_an_expression_gets_the_engines_names(plain: str, expected: str) -> None:
    assert engine_labels.expression(plain) == expected


def test_a_text_prints_and_asks_for_the_engines_names() -> None:
    plain = '{{ printf "m{pod=%q}" $labels.pod | query | first | label "pod" }} pod {{ $labels.namespace }}'
    named = '{{ printf "m{engine_pod=%q}" $labels.engine_pod | query | first | label "engine_pod" }} pod'
    assert engine_labels.template(plain) == named + " {{ $labels.engine_namespace }}"


@pytest.mark.live
def test_everything_generated_asks_for_the_engines_names(prefixed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(prefixed[RULES])
    (tmp_path / "alertmanager.yaml").write_text(prefixed["alerts/alertmanager.yaml"])
    accepted("promtool", "check", "rules", tmp_path / "rules.yaml")
    accepted("amtool", "check-config", tmp_path / "alertmanager.yaml")
    rules = yaml.safe_load(prefixed[RULES])
    texts = [
        text for group in rules["groups"] for rule in group["rules"] for text in rule.get("annotations", {}).values()
    ]
    assert not [text for text in texts if re.search(r"\$labels\.(namespace|pod)\b|\b(namespace|pod)=%q", text)]
    routes = yaml.safe_load(prefixed["alerts/alertmanager.yaml"])
    equal = {label for rule in routes["inhibit_rules"] for label in rule["equal"]} | set(routes["route"]["group_by"])
    assert not equal & set(PREFIXED)


def test_dashboards_ask_for_the_engines_names(prefixed: dict[str, str]) -> None:
    for path in (path for path in prefixed if path.startswith("dashboards/") and path.endswith(".json")):
        assert not re.search(r"\{\{ ?(namespace|pod) ?\}\}|labels\.(namespace|pod)\b", prefixed[path]), path
        for query in re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', prefixed[path]):
            bare = re.sub(r'"[^"]*"', "", json.loads(f'"{query}"'))
            assert not re.search(r"(?<![\w:])(namespace|pod)(?![\w:])", bare), f"{path}: {query}"
