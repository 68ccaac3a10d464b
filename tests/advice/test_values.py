"""No advice is undone by the next, and values are as steady as what they follow from, on recordings of real servers."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import groupby

import pytest

from kvpressure.advice.limits import max_num_seqs, requests_that_fit, two_digits
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from tests.recording.test_incident_recordings import RECORDINGS

pytestmark = pytest.mark.slow

T = builtin()


def test_value_and_stage_of_a_steady_overload_are_steady() -> None:
    """150 preemptions a minute for five minutes: the value follows what becomes known, and then stands."""
    values: list[float | None] = []
    stages: list[str | None] = []
    with Reader(RECORDINGS / "h100/llama-2-7b-124.jsonl.gz") as reader:
        pipeline = Pipeline()
        for snapshot in reader:
            engine = pipeline.observe(snapshot).engines[0]
            if engine.diagnosis.verdict == "kv_pressure":
                values.append(engine.limit("max_num_seqs").recommended)
                stages.append(engine.diagnosis.stage)
    assert [name for name, _ in groupby(stages)] == ["saturated", "thrashing"]
    assert None not in values
    assert len(list(groupby(values))) <= 5
    assert all(value == two_digits(value) for value in values if value)


def pressed_or_limited() -> list[str]:
    """Recordings of real servers with a stretch that is labelled as KV pressure or a sequence limit."""
    names = set()
    for folder in ("vllm-cpu-edges", "vllm-cpu-2026", "vllm-cpu-fresh", "vllm-cpu-loads"):
        with (RECORDINGS / folder / "labels.csv").open() as file:
            for row in csv.DictReader(file):
                if (row.get("strict_verdict") or row["expected_verdict"]) in {"kv_pressure", "concurrency_limited"}:
                    names.add(f"{folder}/{row['recording']}")
    return sorted(names)


@pytest.mark.parametrize("name", pressed_or_limited())
def test_a_recommended_limit_asks_for_no_opposite_one(name: str) -> None:
    """What each request holds stays: a cut leaves nothing to raise, and a raise does not fill the cache."""
    with Reader(RECORDINGS / name) as reader:
        pipeline = Pipeline()
        for snapshot in reader:
            for engine in pipeline.observe(snapshot).engines:
                limit, s, fit = engine.limit("max_num_seqs"), engine.signals, requests_that_fit(engine.signals, T)
                if limit.recommended is None or limit.value is None or fit is None:
                    continue
                after = replace(s, load=replace(s.load, max_num_seqs=limit.recommended))
                if limit.recommended < limit.value:
                    assert max_num_seqs(after, "concurrency_limited", T) is None, (limit, fit)
                else:
                    used = limit.recommended / fit * (1 - T["max_num_seqs_cut_min_ratio"])
                    assert used < T["kv_full_ratio"], (limit, fit)


def test_the_first_value_stands_until_a_request_has_finished() -> None:
    """Running requests grow with every step, and what fits falls with them: 14, 12 and 10 within ten seconds."""
    values = set()
    with Reader(RECORDINGS / "vllm-cpu/d_kv_pressure.jsonl.gz") as reader:
        pipeline = Pipeline()
        for snapshot in reader:
            engine = pipeline.observe(snapshot).engines[0]
            if engine.signals.requests.requests_finished_per_second == 0:
                values.add(engine.limit("max_num_seqs").recommended)
    assert values == {None, 14.0}
