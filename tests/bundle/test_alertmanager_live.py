"""The Alertmanager example in a running Alertmanager: what is muted by what, and what arrives together."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from lab.demo.prometheus_stack import ALERTMANAGER, Child, Receiver

from tests.helpers.kube_prometheus_stack import INHIBITIONS
from tests.helpers.waiting import until

pytestmark = pytest.mark.live

ENGINE = {"namespace": "inference", "pool": "chat", "model_name": "llama", "engine": "0"}


def engine(name: str, severity: str, pod: str, family: str = "load", **more: str) -> dict[str, str]:
    return other(name, severity, family, pod=pod, **{**ENGINE, **more})


def other(name: str, severity: str, family: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": severity, "kvpressure_family": family, **labels}


KV = ("InferenceKVCachePressure", "pressure")
STALLED = ("InferenceStalled", "critical")
CONTAINER = {"namespace": "inference", "pool": "chat", "container": "vllm"}
GPU = {"namespace": "inference", "pool": "chat", "model_name": "llama", "gpu": "3", "node": "gpu-7"}
DOWN = {"namespace": "inference", "model_name": "llama"}
# (labels, whether something mutes it)
TABLE: list[tuple[dict[str, str], bool]] = [
    # a page on an engine mutes what is a ticket on it, and nothing of another pod, engine or cluster
    (engine(KV[0], "critical", "a", KV[1]), False),
    (engine(KV[0], "warning", "a", KV[1]), True),
    (engine("InferenceConcurrencyNearLimit", "warning", "a"), True),
    (engine("InferenceSlow", "warning", "a", "harm"), True),
    (engine("InferenceBatchCollapse", "info", "a"), True),
    (engine(KV[0], "warning", "b", KV[1]), False),
    (engine(KV[0], "warning", "a", KV[1], engine="1"), False),
    (engine(KV[0], "warning", "a", KV[1], cluster="west"), False),
    # an engine that is stalled explains what users feel; a ticket never mutes a page
    (engine(*STALLED, "s", "harm"), False),
    (engine("InferenceSlow", "critical", "s", "harm"), True),
    (engine("InferenceSlow", "critical", "t", "harm"), False),
    (engine("InferenceCapacityLost", "warning", "e", "failure"), True),  # by the pages about parts of its pool
    (engine("InferenceSlow", "critical", "e", "harm"), False),
    (engine("InferenceCapacityLost", "warning", "o", "failure", pool="other"), False),
    # R04: the lost GPU of an engine that hangs
    (other("GpuLost", "critical", "hardware", pod="g", uuid="GPU-3", **GPU), False),
    (engine(*STALLED, "g", "harm"), True),
    (other("GpuXidError", "warning", "hardware", pod="g", uuid="GPU-3", xid="79", **GPU), False),
    # R01: a model is down because its container restarts again and again
    (other("InferenceModelDown", "critical", "failure", pool="bad", **DOWN), False),
    (other("InferenceCrashLoop", "critical", "failure", pod="x", **CONTAINER | {"pool": "bad"}), True),
    (other("InferenceObjectiveBurn", "critical", "objectives", pool="bad", objective="ttft", **DOWN), True),
    (other("InferenceObjectiveBurn", "critical", "objectives", pool="fine", objective="ttft", **DOWN), False),
    # levels of the guides
    (other("GpuMemoryHigh", "warning", "memory", pod="m", documented_level="critical", **DOWN), False),
    (other("GpuMemoryHigh", "warning", "memory", pod="m", documented_level="warning", **DOWN), True),
    (other("GpuMemoryHigh", "warning", "memory", pod="n", documented_level="warning", **DOWN), False),
    # GPUs without a pod: the missing labels are equal on both sides and must not count
    (other("GpuLost", "warning", "hardware", uuid="GPU-1", gpu="0"), False),
    (other("GpuXidError", "warning", "hardware", uuid="GPU-2", gpu="1"), False),
    (other("KvpressureExportersDown", "warning", "self"), False),
    (other("KvpressureExporterImpaired", "warning", "self", instance="n1", what="stuck"), False),
    # containers
    (other("InferenceOutOfMemory", "critical", "failure", pod="c", **CONTAINER), False),
    (other("InferenceOutOfMemory", "warning", "failure", pod="c", **CONTAINER), True),
    (other("InferenceCrashLoop", "critical", "failure", pod="c", **CONTAINER), True),
    (engine("InferenceSlow", "critical", "c", "harm"), True),
    (other("InferenceCrashLoop", "critical", "failure", pod="d", **CONTAINER), False),
    # somebody else's alerts with our labels
    ({"alertname": "VllmKVCachePressureOther", "severity": "warning", "pod": "a", **ENGINE}, False),
]


class Alertmanager:
    """A running Alertmanager with our configuration, and what its receivers got."""

    def __init__(self, folder: Path, configuration: str, more_inhibitions: Sequence[Mapping[str, Any]] = ()) -> None:
        self.received: list[tuple[str, list[dict[str, Any]]]] = []
        self._receiver = Receiver(lambda name, alerts: self.received.append((name, alerts)))
        document = yaml.safe_load(configuration)
        document["route"]["group_wait"] = "500ms"
        document["inhibit_rules"] += more_inhibitions
        for receiver in document["receivers"]:
            for webhook in receiver.get("webhook_configs", ()):
                webhook["url"] = f"{self._receiver.url}/{receiver['name']}"
        (folder / "alertmanager.yaml").write_text(yaml.safe_dump(document))
        program = next(path for name in ALERTMANAGER if (path := shutil.which(name)))
        self._child = Child(
            "alertmanager",
            folder,
            lambda address: [
                program,
                "--config.file=alertmanager.yaml",
                "--storage.path=data",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
                "--log.level=warn",
            ],
            threading.Event(),
        )

    def send(self, alerts: list[dict[str, str]]) -> None:
        now = datetime.now(UTC)
        body = [
            {"labels": labels, "startsAt": now.isoformat(), "endsAt": (now + timedelta(hours=1)).isoformat()}
            for labels in alerts
        ]
        request = Request(
            f"{self._child.url}/api/v2/alerts", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=5):
            pass

    def muted(self) -> dict[str, bool]:
        with urlopen(f"{self._child.url}/api/v2/alerts", timeout=5) as answer:
            return {key(alert["labels"]): bool(alert["status"]["inhibitedBy"]) for alert in json.load(answer)}

    def stop(self) -> None:
        self._child.stop()
        self._receiver.stop()


def key(labels: dict[str, str]) -> str:
    return json.dumps(labels, sort_keys=True)


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Iterator[Alertmanager]:
    running = Alertmanager(tmp_path_factory.mktemp("alertmanager"), files["alerts/alertmanager.yaml"])
    try:
        running.send([labels for labels, _ in TABLE])
        until(
            lambda: (
                len(running.muted()) == len(TABLE) and sum(running.muted().values()) >= sum(muted for _, muted in TABLE)
            )
        )
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("labels", "muted"), TABLE, ids=[f"{labels['alertname']}-{index}" for index, (labels, _) in enumerate(TABLE)]
)
def test_inhibition(alertmanager: Alertmanager, labels: dict[str, str], muted: bool) -> None:
    assert alertmanager.muted()[key(labels)] is muted


def test_pages_of_one_pool_are_one_notification_and_nothing_else_pages(alertmanager: Alertmanager) -> None:
    expected = {key(labels) for labels, muted in TABLE if labels["severity"] == "critical" and not muted}
    until(
        lambda: (
            expected
            <= {key(alert["labels"]) for name, alerts in alertmanager.received if name == "pager" for alert in alerts}
        )
    )
    pages = [alerts for name, alerts in alertmanager.received if name == "pager"]
    assert {key(alert["labels"]) for alerts in pages for alert in alerts} == expected
    pools = [{(alert["labels"].get("cluster"), alert["labels"].get("pool")) for alert in alerts} for alerts in pages]
    assert all(len(pool) == 1 for pool in pools)
    assert sorted(str(pool) for (pool,) in pools) == sorted({str(pool) for (pool,) in pools}), "one each"


def test_what_is_muted_reaches_nobody(alertmanager: Alertmanager) -> None:
    until(lambda: any(name == "tickets" for name, _ in alertmanager.received))
    reached = {key(alert["labels"]) for _, alerts in alertmanager.received for alert in alerts}
    assert not reached & {key(labels) for labels, muted in TABLE if muted}


# What the inhibitions of kube-prometheus-stack add: they know neither pods nor engines.
IN_THE_STACK: list[tuple[dict[str, str], bool]] = [
    ({"alertname": "InfoInhibitor", "severity": "none"}, False),
    (other("KvpressureWatchdog", "none", "self"), False),
    (other("KvpressureWatchdog", "info", "self"), True),  # why the heartbeat has a severity of its own
    (engine(KV[0], "critical", "a", KV[1]), False),
    (engine(KV[0], "critical", "b", KV[1]), False),
    (engine(KV[0], "warning", "c", KV[1]), True),  # another pod's: a ticket is lost while a page of its name fires
]


def test_in_kube_prometheus_stack_the_heartbeat_and_every_page_arrive(tmp_path: Path, files: dict[str, str]) -> None:
    running = Alertmanager(tmp_path, files["alerts/alertmanager.yaml"], INHIBITIONS)
    try:
        running.send([labels for labels, _ in IN_THE_STACK])
        expected = {key(labels): muted for labels, muted in IN_THE_STACK}
        until(lambda: running.muted() == expected)

        def reached(name: str) -> list[str]:
            return [key(alert["labels"]) for to, alerts in running.received if to == name for alert in alerts]

        until(lambda: key(IN_THE_STACK[1][0]) in reached("heartbeat"))
        until(
            lambda: (
                {key(labels) for labels, _ in IN_THE_STACK if labels["severity"] == "critical"} <= set(reached("pager"))
            )
        )
    finally:
        running.stop()
