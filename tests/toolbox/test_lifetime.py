"""Request shape since the start, where a short watch sees no request finish."""

from __future__ import annotations

import gzip

import pytest

from kvpressure.publish.pressure import caps_for
from kvpressure.readings import EngineReading, Histogram
from kvpressure.sources.vllm import page_from_text
from kvpressure.toolbox.lifetime import since_start
from kvpressure.toolbox.triage import triage
from kvpressure.toolbox.view import EngineView
from toolbox.conftest import FIXTURES


def test_a_real_page_tells_its_usual_requests() -> None:
    text = gzip.decompress((FIXTURES / "vllm/c_steady.prom.gz").read_bytes())
    found = since_start(page_from_text(text, target="t", time=0.0).engines[0])
    for name in ("prompt", "output", "max_tokens"):
        assert 0 < found[f"{name}_quantiles:0.5"] <= found[f"{name}_quantiles:0.95"]
    assert found["context_mean"] == pytest.approx(found["prompt_mean"] + found["output_mean"])


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
    assert not any(name.startswith("prompt_quantiles") for name in found)
    assert since_start(None) == {}


def test_caps_and_triage_use_it_only_where_the_window_is_empty() -> None:
    usual = {"prompt_quantiles:0.95": 500.0, "output_quantiles:0.95": 100.0}
    step = [{"number": 5, "question": "?", "finding": "unknown", "answers": [], "command": ""}]
    engine = EngineView({"since_start": usual, "triage": step}, {})
    assert (caps_for(engine).input_tokens, caps_for(engine).output_tokens, caps_for(engine).known) == (512, 128, True)
    assert "prompts 500, answers 100" in triage(engine)[0].answers[0]
    now = EngineView(
        {
            "since_start": usual,
            "signals": {"prompt_quantiles:0.95": 2000.0, "output_quantiles:0.95": 10.0},
            "triage": step,
        },
        {},
    )
    assert caps_for(now).input_tokens == 2048
    assert triage(now)[0].answers == ()


def test_example_caps_stay_within_the_context() -> None:
    engine = EngineView({"limits": {"max_model_len": {"value": 2048}}}, {})
    caps = caps_for(engine)
    assert (caps.input_tokens, caps.output_tokens, caps.known) == (1024, 512, False)
