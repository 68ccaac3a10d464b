"""What triage says of the requests: a ratio never stands beside numbers whose ratio it is not."""

from __future__ import annotations

import re

import pytest

from kvpressure.advice.triage import steps
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from tests.recording.test_incident_recordings import RECORDINGS

pytestmark = pytest.mark.slow

DEMAND = r"demand ([\d. ]+) requests × ([\d. ]+) tokens, ([\d. ]+) × the KV capacity of ([\d ]+) tokens\.$"


@pytest.mark.parametrize("name", ["vllm-cpu/d_kv_pressure", "vllm-cpu-fresh/long-outputs", "vllm-cpu-fresh/agents"])
def test_numbers_on_the_line_of_a_ratio_multiply_to_it(name: str) -> None:
    pipeline, t, ratios = Pipeline(builtin()), builtin(), 0
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        for snapshot in reader:
            state = pipeline.observe(snapshot)
            engine = state.engines[0]
            demand = engine.signals.kv.kv_overcommit_ratio
            answers = next(step for step in steps(engine, state, t) if step.number == 5).answers
            for found in filter(None, (re.search(DEMAND, text) for text in answers)):
                ratios += 1
                assert demand is not None
                requests, length, ratio, capacity = (float(part.replace(" ", "")) for part in found.groups())
                assert ratio == pytest.approx(demand, rel=0.06, abs=0.006)
                assert ratio == pytest.approx(requests * length / capacity, rel=0.06, abs=0.006)
    assert ratios > 10


@pytest.mark.parametrize("name", ["incidents/KV01"])
def test_batch_and_latency_are_not_fine_while_a_queue_grows_and_latency_is_unknown(name: str) -> None:
    pipeline, t, seen = Pipeline(builtin()), builtin(), 0
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        for snapshot in reader:
            state = pipeline.observe(snapshot)
            engine = state.engines[0]
            found = steps(engine, state, t)[7]
            if (
                not (engine.signals.latency.ttft or engine.signals.latency.baseline_ratios)
                and engine.signals.load.waiting
            ):
                seen += 1
                long = engine.diagnosis.evidence["queue_short"].value is False
                assert found.finding in (("look", "bad") if long else ("look", "bad", "unknown")), engine.signals.load
            assert " mean 0 " not in " ".join(found.answers) or engine.signals.batch.batch_p95 == 0
    assert seen > 5
