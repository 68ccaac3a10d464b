"""What the demo tells and how it decides whether everything was seen; shortened rules and routes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.demo.timeline import played

from lab.demo import alerting
from lab.demo.narration import Story
from lab.demo.scenario import CHAT, SCENARIOS

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
    alerts = SCENARIOS["kv_pressure"].alerts
    heard.watch(100)
    for name in alerts:
        heard.alert("firing", name, alertname=name)
    heard.watch(179)
    for name in alerts:
        heard.alert("resolved", name, alertname=name)
    assert heard.story.missing(set()) == []


# --- shortened waiting times ------------------------------------------------------------------------------------


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
