"""Request shape since the start, where a short watch sees no request finish."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from kvpressure.advice.plan import Caps, PlanInput, caps_for, pressure_plan, share_above
from kvpressure.advice.triage import TriageStep
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import ContextSignals
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.since_start import since_start
from kvpressure.toolbox.stated_engine import StatedEngine, engine_from
from kvpressure.toolbox.triage import triage
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
        Histogram(),
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


def test_example_caps_stay_within_the_context() -> None:
    engine = engine_from(StatedEngine("kv_pressure", max_model_len=2048.0), builtin())
    caps = caps_for(engine.plan_input)
    assert (caps.input_tokens, caps.output_tokens, caps.known) == (1024, 512, False)


SPREAD = ContextSignals(
    prompt_quantiles={"0.5": 300.0, "0.95": 390.0, "0.99": 398.0},
    output_quantiles={"0.5": 450.0, "0.95": 585.0, "0.99": 597.0},
    max_tokens_quantiles={"0.5": 450.0, "0.95": 585.0, "0.99": 597.0},
)


def capped(share: float, context: ContextSignals = SPREAD, capacity: float = 8000.0) -> Caps:
    """Caps on an overloaded server, on which twelve such requests need more than the cache."""
    engine = engine_from(StatedEngine("kv_pressure", running=12.0, capacity_tokens=capacity), builtin()).engine
    engine = replace(engine, signals=replace(engine.signals, context=context))
    return caps_for(PlanInput(engine), share)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.6, 1.0])
def test_caps_refuse_no_more_than_is_asked_and_say_how_much(share: float) -> None:
    caps = capped(share)
    assert caps.rejected is not None
    assert caps.rejected <= max(share, 0.02) + 0.001, "beyond the p99 nothing is known"
    assert caps.rejected == pytest.approx(
        share_above(SPREAD.prompt_quantiles, caps.input_tokens)
        + share_above(SPREAD.output_quantiles, caps.output_tokens)
    )


def test_caps_are_lower_only_where_more_may_be_refused() -> None:
    sizes = [capped(share).input_tokens for share in (0.1, 0.3, 0.6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert capped(0.6, capacity=1e6).input_tokens == 512, "all of them fit"


@pytest.mark.parametrize(
    ("cap", "share"),
    [(0.0, 1.0), (150.0, 0.75), (300.0, 0.5), (345.0, 0.275), (390.0, 0.05), (394.0, 0.03), (500.0, 0.01)],
)
def test_the_share_above_a_cap_follows_the_quantiles(cap: float, share: float) -> None:
    assert share_above(SPREAD.prompt_quantiles, cap) == pytest.approx(share)


def test_max_tokens_that_most_requests_exceed_are_lowered_and_not_rejected() -> None:
    asked = replace(SPREAD, max_tokens_quantiles={"0.5": 2048.0, "0.95": 4096.0, "0.99": 4096.0})
    engine = engine_from(StatedEngine("kv_pressure", running=12.0, capacity_tokens=8000.0), builtin()).engine
    for context, text in ((asked, "too many to reject"), (SPREAD, "(HTTP 400)")):
        found = replace(engine, signals=replace(engine.signals, context=context))
        assert text in pressure_plan(PlanInput(found), builtin(), "").steps[0].text
