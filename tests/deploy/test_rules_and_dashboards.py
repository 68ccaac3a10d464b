"""The chart ships the rules and dashboards of the bundle as they are, and takes a site's own in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvpressure.bundle.render import RULES
from kvpressure.bundle.render import render as render_bundle
from kvpressure.bundle.rules import Options
from kvpressure.bundle.values import BundleValues
from kvpressure.settings import thresholds
from tests.deploy.chart import Json, of_kind, only, problems, render
from tests.deploy.test_daemonset import load

pytestmark = pytest.mark.slow

SHOWN: Final[Json] = {
    "prometheusRule": {"enabled": True},
    "rulesConfigMap": {"enabled": True},
    "dashboards": {"enabled": True},
}


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    return render_bundle(Options(thresholds.builtin()))


def dashboards(files: dict[str, str]) -> dict[str, Any]:
    found = {Path(path): text for path, text in files.items() if path.startswith("dashboards/kvpressure-")}
    return {path.name: json.loads(text) for path, text in found.items()}


def installed(documents: list[Json]) -> dict[str, Any]:
    """File name -> what the ConfigMaps hold, but the exporter's settings."""
    return {
        name: yaml.safe_load(text) if name.endswith("-rules.yaml") else json.loads(text)
        for item in of_kind(documents, "ConfigMap")
        for name, text in item["data"].items()
        if name.startswith("kvpressure-")
    }


def test_what_it_ships_is_the_bundle(shipped: dict[str, str]) -> None:
    documents, rules = render(SHOWN), yaml.safe_load(shipped[RULES])
    assert only(documents, "PrometheusRule")["spec"] == rules
    assert installed(documents) == {"kvpressure-rules.yaml": rules, **dashboards(shipped)}


def test_a_bundle_of_ones_own_takes_its_place(shipped: dict[str, str]) -> None:
    """As ``--set-file`` gives it; a number that the exporter takes too stands in both."""
    rules = {"groups": [{"name": "mine", "rules": [{"record": "one", "expr": "vector(1)"}]}]}
    documents = render(
        {
            **SHOWN,
            "thresholds": {"memory_critical_ratio": 0.95},
            "rules": {"file": yaml.safe_dump(rules)},
            "dashboards": {"enabled": True, "files": {"kvpressure-incident": '{"title": "mine"}'}},
        }
    )
    own = {"kvpressure-rules.yaml": rules, "kvpressure-incident.json": {"title": "mine"}}
    assert only(documents, "PrometheusRule")["spec"] == rules
    assert installed(documents) == {**dashboards(shipped), **own}
    assert problems(documents) == []


def test_alerts_link_where_the_chart_is_told_addresses() -> None:
    addresses = {"runbookBaseUrl": "https://docs.internal/runbooks", "dashboardBaseUrl": "https://grafana.internal/"}
    site = BundleValues(
        runbook_base_url="https://docs.internal/runbooks", dashboard_base_url="https://grafana.internal"
    )
    wanted = yaml.safe_load(render_bundle(Options(thresholds.builtin(), site))[RULES])
    assert only(render({**SHOWN, "rules": addresses}), "PrometheusRule")["spec"] == wanted


def test_routes_and_inhibitions_with_ones_own_receivers(shipped: dict[str, str]) -> None:
    bundle = yaml.safe_load(shipped["alerts/alertmanagerconfig.yaml"])["spec"]
    pager = {"name": "pager", "pagerdutyConfigs": [{"routingKey": {"name": "pagerduty", "key": "key"}}]}
    documents = render({"alertmanagerConfig": {"enabled": True, "receivers": [pager]}})
    spec = only(documents, "AlertmanagerConfig")["spec"]
    assert (spec["route"], spec["inhibitRules"]) == (bundle["route"], bundle["inhibitRules"])
    assert spec["receivers"] == [pager, {"name": "tickets"}, {"name": "heartbeat"}, {"name": "dashboards"}]
    assert problems(documents) == []


def test_links_of_the_page_are_settings(tmp_path: Path) -> None:
    chosen = load(render({"config": {"web.runbook-url": "https://wiki.internal/kv"}}), "nvidia", tmp_path)
    assert (chosen.runbook_url, chosen.dashboard_url) == ("https://wiki.internal/kv", None)
