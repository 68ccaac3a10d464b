"""What the demo tells and how it decides whether everything was seen; shortened rules and routes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.demo.timeline import played

from kvpressure.bundle.rules import Options, load_groups, rule_file
from kvpressure.settings.thresholds import builtin
from lab.demo import alerting
from lab.demo.narration import Story
from lab.demo.scenario import CHAT, MAIL, SCENARIOS

pytestmark = pytest.mark.slow


class Listener:
    """A story of the kv_pressure scenario with a clock that the test sets."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.story = Story(SCENARIOS["kv_pressure"], lambda: self.now, self.lines.append)

    def watch(self, until: int) -> None:
        for tick, state in played("kv_pressure"):
            if tick <= until:
                self.now = tick
                self.story.observe(state)

    def alert(self, status: str, fingerprint: str = "a", receiver: str = "pager", **labels: str) -> None:
        labels = {"alertname": "InferenceKVCachePressure", "severity": "critical", "pod": CHAT, **labels}
        self.story.notify(
            receiver,
            [
                {
                    "status": status,
                    "fingerprint": fingerprint,
                    "labels": labels,
                    "annotations": {"summary": "it is full"},
                }
            ],
        )


@pytest.fixture
def heard() -> Listener:
    return Listener()


def test_the_whole_story_misses_nothing(heard: Listener) -> None:
    heard.watch(100)
    heard.alert("firing")
    heard.watch(179)
    heard.alert("resolved")
    assert heard.story.missing(set()) == []


@pytest.mark.parametrize(
    ("until", "complaint"),
    [
        (2, "was not kv_pressure then"),
        (28, "was not kv_pressure then"),
        (90, "was not healthy or idle at last"),
    ],
)
def test_a_sequence_that_stops_early_is_named(heard: Listener, until: int, complaint: str) -> None:
    heard.watch(until)
    assert complaint in heard.story.missing(None)[0]


def test_alerts_that_did_not_fire_or_clear_are_named(heard: Listener) -> None:
    heard.watch(179)
    assert heard.story.missing(set()) == [f"InferenceKVCachePressure did not fire for {CHAT}"]
    assert heard.story.missing(None) == []  # without Alertmanager nobody can tell
    heard.alert("firing", "other", pod=MAIL)
    heard.alert("firing", "load", alertname="InferenceConcurrencyNearLimit")
    heard.alert("firing", "beat", receiver="heartbeat")
    assert heard.story.missing(set()) == [f"InferenceKVCachePressure did not fire for {CHAT}"]
    heard.alert("firing")
    assert heard.story.missing({"a"}) == ["InferenceKVCachePressure (critical) did not clear"]
    assert heard.story.missing({"other"}) == []  # gone without a notice: it was muted when it ended


def test_alerts_are_told_when_they_fire_and_clear_and_not_when_repeated(heard: Listener) -> None:
    for status in ("firing", "firing", "resolved", "resolved", "firing"):
        heard.now += 10
        heard.alert(status)
    assert heard.lines == [
        f"[  10 s] ALERT InferenceKVCachePressure (critical, pager) {CHAT}: it is full",
        f"[  30 s] CLEARED InferenceKVCachePressure (critical, pager) {CHAT}",
        f"[  50 s] ALERT InferenceKVCachePressure (critical, pager) {CHAT}: it is full",
    ]


# --- shortened waiting times ------------------------------------------------------------------------------------


def test_only_waiting_times_of_the_rules_differ_from_the_bundle() -> None:
    def without_times(document: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in rule.items() if key not in ("for", "keep_firing_for")}
            | {"expr": re.sub(r"\[\w+\]\) \* [\d.]+ > [\d.]+\)", "", rule["expr"])}
            for group in document["groups"]
            for rule in group["rules"]
        ]

    def times(document: dict[str, Any]) -> list[float]:
        return [
            seconds(rule[key])
            for group in document["groups"]
            for rule in group["rules"]
            for key in ("for", "keep_firing_for")
            if key in rule
        ]

    def seconds(text: str) -> float:
        unit = text.lstrip("0123456789")
        return int(text.removesuffix(unit)) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]

    options = Options(builtin())
    bundle, demo = rule_file(load_groups(options), options.values), alerting.rules(0.05, 1.0)
    assert without_times(demo) == without_times(bundle)
    assert times(demo) == pytest.approx([0.05 * value for value in times(bundle)])
    assert {group["interval"] for group in demo["groups"]} == {"1s"}
    shares = [
        (rule["expr"], short["expr"])
        for group, shorter in zip(bundle["groups"], demo["groups"], strict=True)
        for rule, short in zip(group["rules"], shorter["rules"], strict=True)
        if "[8m]) * " in rule["expr"]
    ]
    assert shares
    for expression, short in shares:
        assert "[8m]) * 60 > 300)" in expression
        assert "[24s]) * 1 > 15)" in short


def test_prometheus_and_alertmanager_accept_the_configuration(tmp_path: Path) -> None:
    documents = {
        "rules.yaml": alerting.rules(1 / 160, 0.25),
        "alertmanager.yaml": alerting.alertmanager(1 / 160, "http://127.0.0.1:9"),
        "prometheus.yaml": alerting.prometheus("rules.yaml", "127.0.0.1:1", ["127.0.0.1:3"], "127.0.0.1:2", 0.25),
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    for command in (
        ["promtool", "check", "config", "prometheus.yaml"],
        ["amtool", "check-config", "alertmanager.yaml"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    receivers = {receiver["name"]: receiver for receiver in documents["alertmanager.yaml"]["receivers"]}
    assert receivers["pager"]["webhook_configs"][0]["url"] == "http://127.0.0.1:9/pager"
