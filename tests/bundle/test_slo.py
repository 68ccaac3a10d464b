"""Objectives as input of Sloth and Pyrra: against the CRDs of both, and the numbers of the thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser as pp
import pytest
import yaml

from kvpressure.bundle.render import render
from kvpressure.bundle.rules import Options
from kvpressure.bundle.slo import OBJECTIVES
from kvpressure.settings.thresholds import Thresholds, builtin
from tests.bundle.promql import metrics, selectors

pytestmark = pytest.mark.slow

SCHEMAS = Path(__file__).parents[1] / "fixtures" / "schemas"
TARGETS = {"ttft": 0.95, "inter_token": 0.9, "e2e": 0.99, "availability": 0.999}


def options(*names: str) -> Options:
    entries = {entry.name: entry for entry in builtin().entries()}
    changed = {f"objective_{name}_ratio": TARGETS[name] for name in names}
    return Options(
        Thresholds({name: replace(entry, value=changed.get(name, entry.value)) for name, entry in entries.items()})
    )


def files(*names: str) -> dict[str, Any]:
    return {
        path.removeprefix("alerts/slo/"): yaml.safe_load(text)
        for path, text in render(options(*names)).items()
        if path.startswith("alerts/slo/")
    }


@pytest.fixture(scope="module")
def every() -> dict[str, Any]:
    return files(*TARGETS)


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server prunes them without a word."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **{key: strict(value) for key, value in schema.items()}}


def validator(name: str) -> jsonschema.Draft202012Validator:
    crd = yaml.safe_load((SCHEMAS / f"{name}-crd.yaml").read_text(encoding="utf-8"))
    (version,) = crd["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    return jsonschema.Draft202012Validator(schema)


def test_nothing_is_written_while_no_objective_is_set() -> None:
    assert files() == {}


def test_the_crds_accept_them(every: dict[str, Any]) -> None:
    assert set(every) == {"sloth.yaml", *(f"pyrra-{name.replace('_', '-')}.yaml" for name in OBJECTIVES)}
    for name, document in every.items():
        assert list(validator(name.partition("-")[0].removesuffix(".yaml")).iter_errors(document)) == [], name


def test_targets_and_bounds_are_those_of_the_thresholds(every: dict[str, Any]) -> None:
    shown = {slo["name"]: slo for slo in every["sloth.yaml"]["spec"]["slos"]}
    for name, target in TARGETS.items():
        percent = {"ttft": "95", "inter_token": "90", "e2e": "99", "availability": "99.9"}[name]
        one = every[f"pyrra-{name.replace('_', '-')}.yaml"]
        assert one["spec"]["target"] == percent
        assert shown[name.replace("_", "-")]["objective"] == pytest.approx(100 * target)
        if name != "availability":
            assert f"within {builtin()[f'objective_{name}_seconds']:g} s" in one["spec"]["description"]
        assert one["spec"]["description"] == shown[name.replace("_", "-")]["description"]


def test_queries_read_the_counters_of_their_objective(every: dict[str, Any]) -> None:
    asked: list[tuple[str, str, str]] = []
    for slo in every["sloth.yaml"]["spec"]["slos"]:
        events = slo["sli"]["events"]
        asked.append((slo["name"], *(events[key].replace("{{.window}}", "5m") for key in ("errorQuery", "totalQuery"))))
    for name, document in every.items():
        if name.startswith("pyrra-"):
            ratio = document["spec"]["indicator"]["ratio"]
            pair = (ratio["errors"]["metric"], ratio["total"]["metric"])
            assert all(isinstance(pp.parse(text), pp.VectorSelector) for text in pair), "Pyrra takes nothing else"
            asked.append((name.removeprefix("pyrra-").removesuffix(".yaml"), *pair))
    assert len(asked) == 2 * len(TARGETS)
    for name, errors, total in asked:
        assert metrics(errors) == {"kvpressure_objective_missed_requests_total"}
        assert metrics(total) == {"kvpressure_objective_requests_total"}
        for text in (errors, total):
            (selector,) = selectors(text)
            assert [(m.name, m.value) for m in selector.matchers.matchers] == [("objective", name.replace("-", "_"))]
