"""An engine without a verdict says what is known of it, and what to do first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.advice.mitigation import cause, plan
from kvpressure.engines.registry import recognise
from kvpressure.model.readings import Snapshot
from kvpressure.model.signals import Signals
from kvpressure.model.state import Diagnosis, EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.publish.states import full_engine

TOO_LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (2.2 GiB KV cache is needed,"
    " which is larger than the available KV cache memory (1.9 GiB). Based on the available memory, the estimated"
    " maximum model length is 56320. Try increasing `gpu_memory_utilization`"
)
TOO_FEW = "ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (300). Each decode request needs one"


def down(*lines: str) -> EngineState:
    """A vLLM that never started, whose log has these lines."""
    events: dict[str, int] = {}
    numbers: dict[str, float] = {}
    for line in lines:
        found = recognise(line, "vllm")
        assert found is not None, line
        events[found[1].event] = events.get(found[1].event, 0) + 1
        numbers = {**found[1].allocator} or numbers
    signals = Signals(0.0, events=events, events_known=True, oom=numbers)
    unknown = Diagnosis("unknown", 0.0, None, 1_700_000_000.0, row="No fresh metrics: scrape failed")
    return replace(full_engine(), up=False, error="refused", signals=signals, diagnosis=unknown)


@pytest.mark.parametrize(
    ("line", "flag", "numbers"),
    [
        (TOO_LONG, "--max-model-len 56320", ("2.2 GiB", "1.9 GiB", "56 320")),
        (TOO_FEW, "--max-num-seqs 300", ("300",)),
    ],
)
def test_a_failed_start_has_the_engines_own_numbers_and_the_flag(
    line: str, flag: str, numbers: tuple[str, ...]
) -> None:
    engine = down(line)
    assert "down since 2023-11-14 22:13:20 UTC (connection refused): start failed: " in cause(engine)
    first = plan(engine, builtin()).actions[0]
    assert first.flags == (flag,)
    assert all(number in first.text for number in numbers)


def test_what_ends_a_failure_is_said_also_while_the_engine_serves_again() -> None:
    failed = down("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    serving = replace(failed, up=True, error=None, diagnosis=replace(failed.diagnosis, verdict="healthy"))
    found = plan(serving, builtin())
    assert found.summary.startswith("Nothing to do for requests, but")
    assert found.actions_now[0] == plan(failed, builtin()).actions_now[0]


def test_series_that_collide_are_named_by_their_label() -> None:
    stages = [f'vllm:num_requests_running{{engine="0",model_name="q",stage="{stage}"}} 1' for stage in ("a", "b")]
    page = parse_scrape("\n".join(stages) + "\n", target="http://omni:8000/metrics", time=1_700_000_000.0)
    (engine,) = Pipeline().observe(Snapshot(page.time, pages=(page,), targets=(page.target,))).engines
    assert "(series collide in label stage, which is not known)" in cause(engine)


def test_a_log_without_a_failed_allocation_invents_none() -> None:
    engine = down()
    assert cause(engine) == "down since 2023-11-14 22:13:20 UTC (connection refused)"
    assert plan(engine, builtin()).actions[0].title == "Check that the pod is running"
