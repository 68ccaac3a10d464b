"""The machine around the engines: pods that come and go, cgroups, logs, GPUs, and the servers in front."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tests.demo.timeline import START, Clock

from kvpressure.engines.vllm.log_lines import recognise, strip
from kvpressure.model.readings import ContainerReading
from kvpressure.sources.scrape.scanner import parse_scrape
from lab.demo.node import PodChange, SimulatedNode
from lab.demo.scenario import CHAT, CODE, PODS
from lab.demo.server import PodServer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> SimulatedNode:
    return SimulatedNode(PODS, clock)


def container(node: SimulatedNode, pod: str = CHAT) -> ContainerReading:
    return next(reading for reading in node.containers() if reading.pod == pod)


def counter(node: SimulatedNode, name: str) -> float:
    page = parse_scrape(node.metrics(CHAT), target="t", time=START)
    return page.engines[0].counters[name]


# --- pods -------------------------------------------------------------------------------------------------------


def test_a_rollout_takes_the_pod_away_and_starts_its_counters_anew(node: SimulatedNode, clock: Clock) -> None:
    clock.now += 30
    assert counter(node, "generation_tokens") > 1000
    node.apply({CHAT: PodChange(limits={"max_num_seqs": 10})}, clock.now)
    clock.now += 3
    assert node.metrics(CHAT) is None
    assert container(node).ready is False
    assert "--max-num-seqs 10" in " ".join(node.pods[CHAT].args)
    used = {gpu.index: gpu.memory_used_bytes for gpu in node.gpus()}
    assert used[0] == 530_000_000 < used[1]
    clock.now += 5
    assert counter(node, "generation_tokens") < 2000
    assert container(node).ready is True
    assert container(node).cpu_usage_seconds < 10
    page = parse_scrape(node.metrics(CHAT), target="t", time=clock.now)
    assert page.page["process_start_time_seconds"] == START + 36


def test_a_stall_freezes_the_page_but_not_the_api_server(node: SimulatedNode, clock: Clock) -> None:
    clock.now += 20
    node.apply({CHAT: PodChange(stalled=True)}, clock.now)
    before = parse_scrape(node.metrics(CHAT), target="t", time=clock.now)
    clock.now += 30
    after = parse_scrape(node.metrics(CHAT), target="t", time=clock.now)
    assert after.engines == before.engines
    assert after.page["process_cpu_seconds"] > before.page["process_cpu_seconds"]
    assert next(gpu for gpu in node.gpus() if gpu.index == 0).utilization_ratio == 0
    node.apply({CHAT: PodChange(stalled=False)}, clock.now)
    clock.now += 5
    assert counter(node, "generation_tokens") > after.engines[0].counters["generation_tokens"]


def test_log_lines_are_those_that_the_exporter_recognises(node: SimulatedNode, clock: Clock) -> None:
    events = [recognise(strip(line.line)) for line in node.logs() if line.pod == CODE]
    names = [event.event for event in events if event is not None]
    assert {"args", "max_num_batched_tokens", "weights_bytes", "pool_bytes", "capacity"} <= set(names)
    assert None not in events
    clock.now += 21
    later = [line for line in node.logs() if line.pod == CODE]
    assert all("KV cache usage" in line.line for line in later)
    assert later
    assert not node.logs()


# --- servers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(node: SimulatedNode) -> Iterator[PodServer]:
    served = PodServer(node, CHAT)
    served.start()
    yield served
    served.stop()


def test_a_server_answers_as_vllm_does(server: PodServer) -> None:
    def get(path: str) -> tuple[str, bytes]:
        with urlopen(server.url + path, timeout=5) as answer:
            return answer.headers["Content-Type"], answer.read()

    kind, text = get("/metrics")
    assert kind == "text/plain; version=1.0.0; charset=utf-8"
    assert b'vllm:num_requests_running{engine="0",model_name="chat-13b"}' in text
    assert get("/health")[1] == b""
    assert json.loads(get("/version")[1]) == {"version": "0.32.0"}
    assert json.loads(get("/v1/models")[1])["data"][0]["max_model_len"] == 4096
    with pytest.raises(URLError, match="404"):
        get("/nothing")
