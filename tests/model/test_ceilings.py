"""What is believed of numbers from outside: an absurd one is absent and counted, and costs nothing else."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from kvpressure.model.readings import Scrape, Snapshot
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import encode
from kvpressure.publish.routes import Site
from kvpressure.publish.web.http import HttpRequest
from kvpressure.recording.reader import Reader, ReadProblem
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape.scanner import parse_scrape

T = 1_700_000_000.0
HONEST = gzip.decompress((Path(__file__).parents[1] / "fixtures/vllm/d_kv_pressure.prom.gz").read_bytes())
ABSURD = ("-1", "nan", "+Inf", "-Inf", "1e308", "1.7e308", "9" * 400)


def page(text: bytes, pod: str, t: float = T) -> Scrape:
    return parse_scrape(text, target=f"http://{pod}/metrics", time=t, namespace="n", pod=pod)


def answer(state: State, path: str) -> bytes:
    site = Site(lambda: state, why_unhealthy=lambda: None, why_not_ready=lambda: None, node_name="node")
    response = site.answer(HttpRequest("GET", path, {}, keep_alive=True))
    assert response.status == 200
    return response.body


def metrics_of(state: State, pod: str) -> list[str]:
    text = encode(families(state).collect(), openmetrics=False).decode()
    return [line for line in text.splitlines() if f'pod="{pod}"' in line]


def plugin_lines(count: str, size: str = "5") -> bytes:
    steps = "".join(
        f'kvpressure:engine_steps_total{{engine="0",count="batch",size="{each}"}} {count}\n' for each in (size, "7")
    )
    return HONEST + b"\nkvpressure:frontends 1.0\n" + steps.encode()


def test_step_counts_that_no_engine_reaches_do_not_empty_the_metrics_of_the_others() -> None:
    pipeline, alone = Pipeline(), Pipeline()
    for t, count in ((T, "1"), (T + 1, "1.7e308"), (T + 2, "1.75e308")):
        inside = read_plugin_metrics(plugin_lines(count), "n", "bad", t)
        pages = (page(HONEST, "good", t), page(HONEST, "bad", t))
        state = pipeline.observe(Snapshot(t, pages=pages, steps=inside.steps if inside else ()))
        quiet = alone.observe(Snapshot(t, pages=pages[:1]))
    assert len(metrics_of(state, "good")) > 40
    assert metrics_of(state, "good") == metrics_of(quiet, "good")


@pytest.mark.parametrize(
    "line",
    [
        b'kvpressure:engine_steps_total{engine="0",count="batch",size="-5"} 3',
        b'kvpressure:engine_steps_total{engine="0",count="batch",size="9000000"} 3',
        b'kvpressure:engine_steps_total{engine="0",count="batch",size="5"} -3',
        b'kvpressure:engine_steps_total{engine="0",count="batch",size="5"} 1.7e308',
        b'kvpressure:engine_kv_max{engine="0"} 77.0',
        b'kvpressure:engine_kv_max{engine="0"} -0.5',
        b'kvpressure:engine_sums_total{engine="0",sum="decoded"} 1e300',
        b'kvpressure:allocator{rank="0",figure="reserved_bytes"} 1e300',
        b'kvpressure:allocator{rank="-1",figure="reserved_bytes"} 10',
        b'kvpressure:written_seconds{rank="0"} 1e300',
    ],
)
def test_figures_of_the_plugin_that_cannot_be_are_absent_and_counted(line: bytes) -> None:
    inside = read_plugin_metrics(HONEST + b"\nkvpressure:frontends 1.0\n" + line + b"\n", "n", "p", T)
    assert inside is not None
    assert inside.bad_lines == 1
    assert inside.allocator == ()
    assert all((stats.sizes, stats.decoded, stats.kv_max) == ({}, 0, None) for stats in inside.steps)


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize(
    "name",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_sum",
        "time_to_first_token_seconds_count",
    ],
)
def test_values_of_a_scrape_that_cannot_be_are_absent_and_counted(name: str, value: str) -> None:
    line = f'vllm:{name}{{engine="0",model_name="m"}} '.encode()
    good = page(line + b"1\n" + HONEST.replace(b"vllm:" + name.encode() + b"{", b"x{"), "p")
    bad = page(line + value.encode() + b"\n" + HONEST.replace(b"vllm:" + name.encode() + b"{", b"x{"), "p")
    assert bad.bad_lines == good.bad_lines + 1
    numbers = [
        number for reading in bad.engines for group in (reading.gauges, reading.counters) for number in group.values()
    ]
    assert all(math.isfinite(number) and 0 <= number < 1e30 for number in numbers)


@pytest.mark.parametrize("bound", ["-1", "1e308", "-Inf", "nan"])
def test_bounds_of_buckets_that_cannot_be_are_counted(bound: str) -> None:
    line = f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{bound}",model_name="m"}} 1\n'.encode()
    assert page(line + HONEST, "p").bad_lines == page(HONEST, "p").bad_lines + 1


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/diagnosis"])
def test_absurd_numbers_of_requests_leave_page_and_json_in_place(path: str) -> None:
    absurd = HONEST.replace(b"vllm:num_requests_", b"x_") + b"".join(
        b'vllm:num_requests_%b{engine="0",model_name="m"} 1.7e308\n' % name for name in (b"running", b"waiting")
    )
    state = Pipeline().observe(Snapshot(T, pages=(page(HONEST, "good"), page(absurd, "bad"))))
    assert b"good" in answer(state, path)


ENTRIES = {
    "containers": {"namespace": "n", "pod": "p", "container": "c"},
    "gpus": {"uuid": "GPU-1"},
    "allocator": {"namespace": "n", "pod": "p", "rank": 0},
    "steps": {"namespace": "n", "pod": "p", "engine": "0", "started": 1.0, "written": 2.0, "steps": 1, "decoded": 1},
}


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ("containers", "restarts"),
        ("containers", "cpu_usage_seconds"),
        ("containers", "memory_limit_bytes"),
        ("gpus", "memory_used_bytes"),
        ("gpus", "power_watts"),
        ("gpus", "utilization_ratio"),
        ("gpus", "index"),
        ("allocator", "allocated_bytes"),
        ("steps", "steps"),
        ("steps", "decoded"),
        ("steps", "kv_max"),
    ],
)
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**30, -1])
def test_a_tick_of_a_recording_with_a_number_that_cannot_be_is_one_clear_line(
    tmp_path: Path,
    entry: str,
    field: str,
    value: int,
) -> None:
    ticks = [{"t": T}, {"t": T + 1, entry: [{**ENTRIES[entry], field: value}]}, {"t": T + 2}]
    path = tmp_path / "one.jsonl"
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in ({"format": "kvpressure-recording", "version": 1}, *ticks))
    )
    problems: list[ReadProblem] = []
    with Reader(path, on_problem=problems.append) as reader:
        pipeline = Pipeline()
        states = [pipeline.observe(snapshot) for snapshot in reader]
    assert [state.time for state in states] == [T, T + 2]
    assert [problem.line for problem in problems] == [3]
    assert field in problems[0].text
    assert len(problems[0].text) < 200
