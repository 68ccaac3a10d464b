"""What the bundle does in situations of operation that were labelled before its rules were written.

As they are at a scrape interval of a minute. ``make situations`` runs them at three intervals, and once more with every
series and every recording twice: a second exporter, another job, a federated copy. Each variant takes promtool minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import yaml

from kvpressure.bundle.render import RULES, render
from kvpressure.bundle.rules import Options
from kvpressure.bundle.values import Values
from kvpressure.settings.thresholds import builtin
from tests.helpers.situations import Fired, Situation, complaints, judge, load

SITUATIONS = load()
ALL = {"15s": (15.0, False), "60s": (60.0, False), "150s": (150.0, False), "twice": (30.0, True)}
VARIANTS = {name: ALL[name] for name in os.environ.get("SITUATION_VARIANTS", "60s").split(",")}
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Outcome:
    """What fired in each situation, and what promtool said."""

    fired: Mapping[tuple[str, str], set[Fired]]
    output: str


def with_copies(rules: str) -> str:
    """The rules with each recording evaluated once more, as a federated copy with a label of its own."""
    document = yaml.safe_load(rules)
    for group in document["groups"]:
        copies = [{**rule, "labels": {"prometheus": "leaf"}} for rule in group["rules"] if "record" in rule]
        group["rules"] += copies
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture(scope="module", params=list(VARIANTS))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    scrape, double = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    enabled = Options(builtin(), Values(include=("InferenceNoTraffic",)))
    rules = folder / "rules.yaml"
    text = render(enabled)[RULES]
    rules.write_text(with_copies(text) if double else text)
    fired, output = judge(rules, SITUATIONS, folder, scrape, double)
    return Outcome(fired, output)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_it_does_what_is_expected(outcome: Outcome, situation: Situation) -> None:
    wrong = complaints(situation, outcome.fired)
    if situation.excluded:
        assert wrong, "no longer wrong: take the exclusion out"
    else:
        assert wrong == [], situation.what


def test_no_rule_fails(outcome: Outcome) -> None:
    assert "rule:" not in outcome.output, outcome.output[:2000]
    assert "parse error" not in outcome.output, outcome.output[:2000]
