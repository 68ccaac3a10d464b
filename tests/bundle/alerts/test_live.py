"""Two incidents live: the exporter plays a recording, a real Prometheus scrapes it and evaluates our rules, a real
Alertmanager groups, mutes and notifies, with the inhibitions of kube-prometheus-stack beside ours. Only the waiting
times of rules and routes are shortened.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from lab.demo import alerting
from lab.demo.beats import late
from lab.demo.prometheus_stack import Stack, installed

from tests.helpers.beats import in_time
from tests.helpers.kube_prometheus_stack import INFO_INHIBITOR, INHIBITIONS
from tests.helpers.serve_process import QUIET, serving

pytestmark = [pytest.mark.live, pytest.mark.real_time]

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "recordings" / "vllm-cpu"
PRESSED, STUCK = "pressed-model", "stuck-model"
PRESSURE_ENDS, STALL_BEGINS, STALL_ENDS, END = 20, 6, 34, 72  # seconds
SLOWER = (1, 2, 2)  # the captures hold no state for four times as long
BY = 1 / 60  # five minutes of waiting become five seconds
SCRAPE_SECONDS = 0.5
WATCHDOG = "heartbeat"
PEOPLE = ("pager", "tickets")


def capture(name: str) -> list[str]:
    """The pages of a capture of a real server."""
    with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        next(lines)
        return [json.loads(line)["engines"][0]["exposition"] for line in lines]


def pages(slower: int) -> Iterator[tuple[str, str]]:
    """A page of each server for every second: one is under KV pressure and then calm, one stops and goes on."""
    pressure, calm, steady = capture("d_kv_pressure"), capture("f_recovery"), capture("c_steady")
    pressure_ends, stall_begins = PRESSURE_ENDS * slower, STALL_BEGINS * slower
    for second in range(END * slower):
        pressed = pressure[second] if second < pressure_ends else calm[(second - pressure_ends) % len(calm)]
        at = second if second < stall_begins else max(stall_begins, second - (STALL_ENDS * slower - stall_begins))
        yield named(pressed, PRESSED), named(steady[at % len(steady)], STUCK)


def named(page: str, model: str) -> str:
    return re.sub(r'model_name="[^"]*"', f'model_name="{model}"', page)


def write_recording(path: Path, slower: int) -> None:
    """Both servers as two pods of one node."""
    with path.open("w", encoding="utf-8") as out:
        out.write(
            json.dumps({"format": "kvpressure-recording", "version": 1, "interval_seconds": 1, "node": "n"}) + "\n"
        )
        for second, both in enumerate(pages(slower)):
            engines = [
                {
                    "target": f"http://{pod}/metrics",
                    "namespace": "inference",
                    "pod": pod,
                    "container": "vllm",
                    "gpus": [],
                    "args": ["--max-num-seqs", "64"],
                    "exposition": page,
                }
                for pod, page in zip((PRESSED, STUCK), both, strict=True)
            ]
            out.write(json.dumps({"t": 1_700_000_000 + second, "engines": engines}) + "\n")


def exporter(recording: Path) -> AbstractContextManager[str]:
    """The real process, which plays a recording; yields its address."""
    return serving(*QUIET, "--no-collector.engines", "--collector.recording", "--recording.file", str(recording))


class Notifications:
    """What the receivers got."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.got: list[tuple[float, str, list[dict[str, Any]]]] = []

    def take(self, receiver: str, alerts: list[dict[str, Any]]) -> None:
        self.got.append((time.monotonic() - self.began, receiver, alerts))

    def to(self, *receivers: str) -> list[list[dict[str, Any]]]:
        return [alerts for _, receiver, alerts in self.got if receiver in receivers]

    def firing(self, receiver: str, model: str) -> set[str]:
        """Names of the alerts on a model that a receiver was told of."""
        return {
            alert["labels"]["alertname"]
            for alerts in self.to(receiver)
            for alert in alerts
            if alert["status"] == "firing" and alert["labels"].get("model_name") == model
        }

    def still_firing(self, receiver: str) -> set[str]:
        """Names of the alerts whose last notification is no all-clear."""
        last = {alert["fingerprint"]: alert for alerts in self.to(receiver) for alert in alerts}
        return {alert["labels"]["alertname"] for alert in last.values() if alert["status"] != "resolved"}

    def about(self, model: str) -> list[str]:
        """The receivers of the notifications that ask for work on a model, in order."""
        return [
            receiver
            for _, receiver, alerts in self.got
            if receiver in PEOPLE
            and any(alert["labels"].get("model_name") == model for alert in alerts)
            and any(alert["status"] == "firing" for alert in alerts)
        ]


@dataclass(frozen=True)
class Run:
    """What was sent, and which alerts for people Alertmanager still held active at the end."""

    notifications: Notifications
    left: set[str]


def active(stack: Stack) -> set[str]:
    """Names of the active alerts, muted ones included, without those that are for the dashboards only, and without
    InferenceSlow: it waits a quarter of a minute here, and the exporter's quantiles remember a whole one.
    """
    with urlopen(f"{stack.alertmanager.url}/api/v2/alerts?active=true&inhibited=true", timeout=5) as answer:
        return {
            alert["labels"]["alertname"]
            for alert in json.load(answer)
            if alert["labels"]["severity"] not in ("info", "none") and alert["labels"]["alertname"] != "InferenceSlow"
        }


@contextmanager
def as_in_kube_prometheus_stack() -> Iterator[None]:
    """With the stack's own inhibitions beside ours, and its InfoInhibitor beside our rules."""
    alertmanager, rules = alerting.alertmanager, alerting.rules

    def with_inhibitions(by: float, receiver_url: str) -> dict[str, Any]:
        document = alertmanager(by, receiver_url)
        return {**document, "inhibit_rules": [*document["inhibit_rules"], *INHIBITIONS]}

    def with_inhibitor(by: float, interval_seconds: float) -> dict[str, Any]:
        return {"groups": [*rules(by, interval_seconds)["groups"], INFO_INHIBITOR]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerting, "alertmanager", with_inhibitions)
        patch.setattr(alerting, "rules", with_inhibitor)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Both incidents, as the first run that kept time showed them."""
    programs = installed()
    assert programs is not None, "prometheus and prometheus-alertmanager are needed"
    return in_time(lambda slower: play(programs, tmp_path_factory.mktemp("live"), slower), SLOWER)


def play(programs: tuple[str, str], folder: Path, slower: int) -> tuple[Run, list[str]]:
    """From the start until both have paged and nothing is active any more, or until the recording ends. Also returns
    which beats were missed.
    """
    write_recording(folder / "recording.jsonl", slower)
    sent = Notifications()
    with exporter(folder / "recording.jsonl") as address, as_in_kube_prometheus_stack():
        stack = Stack(
            programs,
            folder,
            address.removeprefix("http://"),
            BY * slower,
            SCRAPE_SECONDS * slower,
            sent.take,
            threading.Event(),
        )
        try:
            until = sent.began + END * slower - 6
            left = {"not looked at"}
            while time.monotonic() < until:
                left = active(stack)
                both = sent.firing("pager", PRESSED) and sent.firing("pager", STUCK)
                if both and not left and not sent.still_firing("pager"):
                    break
                time.sleep(0.2)
            behind = late(stack.beats())
        finally:
            stack.stop()
    return Run(sent, left), [str(beats) for beats in behind]


def test_each_incident_pages_with_its_own_alert(run: Run) -> None:
    assert run.notifications.firing("pager", PRESSED) - {"InferenceRequestsWaitTooLong"} == {
        "InferenceKVCachePressure"
    }  # the cause, beside the harm
    assert run.notifications.firing("pager", STUCK) == {"InferenceEngineStalled"}


def test_an_incident_is_at_most_three_notifications(run: Run) -> None:
    """The harm may page some minutes before the cause is certain: the cause then joins its group."""
    for model, pages in ((PRESSED, 2), (STUCK, 1)):
        asked = run.notifications.about(model)
        assert len(asked) <= 3
        assert 1 <= asked.count("pager") <= pages


def test_all_clear_after_recovery(run: Run) -> None:
    assert run.left == set()
    assert run.notifications.to(WATCHDOG), "the heartbeat has not reached its receiver"
    assert run.notifications.to("pager"), "nobody was paged"
    assert run.notifications.still_firing("pager") == set()
