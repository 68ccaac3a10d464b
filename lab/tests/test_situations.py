"""Situations (``python -m lab.alerts.situations``): the cluster that they describe, and what the rules make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.alerts.cluster import Cluster
from lab.alerts.engine import fired
from lab.alerts.series import RULES, Series
from lab.alerts.situations import main, scrapes

pytestmark = [pytest.mark.live, pytest.mark.slow]

ONSET = 8
BASE = f"""
onset: {ONSET}
length: 18
subject: {{namespace: a, model: llama, pool: chat}}
cluster: {{kube_state_metrics: true, nodes: [{{name: gpu-1, gpus: 2}}]}}
workloads: [{{name: chat, kind: Deployment, namespace: a, replicas: [{{from: 0, wanted: 1}}]}}]
pods:
- name: chat-6b7f9-a1
  workload: chat
  node: gpu-1
  container: vllm
  args: [--model, org/llama, --max-num-seqs, '64']
  model: llama
  gpus: [0]
  version: 0.11.0
  phases: [{{from: 0, status: ready}}]
  server: [{{from: 0, answers: ok, traffic: calm}}, {{from: {ONSET}, answers: ok, traffic: after}}]
  gpu: [{{from: 0, memory_used: 0.9, utilization: 0.7}}]
traffic:
  calm:
    {{finished: {{stop: 1.9, length: 0.1}}, http: {{'200': 2.0}}, running: [18, 22], waiting: 0, kv: [0.3, 0.4],
      prompt_tokens: 800, output_tokens: 250, ttft: [0.1, 0.3], inter_token: 0.03, queue: 0.002, e2e: 7.6, tokens: 500}}
"""


def situation(expect: str, after: dict[str, Any], **pod: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(BASE)
    made["pods"][0] |= pod
    made["traffic"]["after"] = made["traffic"]["calm"] | after
    return made | {"id": expect, "expect": expect}


def play(where: Path, *played: dict[str, Any]) -> int:
    for one in played:
        (where / f"{one['id']}.yaml").write_text(yaml.safe_dump(one), encoding="utf-8")
    return main([str(where), "--texts"])


def values(series: Series, name: str) -> dict[str, str]:
    found = series.between(0, series.scrapes)
    return {labelled: value for labelled, value in found if labelled.startswith(f"{name}{{")}


def test_a_server_that_stands_still_pages_and_a_calm_one_does_not(tmp_path: Path, capsys: Any) -> None:
    assert play(tmp_path, situation("page", {"frozen": True, "running": 20}), situation("nothing", {})) == 0
    nothing, page, _, summary, *_ = capsys.readouterr().out.splitlines()
    assert nothing == "nothing: nothing: ok; pages: -; tickets: -; notifications 0"
    assert page.startswith("page: page after ")
    assert page.endswith("notifications 1")
    assert "llama" in summary


def test_a_calm_server_with_the_defaults_raises_not_even_information() -> None:
    """What is configured is no event."""
    calm = situation("nothing", {}, args=["--model", "org/llama"])
    read = frozenset(re.findall(r"\w+", RULES.read_text(encoding="utf-8")))
    assert {one.labels["alertname"] for one in fired(scrapes(calm, read))} == {"KvpressureWatchdog"}


@pytest.mark.parametrize(("expect", "after"), [("page", {}), ("nothing", {"frozen": True, "running": 20})])
def test_a_missed_page_and_a_false_one_miss_a_bar(tmp_path: Path, expect: str, after: dict[str, Any]) -> None:
    assert play(tmp_path, situation(expect, after)) == 1


def test_a_file_that_cannot_be_played_is_named(tmp_path: Path, capsys: Any) -> None:
    assert play(tmp_path, situation("nothing", {}, phases=[{"from": 0, "status": "asleep"}])) == 1
    assert "nothing: cannot be played: " in capsys.readouterr().out


def test_series_end_while_an_exporter_is_not_scraped_and_a_new_process_remembers_nothing() -> None:
    played = situation("nothing", {})
    phases = [{"from": 6, "state": "down"}, {"from": 7, "state": "up"}, {"from": 8, "state": "gone"}]
    names = frozenset({"up", "kvpressure_ticks_total", "kube_deployment_status_replicas_available"})
    series = scrapes({**played, "length": 9, "exporters": [{"node": "gpu-1", "phases": phases}]}, names)
    (ticks,) = values(series, "kvpressure_ticks_total").values()
    assert "stale _x3 1.0 4.0 7.0 10.0 stale _x4" in ticks
    assert "1+0x23 0+0x3 1+0x3 stale _x4" in values(series, "up").values()
    assert list(values(series, "kube_deployment_status_replicas_available").values()) == ["1+0x36"]


def test_a_pod_that_is_made_again_under_its_name_is_another_one() -> None:
    phases = [{"from": 0, "status": "ready"}, {"from": 1, "status": "crashed", "restarts": 2}]
    phases += [{"from": 2, "status": "deleted"}, {"from": 3, "status": "starting"}]
    cluster = Cluster(situation("nothing", {}, phases=phases))
    lives = []
    for minute in (0.0, 1.0, 3.0):
        cluster.advance(minute, 5.0)
        (pod,) = cluster.on("gpu-1")
        document = pod.document()
        lives.append((document["metadata"]["uid"], document["status"]["containerStatuses"][0]["restartCount"]))
    (first, _), (same, crashed), (other, fresh) = lives
    assert (first == same, first == other, crashed, fresh) == (True, False, 2, 0)


def test_a_lost_gpu_keeps_the_events_of_its_driver() -> None:
    cluster = Cluster(situation("nothing", {}, gpu=[{"from": 0, "xid": 79}, {"from": 1, "state": "lost"}]))
    cluster.advance(2.0, 5.0)
    lost, free = cluster.gpus("gpu-1", 0.0)
    assert (lost.error, lost.xid_errors, free.error, free.xid_errors) == ("lost", {79: 1}, None, {})
