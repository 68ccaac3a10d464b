"""What a site changes reaches rules, tests, routes, dashboards and pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.bundle import values
from kvpressure.bundle.render import render
from kvpressure.bundle.rules import Options
from kvpressure.settings.thresholds import builtin
from tests.helpers.prometheus import accepted

pytestmark = pytest.mark.slow


def documented_example() -> str:
    page = (Path(__file__).parents[2] / "docs/your-site.md").read_text(encoding="utf-8")
    match = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[values.BundleValues, dict[str, str]]:
    """The example of the documentation, loaded and rendered."""
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(documented_example())
    loaded = values.load(file)
    return loaded, render(Options(builtin().override({"wait_page_seconds": 20}, "values"), loaded))


def rules(files: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    document = yaml.safe_load(files["alerts/kvpressure-rules.yaml"])
    return {
        (rule["alert"], rule["labels"]["severity"]): rule
        for group in document["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def test_example_says_every_key() -> None:
    assert set(yaml.safe_load(documented_example())) == set(values.BundleValues.__dataclass_fields__)


def test_thresholds_reach_pages(files: dict[str, str], site: tuple[values.BundleValues, dict[str, str]]) -> None:
    changed = site[1]
    assert "requests wait 20 seconds" in changed["docs/runbooks/InferenceSlow.md"]
    assert "requests wait 30 seconds" in files["docs/runbooks/InferenceSlow.md"]
    assert "| `wait_page_seconds` | 20 seconds |" in changed["docs/reference/thresholds.md"]


def test_durations_exclusions_labels_and_urls(
    files: dict[str, str], site: tuple[values.BundleValues, dict[str, str]]
) -> None:
    changed, before = rules(site[1]), rules(files)
    assert changed["InferenceSlow", "critical"]["for"] == "8m"  # its expression waits for two minutes itself
    assert changed["InferenceSlow", "warning"]["for"] == before["InferenceSlow", "warning"]["for"]
    gone = {name for name, _ in before} - {name for name, _ in changed}
    family = {name for (name, _), rule in before.items() if rule["labels"]["kvpressure_family"] == "load"}
    assert gone == family | {"InferenceObjectiveBurn"}
    assert not any(f"docs/runbooks/{name}.md" in site[1] for name in gone)
    for path, text in site[1].items():
        assert not any(f"{name}.md" in text for name in gone), f"{path} links an alert that is excluded"
    teams = {name: rule["labels"]["team"] for (name, _), rule in changed.items()}
    assert teams == {name: "platform" if name == "InferenceStalled" else "inference" for name, _ in changed}
    for rule in changed.values():
        assert rule["annotations"]["runbook_url"].startswith("https://docs.example.com/kvpressure/runbooks/")
        assert rule["annotations"]["dashboard_url"].startswith("https://grafana.example.com/d/kvpressure-incident")
    assert 'job=~".*monitoring/kvpressure.*"' in changed["KvpressureExportersDown", "warning"]["expr"]
    assert "https://docs.example.com/kvpressure/runbooks/" in site[1]["dashboards/kvpressure-incident.json"]


@pytest.mark.live
def test_promtool_takes_the_rules_of_a_changed_bundle(
    site: tuple[values.BundleValues, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(site[1]["alerts/kvpressure-rules.yaml"])
    accepted("promtool", "check", "rules", tmp_path / "rules.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "values.yaml").write_text("# nothing\n")
    assert render(Options(builtin(), values.load(tmp_path / "values.yaml"))) == files
