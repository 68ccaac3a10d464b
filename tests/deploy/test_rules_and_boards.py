"""Rules and boards of the chart are those of the bundle, and Helm values change them as the bundle's values file does."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.chart import DEPLOY, Json, generator, of_kind, only, render
from kvpressure import thresholds
from kvpressure.bundle import values as bundle_values
from kvpressure.bundle.render import RULES
from kvpressure.bundle.render import render as render_bundle
from kvpressure.bundle.rules import PROFILES, Options

SHOWN: Final[Json] = {"prometheusRule": {"enabled": True}, "rulesConfigMap": {"enabled": True}, "dashboards": {"enabled": True}}
PATCHES: Final[Json] = {
    "exclude": ["hardware", "VllmBatchCollapse"],
    "durations": {"VllmKVCachePressure": {"warning": "11m"}, "GpuMemoryHigh": {"critical": "0s"}},
    "labels": {"team": "inference", "page": "false"},
    "alert_labels": {"GpuMemoryHigh": {"severity": "info", "page": "true"}},
    "runbook_base_url": "https://runbooks.internal/kv/",
    "dashboard_base_url": "https://boards.internal",
    "exporter_job": "monitoring/gpu-exporter",
}


def camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def bundle(site: Json | None = None, profile: str = "default", folder: Path | None = None) -> dict[str, str]:
    """The bundle's files for a values file with ``site`` in it."""
    if not site:
        return render_bundle(Options(thresholds.builtin(), profile=profile))
    assert folder is not None
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(site))
    chosen = bundle_values.load(file)
    return render_bundle(Options(thresholds.builtin().override(chosen.thresholds, "values"), chosen, profile))


def rules_of(documents: list[Json]) -> Any:
    return only(documents, "PrometheusRule")["spec"]


def boards_of(documents: list[Json]) -> Json:
    return {name: json.loads(text) for item in of_kind(documents, "ConfigMap") for name, text in item["data"].items()
            if name.endswith(".json")}


def boards_in(files: dict[str, str]) -> Json:
    return {Path(path).name: json.loads(text) for path, text in files.items() if path.endswith(".json")}


def drawn(seed: int) -> dict[str, float]:
    """A value of its own for every threshold, over the forms that its unit can take when it is written.

    What is a share of something stays one.
    """
    rng = random.Random(seed)
    of_unit = {"share": lambda: rng.choice([round(rng.random(), 4), 0.5, 1]), "score": lambda: round(rng.random(), 2),
               "ratio": lambda: rng.choice([round(rng.random(), 4), 1, 1.5, 4]),
               "seconds": lambda: rng.choice([1, 45, 60, 90, 300, 3600, 5400, 7200.0, 86400, 172800, 31536000]),
               "bytes": lambda: rng.choice([1, 2.5e9, 123456789, 8e10]), "per_second": lambda: rng.choice([0.05, 1, 12.5])}
    return {entry.name: of_unit.get("share" if entry.unit == "ratio" and entry.value <= 1 else entry.unit,
                                    lambda: rng.choice([1, 2, 17, 5000, 2500000]))()
            for entry in thresholds.builtin().entries()}


@pytest.mark.parametrize("profile", PROFILES)
def test_without_values_they_are_the_bundle(profile: str) -> None:
    documents, files = render(SHOWN | {"rules": {"profile": profile}}), bundle(profile=profile)
    assert rules_of(documents) == yaml.safe_load(files["alerts/prometheusrule.yaml"])["spec"]
    if profile == "default":
        assert boards_of(documents) == boards_in(files)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_written_as_the_bundle_writes_them(seed: int, profile: str, tmp_path: Path) -> None:
    wanted = drawn(seed)
    documents = render(SHOWN | {"thresholds": wanted, "rules": {"profile": profile}})
    files = bundle({"thresholds": wanted}, profile, tmp_path)
    assert rules_of(documents) == yaml.safe_load(files[RULES])
    assert boards_of(documents) == boards_in(files)


@pytest.mark.parametrize("keys", [*([key] for key in PATCHES), list(PATCHES)], ids=lambda keys: "+".join(keys))
def test_patches_do_what_the_values_file_does(keys: list[str], tmp_path: Path) -> None:
    site = {key: PATCHES[key] for key in keys}
    documents = render(SHOWN | {"rules": {camel(key): value for key, value in site.items()}})
    wanted = bundle(site, folder=tmp_path)
    assert rules_of(documents) == yaml.safe_load(wanted[RULES]) != yaml.safe_load(bundle()[RULES])


def test_the_values_of_the_chart_are_the_keys_of_the_values_file() -> None:
    values = yaml.safe_load((DEPLOY / "helm/kvpressure/values.yaml").read_text())["rules"]
    assert set(values) - {"profile"} == {camel(key) for key in PATCHES}
    defaults = bundle_values.Values()
    for key in PATCHES:
        assert values[camel(key)] == (getattr(defaults, key) or type(PATCHES[key])()), key


def test_the_config_map_has_the_same_rules_and_promtool_takes_them(tmp_path: Path) -> None:
    documents = render(SHOWN | {"thresholds": drawn(7), "rules": {camel(key): value for key, value in PATCHES.items()}})
    text = next(item["data"]["kvpressure-rules.yaml"] for item in of_kind(documents, "ConfigMap")
                if "kvpressure-rules.yaml" in item["data"])
    assert yaml.safe_load(text) == rules_of(documents)
    (tmp_path / "rules.yaml").write_text(text)
    checked = subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_token_is_left_and_no_number_hides_from_the_values() -> None:
    """Each threshold that the bundle reads is a token in the chart: with other values nothing of the built-in ones is left."""
    documents = render(SHOWN)
    assert "@@" not in json.dumps(documents)
    files = dict(generator().bundle_files())
    marked = {name for text in files.values() for name in re.findall(r"@@[tdwn]:(\w+)@@", text)}
    assert {"memory_warning_ratio", "alert_for_seconds", "fragmentation_warning_bytes"} <= marked <= set(thresholds.builtin())
