"""Golden ``/metrics`` of recorded scrapes, every value of them.

They are replayed on a fixed clock, one scrape a second, so every value is compared. ``UPDATE_GOLDEN=1 pytest
tests/e2e/test_golden_pages.py`` rewrites them: read the difference before you commit it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvpressure.model.readings import Snapshot, SourceHealth
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import Encoder
from kvpressure.publish.metrics import METRICS
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers.vllm_pages import to_openmetrics

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
REWRITE = "UPDATE_GOLDEN=1 rewrites it: read the difference"
PAGES = 90  # a minute and a half: past the windows of a minute, and past the first minute after a start
START = 1_700_000_000.0  # Unix seconds of the first scrape
TARGET = "inference/vllm-0=http://127.0.0.1:8000/metrics;container=vllm;args=--max-num-seqs 64"

SCENARIOS = {
    "idle": ("vllm-cpu/a_idle", 0),
    "healthy": ("vllm-cpu/c_steady", 4),
    "kv_pressure": ("vllm-cpu/d_kv_pressure", 20),
    "two_api_servers": ("vllm-cpu/k_api_server_count2", 0),
    "two_engines_one_page": ("vllm-cpu/l_dp2", 0),
    "v0_names": ("h100/llama-2-7b-046", 20),
    "openmetrics": ("vllm-cpu/d_kv_pressure", 20),
}


def recorded_pages(name: str) -> list[str]:
    """The pages of a recording of one target, in order."""
    with gzip.open(TESTS / f"fixtures/recordings/{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        next(lines)
        return [text for line in lines if (text := json.loads(line)["engines"][0]["exposition"])]


def scenario(name: str) -> list[str]:
    recording, first = SCENARIOS[name]
    pages = recorded_pages(recording)[first : first + PAGES]
    return [to_openmetrics(page) for page in pages] if name == "openmetrics" else pages


def samples(page: str) -> list[str]:
    """The samples of ``page``, ordered. Only what differs between machines is left out: versions."""
    lines = [line for line in page.splitlines() if line.startswith("kvpressure_")]
    return sorted(
        re.sub(r'(version|python)="[\d.]+"', r'\1="*"', line) if "build_info" in line else line for line in lines
    )


def replayed(pages: Iterable[str]) -> list[str]:
    """What is published after the last of ``pages``, scraped once a second by a pipeline without a process."""
    target, pipeline = parse_target(TARGET), Pipeline()
    for second, text in enumerate(pages):
        now = START + second
        scrape = parse_scrape(
            text,
            target=target.name,
            time=now,
            namespace=target.namespace,
            pod=target.pod,
            container=target.container,
            args=target.args,
            duration_seconds=0.004,
        )
        health = SourceHealth("engines", up=True, last_success=now, duration_seconds=0.005)
        state = pipeline.observe(Snapshot(now, pages=(scrape,), targets=(target.name,), health={"engines": health}))
    return samples(Encoder().encode(families(state).collect(), openmetrics=False).decode())


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_golden_page(name: str) -> None:
    found = replayed(scenario(name))
    path = GOLDEN / f"{name}.metrics"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(found) + "\n")
    assert found == path.read_text().splitlines(), REWRITE


def test_both_dialects_give_the_same_page():
    """Same server, classic text or OpenMetrics: the same series and the same exact values."""
    assert (GOLDEN / "openmetrics.metrics").read_text() == (GOLDEN / "kv_pressure.metrics").read_text()


def test_metric_names_are_frozen():
    """A rename or a removal is a change of the contract: it keeps the old name for a release and edits this file."""
    path = GOLDEN / "metric_names.txt"
    names = sorted(f"{metric.full_name} {metric.kind} {','.join(metric.labels)}" for metric in METRICS)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(names) + "\n")
    assert names == path.read_text().splitlines(), REWRITE
