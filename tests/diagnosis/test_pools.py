"""Servers of one model that do different jobs, or the same job unlike each other."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final

import pytest

from kvpressure.advice.mitigation import cause, explained, plan
from kvpressure.advice.plan import pressure_plan
from kvpressure.diagnosis import diagnose
from kvpressure.diagnosis.diagnose import compared
from kvpressure.model.pools import ARGS, LABEL, EnginePool
from kvpressure.model.state import ALONE_FULL, ALONE_SLOW, OTHER_HAS_ROOM, OTHER_IS_FULL, Imbalance, State
from kvpressure.publish.diagnosis_json import engine_entry
from kvpressure.publish.page.view import ViewContext
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox.exporter_document import engine_views
from tests.diagnosis.servers import LIMIT, Pod, after, cycle, play_pods

pytestmark = pytest.mark.slow

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


PREFILLS: Final[dict[str, Any]] = {
    "running": cycle(0, 1),
    "waiting": 0,
    "kv": 0.02,
    "generated": 2,
    "prompt": 1600,
    "finished": 2,
    "inference": 0.2,
    "length": 800,
    "output": 1,
}
LIGHT: Final[dict[str, Any]] = {"running": cycle(2, 3), "waiting": 0, "kv": 0.03, "generated": 80, "finished": 0.4}


def on(side: str, source: str = LABEL) -> EnginePool:
    return EnginePool(f"chat-{side}", side, source, pair="chat")


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


def test_a_full_decode_beside_an_idle_prefill_is_one_finding_of_the_pair() -> None:
    """Six prefill servers at 2 %, two decode servers at 99 % with 80 requests waiting."""
    pods = {f"d-{n}": Pod(on("decode"), [FULL], BOTH) for n in range(2)}
    found = play_pods(90, pods | {f"p-{n}": Pod(on("prefill"), [PREFILLS], BOTH) for n in range(6)})
    for (pod, _), engine in found.items():
        wanted = Imbalance(OTHER_HAS_ROOM, "prefill", 6, 6) if pod.startswith("d") else None
        assert engine.imbalance == wanted
    full = found["d-0", "0"]
    assert cause(full).endswith("; prefill has spare capacity")
    first = plan(full, T).actions[0]
    assert first.title == "Add decode replicas"
    assert "6 of the 6 prefill engines seen here could take more" in first.text
    assert plan(found["p-0", "0"], T).actions == ()
    (read,) = engine_views({"engines": [engine_entry(full, State(0.0, engines=(full,)), ViewContext())]})
    assert cause(read.engine) == cause(full)
    steps = pressure_plan(read.plan_input, T, ()).steps  # as mitigate --exporter prints it
    assert steps[0].title == "Add decode replicas"
    assert not [step for step in steps if "num" in step.title]


def test_a_decode_server_whose_blocks_are_late_lacks_no_replica() -> None:
    """Requests on their way hold their blocks: the cache is full of what has not arrived."""
    late = {"running": 2, "waiting": 60, "deferred": 20, "kv": 0.98, "generated": 40, "finished": 0.2}
    pods = {"d-0": Pod(on("decode"), [late], BOTH), "p-0": Pod(on("prefill"), [PREFILLS], BOTH)}
    engine = play_pods(90, pods)["d-0", "0"]
    assert engine.imbalance is None
    assert "Add decode replicas" not in [action.title for action in plan(engine, T).actions]


@pytest.mark.parametrize("other", [EnginePool("x"), EnginePool("test-prefill", "prefill", pair="test")])
def test_a_pool_without_a_role_or_of_another_deployment_is_no_other_side(other: EnginePool) -> None:
    found = play_pods(60, {"d-0": Pod(on("decode"), [FULL], BOTH), "x-0": Pod(other, [PREFILLS])})
    assert {engine.imbalance for engine in found.values()} == {None}


@pytest.mark.parametrize("others", [LIGHT, {"running": 0, "waiting": 0, "kv": 0.0, "generated": 0, "finished": 0}])
def test_thread_9_names_the_rank_that_has_the_queue(others: dict[str, Any]) -> None:
    """vllm-project/vllm#36748, rebuilt: rank 0 at 100 % of its KV cache with 117 waiting, the others (nearly) idle.

    Labelled before the rule: KV pressure of rank 0 alone; the balance of the ranks is the cause, KV memory no remedy.
    """
    rank_0 = FULL | {"running": cycle(60, 62), "waiting": 117, "kv": 1.0, "generated": 900, "finished": 2}
    found = play_pods(90, {"dp-0": Pod(EnginePool("dp"), [rank_0, *[others] * 7])})
    assert [rank for (_, rank), engine in found.items() if engine.imbalance] == ["0"]
    engine = found["dp-0", "0"]
    assert engine.imbalance == Imbalance(ALONE_FULL, "", 7, 8)
    first = explained(engine, T)
    assert engine.diagnosis.verdict == "kv_pressure"
    assert first.cause.endswith("most engines of its pool have spare capacity")
    assert first.action == "Spread the requests over the pool"


@pytest.mark.parametrize(
    ("decode", "kind", "action"),
    [(FULL, OTHER_IS_FULL, "Add decode replicas"), (LIGHT, OTHER_HAS_ROOM, "Add prefill replicas")],
)
def test_thread_11_looks_at_decode_before_prefill_is_scaled(decode: dict[str, Any], kind: str, action: str) -> None:
    """llm-d-autoscaling#662 and #1325, rebuilt: prefill at 32 % of its KV cache while its queue grows.

    Labelled before the rule: prefill's KV usage is no sign; while decode is full, decode replicas are the remedy.
    """
    waits = {"running": 4, "waiting": lambda s: 2.0 + s // 2, "kv": 0.32, "queue": lambda s: 0.3 * s, "inference": 0.8}
    prefill = PREFILLS | waits | {"prompt": 9000, "finished": 5, "length": 1800}
    pods = {f"p-{n}": Pod(on("prefill"), [prefill], BOTH) for n in range(2)}
    found = play_pods(120, pods | {"d-0": Pod(on("decode"), [decode], BOTH)})
    engine = found["p-1", "0"]
    assert engine.diagnosis.verdict != "kv_pressure"
    assert engine.imbalance == Imbalance(kind, "decode", 1, 1)
    assert plan(engine, T).actions[0].title == action
    assert found["d-0", "0"].imbalance is None


def test_one_replica_that_is_ten_times_slower_than_the_others_is_named() -> None:
    slow = LIGHT | {"token": after(300, 0.025, 0.25), "generated": after(300, 80.0, 8.0)}
    found = play_pods(480, {f"r-{n}": Pod(EnginePool("r"), [slow if n == 2 else LIGHT]) for n in range(4)})
    assert {pod: engine.imbalance for (pod, _), engine in found.items() if engine.imbalance} == {
        "r-2": Imbalance(ALONE_SLOW, "", 3, 4)
    }
    assert plan(found["r-2", "0"], T).actions[0].title == "Send the requests to the other engines"


def test_a_pool_is_compared_once_for_all_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    full = play_pods(90, {"d-0": Pod(on("decode"), [FULL], BOTH)})["d-0", "0"]
    looked: list[int] = []
    alike = diagnose._alike
    monkeypatch.setattr(diagnose, "_alike", lambda engines, *what: looked.append(len(engines)) or alike(engines, *what))
    pool = tuple(replace(full, key=replace(full.key, pod=f"d-{number}")) for number in range(64))
    assert {engine.imbalance for engine in compared(pool, T)} == {None}
    assert sum(looked) <= 6 * len(pool)
