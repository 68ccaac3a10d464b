"""The published state: the result of one tick. Built once, swapped by one assignment, only rendered after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, overload

from kvpressure.model.frozen import frozen
from kvpressure.model.isolation import Failure
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import (
    ContainerReading,
    Discovered,
    EngineKey,
    EngineReading,
    GpuOwner,
    GpuReading,
    NodeCondition,
    SourceHealth,
)
from kvpressure.model.signals import Signals, Slow

VERDICTS: Final = (
    "idle",
    "healthy",
    "kv_pressure",
    "concurrency_limited",
    "compute_bound",
    "host_bound",
    "transfer_bound",
    "stalled",
    "unknown",
)
CALM: Final = ("healthy", "idle")
"""Verdicts with nothing to do."""
ACTIONABLE: Final = frozenset(VERDICTS) - {*CALM, "unknown"}
"""Verdicts that ask for action."""
STEP_TOKENS: Final = "step_tokens"
REUSE: Final = "reuse"
STAGES: Final = ("building", REUSE, "saturated", "thrashing", "failing", STEP_TOKENS)
"""Stages of KV pressure from mild to severe (reuse: blocks are evicted before they are wanted again), and which
limit a ``concurrency_limited`` engine has reached where it is not the one on running requests.
"""
HARMFUL_STAGES: Final = ("saturated", "thrashing", "failing")
"""Stages of KV pressure in which requests wait, are computed again or fail."""
SIGNATURE_CONDITIONS: Final = (
    "gpu_memory_high",
    "gpu_utilization_low",
    "batch_collapsed",
    "latency_rising",
    "throughput_flat",
)
LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len")


@dataclass(slots=True, eq=False)
class Found:
    """What was found about an engine: true, false or ``None`` for unknown, and its sentence, written when read. Equal
    if name, value and sentence are.
    """

    name: str
    value: bool | None
    sentence: str | Callable[[str], str]  # or what writes it, by the name

    @property
    def text(self) -> str:
        """The sentence."""
        return self.sentence if isinstance(self.sentence, str) else self.sentence(self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Found):
            return NotImplemented
        return (self.name, self.value, self.text) == (other.name, other.value, other.text)


class Sentences(Sequence[str]):
    """Sentences written only when read: a diagnosis is made every second and seldom read."""

    def __init__(self, write: Callable[[], tuple[str, ...]]) -> None:
        self._write = write

    @cached_property
    def _all(self) -> tuple[str, ...]:
        return self._write()

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)


@frozen
class Diagnosis:
    """The diagnosis of one engine.

    ``supporting`` and ``opposing``: sentences for and against the verdict. ``missing``: what is unknown; ``inputs``:
    those of them that a setting or a source can provide.
    ``beside``: the conditions with their sentences. ``published``: the findings that rules and dashboards read;
    ``documented``: the numbers that alerts with a documented threshold read.
    ``reasons``: the numbers behind it, by name (``diagnosis/finding.py``). ``since``: when the verdict began.
    ``held``: its row does not hold now, and no other verdict has been found for long enough.
    ``row``: of the rules, by table and name, that gave it. ``grade``: how reliable it is. ``runner_up``:
    another verdict about as likely.
    """

    verdict: str
    confidence: float
    stage: str | None
    since: float
    evidence: Mapping[str, Found] = field(default_factory=dict)
    supporting: Sequence[str] = ()
    opposing: Sequence[str] = ()
    missing: Sequence[str] = ()
    inputs: Sequence[str] = ()
    reasons: Mapping[str, float] = field(default_factory=dict)
    conditions: Mapping[str, bool | None] = field(default_factory=dict)
    published: Mapping[str, bool | None] = field(default_factory=dict)
    documented: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, Found] = field(default_factory=dict)
    documented_signature: Mapping[str, bool | None] = field(default_factory=dict)
    documented_signature_met: bool | None = None
    row: str = ""
    grade: str = "nothing"
    runner_up: str | None = None
    held: bool = False
    slow: Slow | None = None  # what users wait for; None = nothing is slow, or unknown
    signature_note: str = ""  # why signature and verdict differ, in words; empty when they agree

    def holds(self, name: str) -> bool | None:
        """The value of a finding of the evidence; ``None`` = unknown."""
        finding = self.evidence.get(name)
        return None if finding is None else finding.value


@frozen
class Limit:
    """A limit of an engine: value in force, whether it was set (None = unknown), where it was read (args, log, metrics
    or default), recommended value.
    """

    name: str
    value: float | None = None
    explicit: bool | None = None
    source: str | None = None
    recommended: float | None = None

    @property
    def known(self) -> float | None:
        """The value, unless it is a default that arguments which nobody sees may have changed."""
        return None if self.source == "default" and self.explicit is None else self.value


def limit_of(limits: Mapping[str, Limit], name: str) -> Limit:
    """The limit of this name; all its fields None when unknown."""
    return limits.get(name) or Limit(name)


@frozen
class Cause:
    """What an alert says of an engine, in fixed words: why, and what to do first with the argument to set."""

    cause: str
    action: str = ""


@frozen
class Objective:
    """Requests that met a service-level objective, and all that count, since the engine started. ``bound_seconds``:
    the histogram bound used; None where the objective is no latency.
    """

    name: str
    good: float
    total: float
    bound_seconds: float | None
    target: float


OTHER_HAS_ROOM: Final = "other side has room"
OTHER_IS_FULL: Final = "other side is full"
ALONE_FULL: Final = "alone full"
ALONE_SLOW: Final = "alone slow"
IMBALANCES: Final = (OTHER_HAS_ROOM, OTHER_IS_FULL, ALONE_FULL, ALONE_SLOW)


@frozen
class Imbalance:
    """How an engine differs from others that are seen with it: it is saturated, and most of ``side`` (prefill or
    decode, the other side of its pair) has spare capacity, or is saturated too; or it is saturated, or slow, and most
    of its own pool has spare capacity, or is not slow. ``alike`` of the ``seen`` engines are as said.
    """

    kind: str
    side: str
    alike: int
    seen: int


@frozen
class EngineState:
    """One engine as published. With ``up`` False it keeps its identity, without values."""

    key: EngineKey
    target: str
    container: str
    gpus: tuple[str, ...]
    up: bool
    error: str | None
    version: str | None
    flavour: str | None
    reading: EngineReading | None
    counters: Mapping[str, float]  # as on the page, never decreasing while the exporter runs
    signals: Signals
    diagnosis: Diagnosis
    limits: Mapping[str, Limit] = field(default_factory=dict)
    objectives: tuple[Objective, ...] = ()
    failure: Failure | None = None  # why it has no values although it was read
    dialect: str = ""  # the name of its inference server in ``engines.registry``; "" = unknown
    group: str = ""  # the pods that form it, which may be on other nodes too; "" = its own pod alone
    rival_label: str = ""  # in which the series of its page collide, where that is ``error``
    pool: EnginePool = EnginePool()
    imbalance: Imbalance | None = None  # None = as the others, or none is seen
    explain: Callable[[EngineState], Cause] | None = None  # asked for by a scrape, not in each tick

    def limit(self, name: str) -> Limit:
        """A limit; all fields None when unknown."""
        return limit_of(self.limits, name)

    def without_values(self, failure: Failure) -> EngineState:
        """The engine without values, because the exporter failed to render it."""
        now = self.signals.time
        return engine_without_values(
            self.key, self.target, self.container, self.gpus, self.group, self.pool, self.up, now, now, failure
        )


def engine_without_values(
    key: EngineKey,
    target: str,
    container: str,
    gpus: tuple[str, ...],
    group: str,
    pool: EnginePool,
    up: bool,
    time: float,
    since: float,
    failure: Failure,
) -> EngineState:
    """An engine on which the exporter failed: its identity, verdict unknown, and the reason; no values, not even
    earlier ones.
    """
    unknown = Diagnosis(
        "unknown",
        0.0,
        None,
        since,
        missing=(failure.text,),
        documented_signature=dict.fromkeys(SIGNATURE_CONDITIONS),
    )
    return EngineState(
        key,
        target,
        container,
        gpus,
        up,
        None,
        None,
        None,
        None,
        {},
        Signals(time=time),
        unknown,
        failure=failure,
        group=group,
        pool=pool,
    )


VANISHED: Final = "the pod is gone"
"""Reason of a pod that served until it was gone."""
REMOVED: Final = "the pod was removed while it was idle"
UNREADY: Final = "its readiness probe fails, and no request reaches it"


@frozen
class PodState:
    """A pod that serves engines. ``answers``: all its engines do, or one refuses; ``None`` = no reading says so, or it
    starts. ``starting``: for the first time, and within the time allowed. ``usual_start``: seconds that the longest of
    the last starts of its pool took here. ``answers_since``: first answer of its present run, None = it was not seen.
    ``reason``: why it is down, in words, "" = it is not. ``ever``: it has answered in some run.
    """

    namespace: str
    pod: str
    pool: EnginePool
    answers: bool | None = None
    starting: bool = False
    usual_start: float | None = None
    answers_since: float | None = None
    reason: str = ""
    ever: bool = False


@frozen
class OutOfMemory:
    """Memory that ran out, or is about to. ``what``: host, host_limit (nearly), sigkill, gpu, kv_blocks or load.
    ``lost``: requests were lost, because the container was killed, or an engine that served no longer answers.
    """

    what: str
    time: float
    lost: bool


@frozen
class ContainerState:
    """A container with its ratios over the last minute. ``model_name`` and ``pool``: of its engine, as far as known."""

    reading: ContainerReading
    cpu_throttled_ratio: float | None = None
    cpu_used_ratio: float | None = None
    memory_used_ratio: float | None = None
    log_events: Mapping[str, int] = field(default_factory=dict)
    out_of_memory: tuple[OutOfMemory, ...] = ()
    model_name: str = ""
    pool: EnginePool = EnginePool()
    failure: Failure | None = None

    def without_values(self, failure: Failure) -> ContainerState:
        """A container on which the exporter failed: its identity and the reason."""
        known = ContainerReading(self.reading.namespace, self.reading.pod, self.reading.container)
        return ContainerState(known, failure=failure)


@frozen
class TargetState:
    """Scrape health of one target. ``cut``: what limits left out of the last scrape, by limit."""

    target: str
    up: bool
    duration_seconds: float | None
    bad_lines: int
    errors: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)


NO_ENGINE: Final = ("", "", "", "")


@frozen
class GpuState:
    """A GPU as last read (readings of slower sources are held for their interval, never longer). ``floor_ratio``: share
    of memory in use outside KV pools. ``process_bytes``:
    memory of its processes by owning (namespace, pod); ("", "") = owned by no pod. ``engine``: namespace, pod,
    model and pool of an engine that is on it, or was lately; "" = there is none.
    """

    reading: GpuReading
    demand_ratio: float | None = None
    floor_ratio: float | None = None
    process_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    engine: tuple[str, str, str, str] = NO_ENGINE
    failure: Failure | None = None

    def without_values(self, failure: Failure) -> GpuState:
        """A GPU on which the exporter failed: its identity and the reason."""
        reading = self.reading
        known = GpuReading(
            reading.uuid,
            reading.index,
            reading.vendor,
            name=reading.name,
            driver=reading.driver,
            parent_uuid=reading.parent_uuid,
            error=reading.error,
        )
        return GpuState(known, engine=self.engine, failure=failure)


@frozen
class RecorderHealth(SourceHealth):
    """Health of the flight recorder. ``up`` None = nothing written yet; ``reason`` and ``errors``: of
    ``recording.recorder.REASONS``; ``dropped``: ticks that were not kept.
    """

    dropped: int = 0


@frozen
class State:
    """Everything that ``/metrics``, the triage page and the JSON show."""

    time: float
    engines: tuple[EngineState, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    owners: tuple[GpuOwner, ...] = ()
    containers: tuple[ContainerState, ...] = ()
    pods: tuple[PodState, ...] = ()
    targets: tuple[TargetState, ...] = ()
    node_conditions: tuple[NodeCondition, ...] = ()
    discovered: tuple[Discovered, ...] = ()
    health: Mapping[str, SourceHealth] = field(default_factory=dict)
    expected_gpus: Mapping[str, int] = field(default_factory=dict)
    ticks: int = 0
    lag_seconds: float = 0.0
    recorder: RecorderHealth | None = None  # None = no flight recorder is kept
    failures: Mapping[Failure, int] = field(default_factory=dict)  # of the pipeline since its start
    web_refused: Mapping[str, int] = field(default_factory=dict)  # by the web server since its start, by reason
