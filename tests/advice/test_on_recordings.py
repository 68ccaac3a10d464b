"""What the plan says of requests and batches, held against what real servers counted."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kvpressure.advice.limits import MAX_REJECTED, PlanInput, caps_for
from kvpressure.advice.mitigation import explained
from kvpressure.model import readings as r
from kvpressure.model.readings import Histogram
from kvpressure.model.state import EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.signals.window import FIVE_MINUTES
from tests.recording.test_incident_recordings import RECORDINGS

pytestmark = pytest.mark.slow
T = builtin()

PRESSED = ("vllm-cpu/d_kv_pressure", "vllm-cpu-fresh/long-outputs", "vllm-cpu-fresh/ngram", "vllm-cpu-fresh/agents")


def states(name: str) -> Iterator[tuple[EngineState, list[Histogram], list[Histogram]]]:
    """Each tick's engine, and the histograms of prompt and output lengths as the page had them so far."""
    prompts: list[Histogram] = []
    outputs: list[Histogram] = []
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        pipeline, begin = Pipeline(), None
        for snapshot in reader:
            begin = snapshot.time if begin is None else begin
            engine = pipeline.observe(snapshot).engines[0]
            for reading in (one for page in snapshot.pages for one in page.engines[:1]):
                if snapshot.time - begin <= FIVE_MINUTES:  # later the window no longer begins with the recording
                    prompts.append(reading.histograms[r.REQUEST_PROMPT])
                    outputs.append(reading.histograms[r.REQUEST_OUTPUT])
            if snapshot.time - begin <= FIVE_MINUTES:
                yield engine, prompts, outputs


def shares_above(counted: list[Histogram], cap: float) -> tuple[float, float]:
    """Least and largest share of the requests that were longer than ``cap``, by the buckets alone."""
    first, last = counted[0], counted[-1]
    grown = [b - a for a, b in zip(first.counts, last.counts, strict=True)]
    surely = grown[-1] - min(grown[i] for i, bound in enumerate(last.bounds) if bound >= cap)
    maybe = grown[-1] - max((grown[i] for i, bound in enumerate(last.bounds) if bound <= cap), default=0.0)
    return surely / grown[-1], maybe / grown[-1]


@pytest.mark.parametrize("name", PRESSED)
def test_caps_refuse_the_share_that_they_state_and_no_more_than_is_asked(name: str) -> None:
    checked = 0
    for engine, prompts, outputs in states(name):
        finished = prompts[-1].count - prompts[0].count
        caps = caps_for(PlanInput(engine))
        if not caps.known or finished < 20:
            continue
        checked += 1
        assert (caps.long_prompts or 0.0) + (caps.long_outputs or 0.0) <= MAX_REJECTED + 0.001
        for counted, cap, stated in (
            (prompts, caps.input_tokens, caps.long_prompts),
            (outputs, caps.output_tokens, caps.long_outputs),
        ):
            surely, _ = shares_above(counted, cap)
            assert surely <= stated + 0.001, f"{name}: {surely:.3f} of the requests are above {cap}, stated {stated}"
    assert checked >= 10


@pytest.mark.parametrize("name", [*PRESSED, "incidents-fresh/FHNG13", "incidents-fresh/FCPU1"])
def test_what_alerts_say_of_an_engine_has_few_forms_and_no_measured_number(name: str) -> None:
    """It is a label: each new text is a new series."""
    said = set()
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        pipeline = Pipeline()
        for number, snapshot in enumerate(reader):
            engine = pipeline.observe(snapshot).engines[0]
            if number % 5 == 0:
                said.add(explained(engine, T))
    assert 1 < len(said) < 12
    for one in said:
        assert len(one.cause) <= 120
        assert len(one.action) <= 80
        fixed = re.sub(r" \(--[^)]*\)$", "", one.action)  # its argument is as steady as the verdict
        assert not re.search(r"\d", one.cause + fixed.replace("to 0.7, then 0.6", ""))
