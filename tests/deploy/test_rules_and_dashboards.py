"""Rules and dashboards of the chart are those of the bundle, and Helm values change them as the bundle's values
file does.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvpressure.bundle import values as bundle_values
from kvpressure.bundle.dashboards import render_dashboards
from kvpressure.bundle.dashboards.builder import DashboardContext
from kvpressure.bundle.rules import PROFILES, Options, load_groups, rule_file
from kvpressure.publish.links import Links
from kvpressure.settings import thresholds
from tests.deploy.chart import DEPLOY, Json, generator, of_kind, only, render
from tests.deploy.test_daemonset import load

pytestmark = pytest.mark.slow

SHOWN: Final[Json] = {
    "prometheusRule": {"enabled": True},
    "rulesConfigMap": {"enabled": True},
    "dashboards": {"enabled": True},
}
PATCHES: Final[Json] = {
    "exclude": ["hardware", "InferenceBatchCollapse"],
    "durations": {"InferenceKVCachePressure": {"warning": "11m"}, "GpuMemoryHigh": {"critical": "0s"}},
    "labels": {"team": "inference", "page": "false"},
    "alert_labels": {"GpuMemoryHigh": {"severity": "info", "page": "true"}},
    "runbook_base_url": "https://runbooks.internal/kv/",
    "dashboard_base_url": "https://dashboards.internal",
    "exporter_job": "monitoring/gpu-exporter",
}
LINKS: Final[Json] = {key: PATCHES[key] for key in ("runbook_base_url", "dashboard_base_url")}
"""The chart refuses the placeholders of the bundle, and leaves links out where no address is given."""
OTHER_LINKS: Final[Json] = {"runbook_base_url": "https://r.internal", "dashboard_base_url": "https://g.internal"}


def camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


LINKED: Final[Json] = {camel(key): value for key, value in LINKS.items()}


def site(values: Json, profile: str = "default") -> Options:
    """What ``kvpressure bundle`` renders for a values file with ``values`` in it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        chosen = bundle_values.load(file.name)
    return Options(thresholds.builtin().override(chosen.thresholds, "values"), chosen, profile)


def bundle_rules(options: Options) -> Json:
    return rule_file(load_groups(options), options.values)


def bundle_dashboards(options: Options) -> Json:
    alerts = frozenset(alert.name for group in load_groups(options) for alert in group.alerts)
    return {
        f"{uid}.json": dashboard
        for uid, dashboard in render_dashboards(DashboardContext(options.thresholds, options.values, alerts)).items()
    }


def rules_of(documents: list[Json]) -> Any:
    return only(documents, "PrometheusRule")["spec"]


def dashboards_of(documents: list[Json]) -> Json:
    return {
        name: json.loads(text)
        for item in of_kind(documents, "ConfigMap")
        for name, text in item["data"].items()
        if name.endswith(".json")
    }


def drawn(seed: int) -> dict[str, float]:
    """A value of its own for every threshold, over the forms that its unit can take when it is written.

    What has to be the lower of two is, also where the other one is a constant.
    """
    rng = random.Random(seed)
    of_unit = {
        "ratio": lambda: rng.choice([round(rng.random(), 4), 0.5, 1]),
        "score": lambda: round(rng.random(), 2),
        "multiple": lambda: rng.choice([round(rng.random() + 0.0001, 4), 1, 1.5, 4]),
        "seconds": lambda: rng.choice([1, 45, 60, 90, 300, 3600, 5400, 7200.0, 86400, 172800, 31536000]),
        "bytes": lambda: rng.choice([1, 2.5e9, 123456789, 8e10]),
        "per_second": lambda: rng.choice([0.05, 1, 12.5]),
    }
    found = {
        entry.name: min(of_unit.get(entry.unit, lambda: rng.choice([1, 2, 17, 5000, 2500000]))(), entry.allowed.most)
        for entry in thresholds.builtin().settable()
    }
    every = dict(thresholds.builtin()) | found
    for _ in found:  # until chains of several are in order
        for entry in thresholds.builtin().entries():
            if entry.not_above is not None and every[entry.name] > every[entry.not_above]:
                lower, upper = every[entry.name], every[entry.not_above]
                every |= {entry.name: upper} if entry.name in found else {entry.not_above: lower}
    return {name: every[name] for name in found}


@pytest.mark.parametrize("profile", PROFILES)
def test_with_links_alone_they_are_the_bundle(profile: str) -> None:
    documents, options = render(SHOWN | {"rules": {"profile": profile, **LINKED}}), site(LINKS, profile)
    assert rules_of(documents) == bundle_rules(options)
    assert dashboards_of(documents) == bundle_dashboards(options)


def without_links(item: Any, beginnings: tuple[str, ...]) -> Any:
    """``item`` without annotations and link objects whose address begins so."""
    if isinstance(item, list):
        kept = [without_links(part, beginnings) for part in item if not _links(part, beginnings)]
        found: Any = kept
        return found
    if isinstance(item, dict):
        return {
            key: without_links(value, beginnings)
            for key, value in item.items()
            if not (key.endswith("_url") and _starts(value, beginnings))
        }
    return item


def _starts(value: Any, beginnings: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value.startswith(beginnings)


def _links(item: Any, beginnings: tuple[str, ...]) -> bool:
    return isinstance(item, dict) and _starts(item.get("url"), beginnings)


@pytest.mark.parametrize("left_out", [("runbook_base_url",), ("dashboard_base_url",), tuple(LINKS)])
def test_without_an_address_its_links_are_left_out(left_out: tuple[str, ...]) -> None:
    """A dead link in a page at night is worse than none."""
    given = {camel(key): "" if key in left_out else value for key, value in LINKS.items()}
    documents, options = render(SHOWN | {"rules": given}), site(LINKS)
    beginnings = tuple(LINKS[key].rstrip("/") for key in left_out)
    assert rules_of(documents) == without_links(bundle_rules(options), beginnings) != bundle_rules(options)
    assert dashboards_of(documents) == without_links(bundle_dashboards(options), beginnings)
    assert not any(beginning in json.dumps(documents) for beginning in beginnings)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(3))
def test_thresholds_are_written_as_the_bundle_writes_them(seed: int, profile: str) -> None:
    wanted = drawn(seed)
    documents = render(SHOWN | {"thresholds": wanted, "rules": {"profile": profile, **LINKED}})
    options = site({"thresholds": wanted, **LINKS}, profile)
    assert rules_of(documents) == bundle_rules(options) != bundle_rules(site(LINKS, profile))
    assert dashboards_of(documents) == bundle_dashboards(options) != bundle_dashboards(site(LINKS, profile))


@pytest.mark.parametrize("keys", [*([key] for key in PATCHES), list(PATCHES)], ids=lambda keys: "+".join(keys))
def test_patches_do_what_the_values_file_does(keys: list[str]) -> None:
    values = {**OTHER_LINKS, **{key: PATCHES[key] for key in keys}}
    documents = render(
        {"prometheusRule": {"enabled": True}, "rules": {camel(key): value for key, value in values.items()}}
    )
    assert rules_of(documents) == bundle_rules(site(values)) != bundle_rules(site(OTHER_LINKS))


def test_the_values_of_the_chart_are_the_keys_of_the_values_file() -> None:
    values = yaml.safe_load((DEPLOY / "helm/kvpressure/values.yaml").read_text())["rules"]
    assert set(values) - {"profile"} == {camel(key) for key in PATCHES}
    defaults = bundle_values.BundleValues()
    assert [values[camel(key)] for key in LINKS] == ["", ""]
    for key in PATCHES.keys() - LINKS.keys():
        assert values[camel(key)] == (getattr(defaults, key) or type(PATCHES[key])()), key


def test_the_config_map_has_the_same_rules_and_promtool_takes_them(tmp_path: Path) -> None:
    documents = render(SHOWN | {"thresholds": drawn(7), "rules": {camel(key): value for key, value in PATCHES.items()}})
    text = next(
        item["data"]["kvpressure-rules.yaml"]
        for item in of_kind(documents, "ConfigMap")
        if "kvpressure-rules.yaml" in item["data"]
    )
    assert yaml.safe_load(text) == rules_of(documents)
    (tmp_path / "rules.yaml").write_text(text)
    checked = subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_token_is_left_and_no_number_hides_from_the_values() -> None:
    """Each threshold that the bundle reads is a token in the chart: with other values nothing of the
    built-in ones is left.
    """
    documents = render(SHOWN)
    assert "@@" not in json.dumps(documents)
    files = dict(generator().bundle_files())
    marked = {name for text in files.values() for name in re.findall(r"@@[tdwn]:(\w+)@@", text)}
    assert (
        {"memory_warning_ratio", "alert_for_seconds", "fragmentation_warning_bytes"}
        <= marked
        <= set(thresholds.builtin())
    )


@pytest.mark.parametrize("values", [{}, {"rules": {"exporterJob": "gpu/exporters"}}], ids=["default", "own job"])
def test_dashboards_find_the_exporters_where_the_rules_do(values: Json) -> None:
    documents = render(SHOWN | values)
    pattern = re.compile(r'job(=~?)\\*"([^"\\]+)')
    of_rules, of_dashboards = (
        set(pattern.findall(json.dumps(found))) for found in (rules_of(documents), dashboards_of(documents))
    )
    assert of_dashboards == of_rules
    ((operator, wanted),) = of_rules
    job = values.get("rules", {}).get("exporterJob", "kvpressure")
    assert operator == "=~"
    assert all(re.fullmatch(wanted, name) for name in (job, f"monitoring/{job}", f"{job}-exporters"))


@pytest.mark.parametrize(
    ("runbooks", "grafana"),
    [
        ("https://runbooks.internal/kv/", "https://dashboards.internal"),
        ("http://[fd00::1]:3000/a?b=c", "http://g.internal:3000/grafana/"),
    ],
)
def test_the_page_links_where_alerts_and_dashboards_do(runbooks: str, grafana: str, tmp_path: Path) -> None:
    rules = {"runbookBaseUrl": runbooks, "dashboardBaseUrl": grafana}
    documents = render({"rules": rules, "prometheusRule": {"enabled": True}})
    alert = next(rule for group in rules_of(documents)["groups"] for rule in group["rules"] if "alert" in rule)
    chosen = load(documents, "nvidia", tmp_path)
    assert (chosen.runbook_url, chosen.dashboard_url) != (None, None)
    links = Links(chosen.runbook_url or "", chosen.dashboard_url or "")
    assert links.runbook(alert["alert"]).url == alert["annotations"]["runbook_url"]
    assert alert["annotations"]["dashboard_url"].startswith(links.dashboard("kvpressure-incident").url)


def test_without_addresses_the_page_has_no_links(tmp_path: Path) -> None:
    chosen = load(render(), "nvidia", tmp_path)
    assert (chosen.runbook_url, chosen.dashboard_url) == (None, None)


def test_an_own_setting_of_the_page_wins(tmp_path: Path) -> None:
    chosen = load(render({"config": {"web.runbook-url": "https://wiki.internal/kv"}}), "nvidia", tmp_path)
    assert chosen.runbook_url == "https://wiki.internal/kv"
