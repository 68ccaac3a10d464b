"""Every scenario shows what it promises, judged by the real pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import yaml
from lab.alerts.engine import Episode, episodes, evaluate_each
from lab.alerts.series import Series
from lab.demo import alerting
from lab.demo.scenario import CHAT, CODE, MAIL, SCENARIOS, Scenario

from tests.demo.timeline import engine, played

pytestmark = pytest.mark.slow

WELL = {"healthy", "idle"}


def phases(scenario: Scenario, seconds: float = 180) -> dict[str, float]:
    return {phase.name: begin for begin, phase in scenario.schedule(seconds)}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_incident_is_named_and_the_mitigation_ends_it(scenario: Scenario) -> None:
    begins = phases(scenario)
    verdicts = [(tick, engine(state, scenario.pod).diagnosis) for tick, state in played(scenario.name)]
    calm = {d.verdict for tick, d in verdicts if tick < min(begins.get("burst", 1e9), begins["incident"])}
    assert calm <= WELL
    named = [
        tick for tick, d in verdicts if d.verdict == scenario.verdict and (d.confidence >= 0.7) == scenario.confident
    ]
    assert named, "never named"
    confidently = {d.verdict for tick, d in verdicts if tick > named[0] and d.confidence >= 0.7}
    assert confidently <= WELL | {scenario.verdict}
    assert begins["incident"] < named[0] < begins["incident"] + 35
    assert named[-1] < begins["mitigation"] + 30
    assert {d.verdict for tick, d in verdicts if tick > begins["mitigation"] + 40} <= WELL
    last_part = [d.verdict for tick, d in verdicts if named[0] <= tick < begins["mitigation"]]
    assert last_part.count(scenario.verdict) / len(last_part) > 0.9
    others = {CHAT, CODE, MAIL} - {scenario.pod}
    assert {engine(state, pod).diagnosis.verdict for _, state in played(scenario.name) for pod in others} <= WELL


@pytest.mark.parametrize("name", ["kv_pressure", "sequence_limit"])
def test_the_mitigation_sets_what_was_recommended(name: str) -> None:
    scenario = SCENARIOS[name]
    change = next(phase.changes[scenario.pod] for phase in scenario.phases if phase.name == "mitigation")
    before = next(state for tick, state in reversed(played(name)) if tick < phases(scenario)["mitigation"])
    limits = engine(before, scenario.pod).limits
    for limit, value in change.limits.items():
        recommended = limits[limit].recommended
        assert recommended is not None
        assert 0.75 * recommended <= value <= recommended, (limit, value, recommended)


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[Episode]]:
    """What Prometheus fires about each scenario's pod, with the demo's waiting times, at one evaluation a second."""
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text(yaml.safe_dump(alerting.rules(alerting.factor(180, 1), 1), sort_keys=False), encoding="utf-8")
    scraped = {name: Series() for name in SCENARIOS}
    for name, series in scraped.items():
        for tick, state in played(name):
            series.add(replace(state, ticks=tick + 1))
    found = evaluate_each(scraped, scrape_seconds=1, evaluation_seconds=1, rules=rules)
    return {
        name: episodes((one for one in active if one.labels.get("pod") == SCENARIOS[name].pod), 1)
        for name, active in found.items()
    }


@pytest.mark.live
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_rules_fire_what_a_scenario_expects_before_its_mitigation_and_end_it(
    scenario: Scenario, fired: Mapping[str, Sequence[Episode]]
) -> None:
    assert scenario.alerts, "users are harmed: something has to fire"
    begins = phases(scenario)
    for alert in scenario.alerts:
        found = [one for one in fired[scenario.name] if one.name == alert]
        assert found, f"{alert} does not fire; fired: {sorted({one.name for one in fired[scenario.name]})}"
        assert begins["incident"] < found[0].start < begins["mitigation"] - 10, (alert, found)
        ending = [one for one in found if one.pages] or found  # a ticket may stay while latency is twice the usual
        assert ending[-1].end < 170, (alert, found)
    pages = {one.name for one in fired[scenario.name] if one.pages}
    assert pages & set(scenario.alerts) or scenario.name == "cpu_throttling", pages
