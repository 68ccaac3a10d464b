"""The machine around the engines: pods that come and go, cgroups, logs, GPUs, and the servers in front."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, RemoteDisconnected
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tests.demo.timeline import START, Clock

from kvpressure.engines.vllm.log_lines import match, strip
from kvpressure.model.readings import ContainerReading
from kvpressure.sources.scrape.scanner import parse_scrape
from lab.demo.node import PodChange, SimulatedNode
from lab.demo.scenario import CHAT, CODE, MAIL, PODS
from lab.demo.server import PodServer
from lab.demo.source import DemoSource
from lab.demo.traffic import Traffic, TrafficLoad


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


# --- traffic ----------------------------------------------------------------------------------------------------


def test_traffic_has_its_rate_and_lengths_and_is_the_same_every_time() -> None:
    load = TrafficLoad(5.0, prompt_tokens=400, output_tokens=100, max_tokens=256, prompt_limit=1000)
    arrived = list(Traffic(load, START, seed=3).until(START + 2000))
    assert len(arrived) == pytest.approx(5 * 2000 * 0.967, rel=0.03)  # 3.3 % of the prompts are refused
    assert [r.arrival for r in arrived] == sorted(r.arrival for r in arrived)
    prompts = sorted(r.prompt_tokens for r in arrived)
    assert prompts[len(prompts) // 2] == pytest.approx(395, rel=0.05)
    assert prompts[-1] <= 1000
    again = Traffic(load, START, seed=3).until(START + 2000)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in arrived] == [
        (r.arrival, r.prompt_tokens, r.output_tokens) for r in again
    ]


def test_a_load_of_nothing_sends_nothing_until_it_changes() -> None:
    traffic = Traffic(TrafficLoad(0.0, 1, 1), START, seed=1)
    assert not list(traffic.until(START + 1e6))
    traffic.change(TrafficLoad(10.0, 5, 5), START + 10)
    assert START + 10 < next(traffic.until(START + 20)).arrival < START + 12


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


def test_a_change_that_comes_late_happens_now_not_in_the_past(node: SimulatedNode, clock: Clock) -> None:
    """Another thread's reading may have let time pass beyond the moment that the scenario gave the change."""
    before = clock.now
    node.apply(
        {CHAT: PodChange(load=TrafficLoad(requests_per_second=50, prompt_tokens=5000, output_tokens=10))}, before
    )
    clock.now += 20
    node.metrics(CHAT)
    busy = TrafficLoad(requests_per_second=50, prompt_tokens=100, output_tokens=10)
    node.apply({CHAT: PodChange(load=busy)}, before)
    clock.now += 1
    assert node.metrics(CHAT) is not None


def test_requests_that_come_while_the_pod_is_away_are_lost(node: SimulatedNode, clock: Clock) -> None:
    node.apply({CHAT: PodChange(restart=True)}, clock.now)
    clock.now += 7
    node.metrics(CHAT)
    pod = node.pods[CHAT]
    assert pod.engine is not None
    assert pod.engine.in_flight + sum(pod.engine.books.finished.values()) <= 15  # of one second, not of seven


def test_throttling_is_in_the_cgroup_and_the_quota_is_used_up(node: SimulatedNode, clock: Clock) -> None:
    clock.now += 10
    calm = container(node)
    assert calm.cpu_throttled_periods == 0
    assert calm.cpu_periods == 100
    assert calm.cpu_usage_seconds == pytest.approx(11, abs=1.2)
    node.apply({CHAT: PodChange(cpu_limit_cores=0.5, throttled=0.8, host_factor=40.0)}, clock.now)
    clock.now += 10
    starved = container(node)
    assert starved.cpu_throttled_periods == pytest.approx(80, abs=2)
    assert starved.cpu_usage_seconds - calm.cpu_usage_seconds == pytest.approx(5, abs=0.1)


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
    events = [match(strip(line.line)) for line in node.logs() if line.pod == CODE]
    names = [event.event for event in events if event is not None]
    assert {"args", "max_num_batched_tokens", "weights_bytes", "pool_bytes", "capacity"} <= set(names)
    assert None not in events
    clock.now += 21
    later = [line for line in node.logs() if line.pod == CODE]
    assert all("KV cache usage" in line.line for line in later)
    assert later
    assert not node.logs()


def test_every_pod_owns_one_gpu(node: SimulatedNode) -> None:
    assert {(owner.pod, owner.shared) for owner in node.owners()} == {(CHAT, False), (CODE, False), (MAIL, False)}
    assert {owner.uuid for owner in node.owners()} == {gpu.uuid for gpu in node.gpus()}


def test_gpus_average_over_at_least_a_fifth_of_a_second(node: SimulatedNode, clock: Clock) -> None:
    node.gpus()
    clock.now += 20
    first = node.gpus()
    clock.now += 0.1
    assert node.gpus() == first
    clock.now += 1
    assert node.gpus() != first


def test_the_source_starts_the_incident_again(clock: Clock) -> None:
    source = DemoSource(None, clock=clock, cycle_seconds=100)
    clock.now += 60
    source.read()
    clock.now += 41
    pages = source.read().pages or ()
    assert [page.engines[0].counters["generation_tokens"] for page in pages] == [0.0, 0.0, 0.0]
    assert pages[0].args[pages[0].args.index("--max-num-seqs") + 1] == "128"


def test_the_source_keeps_its_scrapes_for_a_recorder(clock: Clock) -> None:
    kept = DemoSource(SimpleNamespace(keep_exposition=True), clock=clock).read().pages or ()
    assert kept
    assert all("vllm:num_requests_running" in (page.exposition or "") for page in kept)


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


def test_a_pod_that_is_away_hangs_up(server: PodServer, node: SimulatedNode, clock: Clock) -> None:
    node.apply({CHAT: PodChange(restart=True)}, clock.now)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/metrics")
    with pytest.raises(RemoteDisconnected):
        connection.getresponse()
    connection.close()


def test_a_server_listens_on_loopback_only(server: PodServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"
