"""Scenes of a KV tier (``fixtures/pages-2026/tiers.yaml``), labelled before the rules: findings as the labels say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.advice.mitigation import plan
from kvpressure.engines.registry import dialect
from kvpressure.model import readings as r
from kvpressure.model.arguments import GIB
from kvpressure.model.readings import EngineReading, Scrape, Snapshot
from kvpressure.model.signals import TierSignals
from kvpressure.model.state import EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.diagnosis.test_transfers import STEP, between

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "fixtures/pages-2026"
SCENES = yaml.safe_load((FOLDER / "tiers.yaml").read_text())
START = 1_800_000_000.0
WORDS = {"true": True, "false": False, "unknown": None, True: True, False: False}
BUSY = {  # what a server shows that decodes and lets nobody wait
    "vllm": (
        "vllm:num_requests_running{L} 4\nvllm:num_requests_waiting{L} 0\nvllm:kv_cache_usage_perc{L} 0.6\n"
        "vllm:generation_tokens_total{L} %d\nvllm:prompt_tokens_total{L} %d\n"
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="20480",engine="0"} 1\n'
    ),
    "sglang": (
        "sglang:num_running_reqs{L} 4\nsglang:num_queue_reqs{L} 0\nsglang:token_usage{L} 0.6\n"
        "sglang:generation_tokens_total{L} %d\nsglang:prompt_tokens_total{L} %d\n"
    ),
}
LABELS = {
    "vllm": 'engine="0",model_name="m"',
    "sglang": 'engine_type="unified",model_name="m",pp_rank="0",tp_rank="0",moe_ep_rank="0"',
}


def page_of(scene: Mapping[str, Any], end: str, second: int) -> Scrape:
    """The server's page at one end of the scene, that second of it: a file, or what a busy server shows and these."""
    if isinstance(scene[end], str):
        text = (FOLDER / scene[end]).read_text()
    else:
        server, own = scene["server"], LABELS[scene["server"]]
        text = BUSY[server].replace("{L}", f"{{{own}}}") % (100 * second, 1000 * second)
        text += "".join(
            f"{server}:{name.rstrip('}')}{',' if '{' in name else '{'}{own}}} {value}\n"
            for name, value in scene[end].items()
        )
    args = tuple(scene.get("args", ()))
    return parse_scrape(text, target="t", time=START, namespace="n", pod="p", container="c", args=args)


@cache
def judged(number: int) -> EngineState:
    scene, pipeline = SCENES[number], Pipeline()
    last = page_of(scene, "to", scene["seconds"])
    (after,) = last.engines
    before = page_of(scene, "from", 0).engines[0] if scene["from"] else EngineReading(after.model_name, after.engine)
    for second in range(0, scene["seconds"] + 1, STEP):
        now = replace(last, time=START + second, engines=(between(before, after, second / scene["seconds"]),))
        state = pipeline.observe(Snapshot(now.time, pages=(now,), targets=("t",)))
    (engine,) = state.engines
    return engine


every_scene = pytest.mark.parametrize("number", range(len(SCENES)), ids=[scene["id"] for scene in SCENES])


@every_scene
def test_a_scene_gives_what_its_label_says(number: int) -> None:
    scene, diagnosis = SCENES[number], judged(number).diagnosis
    expected = {name: WORDS[value] for name, value in scene["findings"].items()}
    assert {name: diagnosis.holds(name) for name in expected} == expected
    assert diagnosis.verdict in scene["verdicts"]


@every_scene
def test_the_plan_names_the_remedy_of_a_tier_that_is_of_no_use(number: int) -> None:
    engine, remedy = judged(number), SCENES[number].get("remedy")
    words = dialect(engine.dialect).tier_flags
    told = [action.text for action in plan(engine, builtin()).actions if "KV tier" in action.title]
    assert ([words[remedy] in text for text in told] == [True]) if remedy else told == []


def test_pressure_without_a_tier_asks_for_one_of_twice_the_pool() -> None:
    pressed = judged(1)
    memory = replace(pressed.signals.memory, kv_pool_bytes=10 * GIB)
    for configured, title in ((False, "add a KV tier in host memory ("), (None, "memory, unless there is one (")):
        s = replace(pressed.signals, memory=memory, tier=TierSignals(tier_configured=configured))
        found = replace(pressed.diagnosis, beside={})
        without = replace(pressed, signals=s, gpus=("GPU-1", "GPU-2"), diagnosis=found)
        (action,) = (one for one in plan(without, builtin()).actions if "KV tier" in one.title)
        assert title in action.title
        assert action.text.startswith("--kv-offloading-size 40 keeps")
        assert not [
            one for one in plan(replace(without, version="0.13.0"), builtin()).actions if "KV tier" in one.title
        ]


def test_a_preemption_costs_what_is_computed_again_not_what_a_cache_has() -> None:
    scene = SCENES[1]
    before, after = (page_of(scene, end, 0).engines[0] for end in ("from", "to"))
    grown = {name: count - before.counters[name] for name, count in after.counters.items() if name in before.counters}
    output = after.histograms[r.REQUEST_OUTPUT].sum - before.histograms[r.REQUEST_OUTPUT].sum
    requests = after.histograms[r.REQUEST_OUTPUT].count - before.histograms[r.REQUEST_OUTPUT].count
    assert grown[r.PROMPT_TOKENS_COMPUTED] / grown[r.PROMPT_TOKENS] == pytest.approx(0.85, abs=0.01)
    again = (grown[r.PROMPT_TOKENS_COMPUTED] + output) / requests * grown[r.PREEMPTIONS] / scene["seconds"]
    assert judged(1).signals.kv.recomputed_tokens_rate == pytest.approx(again)
