"""The served page has the structure of a page captured from a live vLLM 0.32.0."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lab.demo.model import LLAMA_2_13B
from lab.demo.page import Page
from lab.demo.requests import EngineConfig, SimulatedRequest
from lab.demo.simulator import SimulatedEngine

CAPTURE = Path(__file__).parents[3] / "tests" / "fixtures" / "vllm" / "versions" / "live_0.32.0.prom.gz"
START = 1_700_000_000.0

Shape = dict[str, tuple[str, frozenset[tuple[str, frozenset[str], str]]]]


def captured() -> str:
    return gzip.decompress(CAPTURE.read_bytes()).decode()


def simulated() -> str:
    """A server with the capture's context length that has served one request."""
    config = EngineConfig(LLAMA_2_13B, "tiny", max_model_len=2048)
    engine = SimulatedEngine(config, START)
    engine.submit(SimulatedRequest(START + 1, 100, 50, 64))
    engine.advance(START + 30)
    return Page(engine, START).render()


def shape(text: str, prefix: str) -> Shape:
    """Family -> type and the samples' names, label names and bucket bounds."""
    return {
        family.name: (
            family.type,
            frozenset(
                (sample.name, frozenset(sample.labels), sample.labels.get("le", "")) for sample in family.samples
            ),
        )
        for family in text_string_to_metric_families(text)
        if family.name.startswith(prefix)
    }


def test_vllm_families_types_labels_and_bounds_equal_the_captured_ones() -> None:
    assert shape(simulated(), "vllm:") == shape(captured(), "vllm:")


def test_help_type_and_order_of_the_vllm_lines_equal_the_captured_ones() -> None:
    def lines(text: str) -> list[str]:
        return [
            re.sub(r'="[^"]*"', "", line).rsplit(" ", 1)[0] if line[0] != "#" else line
            for line in text.splitlines()
            if "vllm:" in line
        ]

    assert lines(simulated()) == lines(captured())


def test_values_are_those_of_the_engine() -> None:
    samples = {
        (s.name, s.labels.get("le")): s.value
        for family in text_string_to_metric_families(simulated())
        for s in family.samples
    }
    assert samples["vllm:prompt_tokens_total", None] == 100
    assert samples["vllm:generation_tokens_total", None] == 50
    assert samples["vllm:inter_token_latency_seconds_count", None] == 49
    assert samples["vllm:inter_token_latency_seconds_bucket", "+Inf"] == 49
    assert samples["vllm:inter_token_latency_seconds_bucket", "0.01"] == 0
    assert samples["vllm:request_success_created", None] == START
