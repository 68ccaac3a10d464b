"""One number, three places: a threshold changed in one file moves the rule, the dashboard's steps and the
page's colour together.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure import cli
from kvpressure.model.signals import ContextSignals, MemorySignals, Signals
from kvpressure.model.state import EngineState, State
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.settings import settings
from kvpressure.settings.thresholds import Thresholds, builtin
from tests.publish.states import NOW, unknown_engine, with_findings

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """``signals`` lie between the built-in value of ``threshold`` and ``moved``; ``step`` of the page is
    judged by it: how, and in which words. ``rule``: how the alert's rule has it; "" = the rule reads a finding.
    """

    threshold: str
    moved: float
    signals: Signals
    step: int
    colours: tuple[str, str]
    words: tuple[str, str]
    alert: str
    rule: str
    panel: str


CASES = [
    Case(
        "memory_warning_ratio",
        0.7,
        Signals(time=NOW, memory=MemorySignals(device_demand_ratio=0.75)),
        3,
        ("unknown", "look"),
        ("Less than 80 %", "At least 70 %"),
        "GpuMemoryHigh",
        r"demand_ratio >= {}(?!\d)",
        "GPU memory: required, and used (dashed)",
    ),
    Case(
        "context_spike_ratio",
        4,
        Signals(
            time=NOW,
            context=ContextSignals(context_spike_ratio=3.0, context_max_5m=3000.0, prompt_quantiles={"0.95": 900.0}),
        ),
        5,
        ("look", "fine"),
        ("at least 2 × the mean", "below 4 × the mean"),
        "InferenceContextLengthSpike",
        r"spike_ratio > {}(?!\d)",
        "Context spike, and bursts (dashed)",
    ),
]


def bundle(directory: Path, file: Path | None) -> tuple[str, dict[str, Any]]:
    """The rules' text and every dashboard, as ``kvpressure bundle`` writes them."""
    assert cli.main(["bundle", "--out", str(directory), *(["--thresholds", str(file)] if file else [])]) == 0
    dashboards = {path.stem: json.loads(path.read_text()) for path in (directory / "dashboards").glob("*.json")}
    return (directory / "alerts/kvpressure-rules.yaml").read_text(), dashboards


def expressions(rules: str, alert: str) -> str:
    """The expressions of ``alert`` and of what is recorded for alerts."""
    return "\n".join(
        rule["expr"]
        for group in yaml.safe_load(rules)["groups"]
        for rule in group["rules"]
        if rule.get("alert") == alert or "record" in rule
    )


def steps(dashboards: Mapping[str, Any], title: str) -> set[float]:
    """Threshold steps of the panels called ``title``."""
    found = [panel for dashboard in dashboards.values() for panel in dashboard["panels"] if panel["title"] == title]
    assert found, title
    return {
        step["value"]
        for panel in found
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        if step["value"] is not None
    }


def serving(file: Path) -> Thresholds:
    """The thresholds that ``kvpressure serve --thresholds file`` judges by."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.from_args(parser.parse_args(["--thresholds", str(file)])).thresholds


def page(case: Case, thresholds: Thresholds) -> tuple[str, str]:
    """Colour and text of the triage step that is judged by the threshold."""
    engine: EngineState = with_findings(replace(unknown_engine(), signals=case.signals), thresholds)
    html = render_page(State(time=NOW, engines=(engine,)), "node-1", ViewContext(thresholds))
    triage = html[html.index("The eight triage steps") :]
    found = re.findall(r'<span class="mark (\w+)">(.*?)<small>By hand', triage, re.DOTALL)
    colour, text = found[case.step - 1]
    return colour, text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.threshold)
def test_rule_dashboard_and_page_move_together(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "thresholds.yaml"
    file.write_text(f"{case.threshold}: {case.moved}\n")
    before = builtin()[case.threshold]
    assert serving(file)[case.threshold] == case.moved != before

    (old_rules, old_dashboards), (new_rules, new_dashboards) = (
        bundle(tmp_path / "old", None),
        bundle(tmp_path / "new", file),
    )
    old, new = (case.rule.format(re.escape(f"{value:g}")) for value in (before, case.moved))
    for rules, there, gone in ((old_rules, old, new), (new_rules, new, old)) if case.rule else ():
        assert re.search(there, expressions(rules, case.alert))
        assert not re.search(gone, expressions(rules, case.alert))
    assert (before in steps(old_dashboards, case.panel), case.moved in steps(old_dashboards, case.panel)) == (
        True,
        False,
    )
    assert (before in steps(new_dashboards, case.panel), case.moved in steps(new_dashboards, case.panel)) == (
        False,
        True,
    )

    for thresholds, colour, words in zip((builtin(), serving(file)), case.colours, case.words, strict=True):
        seen, text = page(case, thresholds)
        assert (seen, words in text) == (colour, True), text
