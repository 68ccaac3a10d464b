"""The served page has the structure of a page captured from a live vLLM 0.32.0."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from lab.demo.model import LLAMA_2_13B
from lab.demo.number_format import number
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


def test_process_and_http_series_that_a_reader_uses_are_there() -> None:
    real, ours = shape(captured(), "process_"), shape(simulated(), "process_")
    assert ours == real
    for name in ("http_requests", "http_request_duration_seconds", "http_request_duration_highr_seconds"):
        assert shape(simulated(), name)[name] == shape(captured(), name)[name]


def test_states_labels_and_reasons_equal_the_captured_ones() -> None:
    def values(text: str, label: str) -> set[str]:
        return {
            sample.labels[label]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if label in sample.labels and sample.name.startswith("vllm:")
        }

    for label in ("reason", "finished_reason", "source", "sleep_state", "engine"):
        assert values(simulated(), label) == values(captured(), label), label


def test_cache_config_says_what_the_engine_holds() -> None:
    info = next(
        family for family in text_string_to_metric_families(simulated()) if family.name == "vllm:cache_config_info"
    ).samples[0]
    assert info.labels["num_gpu_blocks"] == "2651"
    assert info.labels["kv_cache_size_tokens"] == "42416"
    assert float(info.labels["kv_cache_max_concurrency"]) == pytest.approx(42416 / 2048)
    assert info.labels["gpu_memory_utilization"] == "0.9"


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


@pytest.mark.parametrize("value", [0, 1, 0.5, 1e-7, 123456.0, 1234567.0, 1.7e9, 1.23e15, float("inf"), float("-inf")])
def test_numbers_are_written_as_the_client_library_does(value: float) -> None:
    assert number(value) == floatToGoString(value)
