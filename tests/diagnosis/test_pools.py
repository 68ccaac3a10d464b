"""Servers of one model that do different jobs, or the same job unlike each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import pytest

from kvpressure.advice.mitigation import explained, plan
from kvpressure.model.pools import ARGS, LABEL, EnginePool
from kvpressure.settings.thresholds import builtin
from tests.diagnosis.servers import LIMIT, Pod, cycle, play_pods

T: Final = builtin()
BOTH: Final = (*LIMIT, "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')
FULL: Final[dict[str, Any]] = {
    "running": cycle(120, 122),
    "waiting": 40,
    "kv": 0.99,
    "generated": 1500,
    "finished": 4,
    "preemptions": 0.5,
    "queue": 20,
}


def on(side: str, source: str = LABEL) -> EnginePool:
    return EnginePool(f"chat-{side}", side, source)


@pytest.mark.parametrize("source", [LABEL, ARGS])
def test_a_full_decode_server_is_not_told_to_run_fewer_requests(source: str) -> None:
    """Its arguments say kv_both, as most do: a lower limit leaves the blocks of finished prompts with prefill."""
    engine = play_pods(90, {"d-0": Pod(on("decode", source), [FULL], BOTH)})["d-0", "0"]
    assert engine.diagnosis.verdict == "kv_pressure"
    said = plan(engine, T)
    assert said.actions[0].title == "Add decode replicas"
    assert explained(engine, T).action == said.actions[0].title
    text = str([asdict(action) for action in said.actions])
    assert "num_seqs" not in text
    assert "num-seqs" not in text
    assert engine.limit("max_num_seqs").recommended is None
    assert engine.limit("max_num_batched_tokens").recommended is None


def test_a_full_prefill_server_points_to_decode_which_fetches_its_blocks() -> None:
    engine = play_pods(90, {"p-0": Pod(on("prefill"), [FULL], BOTH)})["p-0", "0"]
    assert engine.diagnosis.verdict == "kv_pressure"
    assert engine.limit("max_num_seqs").recommended is None
    assert plan(engine, T).actions[0].title == "Check the decode pool first"
