"""The served page has the structure of a page captured from a live vLLM 0.32.0."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from lab.demo.model import LLAMA_2_13B
from lab.demo.page import Page
from lab.demo.requests import EngineConfig, SimulatedRequest
from lab.demo.simulator import SimulatedEngine

CAPTURE = Path(__file__).parents[3] / "tests" / "fixtures" / "vllm" / "versions" / "live_0.32.0.prom.gz"
START = 1_700_000_000.0


def shape(text: str) -> list[str]:
    """Lines of vLLM without the values of samples, and of labels other than the bound of a bucket."""
    named = (re.sub(r'\b(?!le=)(\w+)="[^"]*"', r"\1", line) for line in text.splitlines() if "vllm:" in line)
    return [line if line[0] == "#" else line.rpartition(" ")[0] for line in named]


def test_help_types_labels_bounds_and_order_equal_the_captured_ones() -> None:
    """Of a server with the capture's context length that has served one request."""
    engine = SimulatedEngine(EngineConfig(LLAMA_2_13B, "tiny", max_model_len=2048), START)
    engine.submit(SimulatedRequest(START + 1, 100, 50, 64))
    engine.advance(START + 30)
    assert shape(Page(engine, START).render()) == shape(gzip.decompress(CAPTURE.read_bytes()).decode())
