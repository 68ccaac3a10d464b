"""The chart ships the rules and dashboards of the bundle as they are, and takes a site's own in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvpressure.bundle import values as bundle_values
from kvpressure.bundle.render import RULES
from kvpressure.bundle.render import render as render_bundle
from kvpressure.bundle.rules import Options
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


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bundle of a site with a number, addresses and exclusions of its own."""
    file = tmp_path_factory.mktemp("site") / "site.yaml"
    file.write_text(
        "runbook_base_url: https://runbooks.internal/kv\nexclude: [hardware]\nthresholds: {memory_critical_ratio: 0.95}"
    )
    chosen = bundle_values.load(file)
    return render_bundle(Options(thresholds.builtin().override(chosen.thresholds, "site"), chosen))


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


def test_a_bundle_of_ones_own_takes_its_place(shipped: dict[str, str], own: dict[str, str]) -> None:
    """As ``--set-file`` gives it; a number that the exporter takes too stands in both."""
    incident = own["dashboards/kvpressure-incident.json"]
    documents = render(
        {
            **SHOWN,
            "thresholds": {"memory_critical_ratio": 0.95},
            "rules": {"file": own[RULES]},
            "dashboards": {"enabled": True, "files": {"kvpressure-incident": incident}},
        }
    )
    rules = yaml.safe_load(own[RULES])
    assert only(documents, "PrometheusRule")["spec"] == rules != yaml.safe_load(shipped[RULES])
    assert installed(documents) == {
        "kvpressure-rules.yaml": rules,
        **dashboards(shipped),
        "kvpressure-incident.json": json.loads(incident),
    }
    assert problems(documents) == []


def test_links_of_the_page_are_settings(tmp_path: Path) -> None:
    chosen = load(render({"config": {"web.runbook-url": "https://wiki.internal/kv"}}), "nvidia", tmp_path)
    assert (chosen.runbook_url, chosen.dashboard_url) == ("https://wiki.internal/kv", None)
