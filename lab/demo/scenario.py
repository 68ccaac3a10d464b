"""Incidents to watch: their pods, what happens when, and what should be seen.

Every scenario begins healthy, has one incident on one pod, is mitigated as in the guides, and ends healthy. Loads
follow from the step times; see their comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lab.demo.model import LLAMA_2_7B, LLAMA_2_13B, OPT_1_3B
from lab.demo.node import PodChange, PodSpec, SimulatedNode
from lab.demo.requests import EngineConfig
from lab.demo.traffic import TrafficLoad

CHAT: Final = "chat-13b-0"
CODE: Final = "code-7b-0"
MAIL: Final = "mail-1b3-0"

# About 36 requests decode at a time and hold 40 % of the cache.
CHAT_LOAD: Final = TrafficLoad(requests_per_second=6.0, prompt_tokens=300, output_tokens=170, max_tokens=1024)
# Code completion: long prompts, short answers; the GPU computes prompts a third of the time, 31 k tokens/s at most.
CODE_LOAD: Final = TrafficLoad(
    requests_per_second=4.0, prompt_tokens=2200, output_tokens=13, prompt_spread=0.4, max_tokens=256
)
# A small model with short requests: device memory is high and GPU utilization low, and all is well.
MAIL_LOAD: Final = TrafficLoad(requests_per_second=4.0, prompt_tokens=150, output_tokens=60, max_tokens=128)

# Clients beyond that get 503: a long incident must not collect requests without bound.
_QUEUE: Final = 2000

PODS: Final = (
    PodSpec(
        CHAT,
        EngineConfig(LLAMA_2_13B, "chat-13b", max_model_len=4096, max_num_seqs=128, max_num_queued_reqs=_QUEUE),
        CHAT_LOAD,
    ),
    PodSpec(
        CODE,
        EngineConfig(
            LLAMA_2_7B,
            "code-7b",
            max_model_len=16_384,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            max_num_queued_reqs=_QUEUE,
        ),
        CODE_LOAD,
    ),
    PodSpec(
        MAIL,
        EngineConfig(OPT_1_3B, "mail-1b3", max_model_len=2048, max_num_seqs=256, max_num_queued_reqs=_QUEUE),
        MAIL_LOAD,
    ),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a scenario: its share of the whole time, its text, and its changes."""

    name: str
    share: float
    text: str
    changes: Mapping[str, PodChange] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """``verdict``: what the exporter should publish about ``pod`` in the incident, with confidence if ``confident``;
    ``alerts``: those that should fire and resolve.
    """

    name: str
    title: str
    pod: str
    verdict: str
    alerts: tuple[str, ...]
    phases: tuple[Phase, ...]
    pods: tuple[PodSpec, ...] = PODS
    confident: bool = True

    def schedule(self, seconds: float) -> Iterator[tuple[float, Phase]]:
        """Each phase with its beginning, in seconds from the start of a run of ``seconds``."""
        begin = 0.0
        for phase in self.phases:
            yield begin, phase
            begin += phase.share * seconds


class ScenarioPlayer:
    """Plays a scenario on a node. ``advance`` applies the phases that are due."""

    def __init__(self, scenario: Scenario, node: SimulatedNode, start: float, seconds: float) -> None:
        self._node = node
        self._start = start
        self._due = list(scenario.schedule(seconds))

    def advance(self, now: float) -> list[Phase]:
        """The phases begun since the last call."""
        begun = []
        while self._due and self._start + self._due[0][0] <= now:
            offset, phase = self._due.pop(0)
            self._node.apply(phase.changes, self._start + offset)
            begun.append(phase)
        return begun


def _calm(text: str, share: float = 0.2) -> Phase:
    return Phase("healthy", share, text)


_HEAVY_CHAT_LOAD: Final = replace(CHAT_LOAD, prompt_tokens=600, output_tokens=450, max_tokens=2048)

_KV_PRESSURE: Final = Scenario(
    "kv_pressure",
    "outputs become three times as long, and the KV cache of chat-13b fills up",
    CHAT,
    "kv_pressure",
    ("InferenceKVCachePressure", "InferenceSlow"),
    (
        _calm("normal traffic; the chat model holds about 40 % of its KV cache", 0.12),
        Phase(
            "incident",
            0.48,
            "a client sends longer prompts and asks for longer answers: the same 6 requests/s now "
            "need more KV cache than there is, and --max-num-seqs 128 lets them in",
            {CHAT: PodChange(load=_HEAVY_CHAT_LOAD)},
        ),
        Phase(
            "mitigation",
            0.4,
            "limits: the gateway refuses prompts above 1 024 tokens and caps max_tokens at 96; the "
            "pod is rolled out with --max-num-seqs 32 (was 128) and --max-num-batched-tokens 4096 (was 8192)",
            {
                CHAT: PodChange(
                    load=replace(_HEAVY_CHAT_LOAD, max_tokens=96, prompt_limit=1024),
                    limits={"max_num_seqs": 32, "max_num_batched_tokens": 4096},
                )
            },
        ),
    ),
)

_SEQUENCE_LIMIT: Final = Scenario(
    "sequence_limit",
    "chat-13b runs with max_num_seqs 24 while traffic grows; the KV cache is not full",
    CHAT,
    "concurrency_limited",
    ("InferenceSlow",),
    (
        _calm("little traffic; a limit of 24 requests is enough", 0.14),
        Phase(
            "burst",
            0.05,
            "a burst: 20 requests/s, more than 24 requests at a time can serve",
            {CHAT: PodChange(load=replace(CHAT_LOAD, requests_per_second=20.0))},
        ),
        Phase(
            "incident",
            0.37,
            "6 requests/s remain: 36 would run at a time, 24 may, so the queue does not become shorter",
            {CHAT: PodChange(load=CHAT_LOAD)},
        ),
        Phase(
            "mitigation",
            0.44,
            "the pod is rolled out with --max-num-seqs 48, which fits into the KV cache",
            {CHAT: PodChange(limits={"max_num_seqs": 48})},
        ),
    ),
    (
        replace(
            PODS[0], engine=replace(PODS[0].engine, max_num_seqs=24), load=replace(CHAT_LOAD, requests_per_second=2.5)
        ),
        *PODS[1:],
    ),
)

_PREFILL: Final = Scenario(
    "prefill",
    "code-7b gets more prompt tokens than the GPU can compute",
    CODE,
    "compute_bound",
    ("InferenceConcurrencyNearLimit", "InferenceSlow"),
    (
        _calm("long prompts, short answers, at a third of what the GPU can compute", 0.12),
        Phase(
            "incident",
            0.43,
            "an indexer sends 12 requests/s with prompts of 4 000 tokens: more than the GPU computes",
            {CODE: PodChange(load=replace(CODE_LOAD, requests_per_second=12.0, prompt_tokens=4000))},
        ),
        Phase(
            "mitigation",
            0.45,
            "the indexer moves to a deployment of its own; the pod is restarted to drop the queue",
            {CODE: PodChange(load=CODE_LOAD, restart=True)},
        ),
    ),
    confident=False,  # no recording of a real server has shown a GPU that prefill saturates
)

_CPU_THROTTLING: Final = Scenario(
    "cpu_throttling",
    "the CPU limit of chat-13b is cut, and the GPU waits for the CPU",
    CHAT,
    "host_bound",
    ("InferenceSlow",),
    (
        _calm("light traffic", 0.1),
        Phase(
            "incident",
            0.41,
            "the pod is rolled out with a CPU limit of half a core: it is throttled in 85 % of all periods",
            {CHAT: PodChange(restart=True, cpu_limit_cores=0.5, throttled=0.85, host_factor=120.0)},
        ),
        Phase(
            "mitigation",
            0.49,
            "the pod is rolled out with 8 cores again",
            {CHAT: PodChange(restart=True, cpu_limit_cores=8.0, throttled=0.0, host_factor=1.0)},
        ),
    ),
    (replace(PODS[0], load=replace(CHAT_LOAD, requests_per_second=1.5)), *PODS[1:]),
    confident=False,  # nor a GPU that waits for a CPU that is short
)

_STALL: Final = Scenario(
    "stall",
    "the scheduler of chat-13b stops; every health check stays green",
    CHAT,
    "stalled",
    ("InferenceStalled",),
    (
        _calm("normal traffic"),
        Phase(
            "burst",
            0.03,
            "a burst: more requests than the 48 that may run",
            {CHAT: PodChange(load=replace(CHAT_LOAD, requests_per_second=20.0))},
        ),
        Phase(
            "incident",
            0.37,
            "the engine stops stepping with requests running; its gauges freeze, /health answers 200",
            {CHAT: PodChange(load=CHAT_LOAD, stalled=True)},
        ),
        Phase(
            "mitigation",
            0.4,
            "the pod is restarted",
            {CHAT: PodChange(load=replace(CHAT_LOAD, requests_per_second=4.0), restart=True)},
        ),
    ),
    (
        replace(
            PODS[0], engine=replace(PODS[0].engine, max_num_seqs=48), load=replace(CHAT_LOAD, requests_per_second=4.0)
        ),
        *PODS[1:],
    ),
)

SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario for scenario in (_KV_PRESSURE, _SEQUENCE_LIMIT, _PREFILL, _CPU_THROTTLING, _STALL)
}
