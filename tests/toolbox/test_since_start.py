"""Request shape since the start, where a short watch sees no request finish."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from kvpressure.advice.limits import PlanInput, caps_for
from kvpressure.advice.plan import pressure_plan
from kvpressure.advice.triage import TriageStep
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import ContextSignals
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.since_start import since_start
from kvpressure.toolbox.triage import triage
from tests.helpers.stated_engine import StatedEngine, engine_from
from tests.toolbox.conftest import FIXTURES


def test_a_real_page_tells_its_usual_requests() -> None:
    text = gzip.decompress((FIXTURES / "vllm/c_steady.prom.gz").read_bytes())
    found = since_start(parse_scrape(text, target="t", time=0.0).engines[0])
    for name in ("prompt", "output", "max_tokens"):
        quantiles = getattr(found, f"{name}_quantiles")
        assert 0 < quantiles["0.5"] <= quantiles["0.95"]
    assert found.prompt_mean is not None
    assert found.output_mean is not None
    assert found.context_mean == pytest.approx(found.prompt_mean + found.output_mean)


@pytest.mark.parametrize(
    "histogram",
    [
        Histogram(sum=5.0, count=0.0),
        Histogram(bounds=(1.0, float("inf")), counts=(0.0,), count=1.0),
        Histogram(bounds=(1.0, float("inf")), counts=(0.0, 0.0), count=None),
    ],
)
def test_a_histogram_without_content_tells_nothing(histogram: Histogram) -> None:
    found = since_start(EngineReading("m", "0", histograms={"request_prompt_tokens": histogram}))
    assert found.prompt_quantiles == {}
    assert since_start(None) == ContextSignals()


def test_caps_and_triage_use_it_only_where_the_window_is_empty() -> None:
    usual = ContextSignals(prompt_quantiles={"0.95": 500.0}, output_quantiles={"0.95": 100.0})
    steps = (TriageStep(5, "?", "unknown", (), ""),)
    engine = EngineView(engine_from(StatedEngine("kv_pressure"), builtin()).engine, triage=steps, usual=usual)
    caps = caps_for(engine.plan_input)
    assert (caps.input_tokens, caps.output_tokens, caps.known) == (512, 128, True)
    assert "prompts 500, outputs 100" in triage(engine)[0].answers[0]
    seen = StatedEngine("kv_pressure", prompt_tokens=2000.0, output_tokens=10.0)
    now = EngineView(engine_from(seen, builtin()).engine, triage=steps, usual=usual)
    assert caps_for(now.plan_input).input_tokens == 2048
    assert triage(now)[0].answers == ()


SPREAD = ContextSignals(
    prompt_quantiles={"0.5": 300.0, "0.95": 390.0, "0.99": 398.0},
    output_quantiles={"0.5": 450.0, "0.95": 585.0, "0.99": 597.0},
    max_tokens_quantiles={"0.5": 450.0, "0.95": 585.0, "0.99": 597.0},
)


def test_max_tokens_that_most_requests_exceed_are_lowered_and_not_rejected() -> None:
    asked = replace(SPREAD, max_tokens_quantiles={"0.5": 2048.0, "0.95": 4096.0, "0.99": 4096.0})
    engine = engine_from(StatedEngine("kv_pressure", running=12.0, capacity_tokens=8000.0), builtin()).engine
    for context, text in ((asked, "too many to reject"), (SPREAD, "(HTTP 400)")):
        found = replace(engine, signals=replace(engine.signals, context=context))
        assert text in pressure_plan(PlanInput(found), builtin(), "").steps[0].text
