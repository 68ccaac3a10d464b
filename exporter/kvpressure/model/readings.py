"""What is read: frozen dataclasses that sources fill and signals consume.

Rules that hold for every field here:

* ``None`` (or a missing mapping key) means *unknown*. A failed or unsupported reading is never 0 and never the value
  from last time.
* Units are base units: bytes, seconds, watts; ratios run from 0 to 1; tokens and requests are counts.
* Times are Unix seconds as floats.

A "page" in names of the package is the text of one metrics endpoint at one scrape. Its values have canonical names
(the constants below); only the dialects in ``engines`` know the spellings of a server or version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Final, Self

from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import LogEvent
from kvpressure.model.pools import EnginePool

PageText = bytes | bytearray  # body of a metrics endpoint

# --- canonical names of what an engine page carries -------------------------------------------------------

# Gauges
RUNNING: Final = "running"  # requests in the scheduler's RUNNING list
WAITING: Final = "waiting"  # requests waiting, preempted and deferred ones included
SWAPPED: Final = "swapped"  # V0 only: sequence groups swapped to the CPU
WAITING_CAPACITY: Final = "waiting_capacity"  # waiting{reason="capacity"}
WAITING_DEFERRED: Final = "waiting_deferred"  # waiting{reason="deferred"}: LoRA, grammar, remote KV
KV_USAGE: Final = "kv_usage"  # ratio of KV blocks in use, evictable prefix blocks count as free
RUNNING_LIMIT: Final = "running_limit"  # most requests that run at once, where a gauge gives it
GENERATION_RATE: Final = "generation_rate"  # V0 <= 0.7 only: tokens per second as a gauge
PROMPT_RATE: Final = "prompt_rate"  # V0 <= 0.7 only
ASLEEP: Final = "asleep"  # 1 when sleep mode has offloaded the weights
KV_CAPACITY: Final = "kv_capacity_tokens"  # tokens that the KV cache holds, where a gauge gives it
TIER_PINNED: Final = "tier_pinned"  # share of the tier in host memory that transfers hold: no measure of how full it is
TIER_USED: Final = "tier_used"  # in the unit of its size, where content is counted
TIER_SIZE: Final = "tier_size"
LOADS: Final = (
    "loads"  # requests whose KV blocks are allocated and on their way, here or (SGLang's prefill) to the peer
)
LOADS_TO_START: Final = "loads_to_start"  # requests that wait to be loaded: for the peer, or for blocks
LOADS_KV: Final = "loads_kv_usage"  # ratio of KV that requests hold whose blocks are on their way
STEP_OUTPUT: Final = "step_output_tokens"  # accepted drafts of a request's step, and its own token; 0 = no speculation

# Counters
PREEMPTIONS: Final = "preemptions"
PROMPT_TOKENS: Final = "prompt_tokens"  # full prompt lengths, booked in one lump at the first token
PROMPT_TOKENS_COMPUTED: Final = "prompt_tokens_computed"  # prompt_tokens_by_source{source="local_compute"}
GENERATION_TOKENS: Final = "generation_tokens"
PREFIX_QUERIES: Final = "prefix_queries"
PREFIX_HITS: Final = "prefix_hits"
# By KV events, in tokens: of evicted blocks that were stored again, and of those that a cache of so many times the
# capacity would have kept; token-seconds from their store to the eviction, and from there to the next store
KV_SEEN: Final = "kv_seen"  # seconds in which the counters that follow could rise
KV_AGAIN: Final = "kv_again"
KV_GAIN_PREFIX: Final = "kv_gain:"  # + factor: "kv_gain:2"
KV_AGAIN_AGE: Final = "kv_again_age"
KV_AGAIN_GAP: Final = "kv_again_gap"
CACHED_PREFIX: Final = "cached:"  # + where prompt tokens were found: device, host, disk, p2p, ...
TIER_STORED_PREFIX: Final = "tier_stored:"  # + host, disk, ...: bytes, tokens or blocks (``engines.base.Tier``)
TIER_LOADED_PREFIX: Final = "tier_loaded:"
TIER_STORED: Final = TIER_STORED_PREFIX + "host"
TIER_LOADED: Final = TIER_LOADED_PREFIX + "host"
TIER_LOAD_SECONDS: Final = "tier_load_seconds"  # of all transfers and GPUs together
TIER_REFUSED: Final = "tier_refused"  # what a tier without free room, or too slow, did not take
ESTIMATED_FLOPS: Final = "estimated_flops"  # per GPU; stays 0 unless --enable-mfu-metrics
ESTIMATED_READ_BYTES: Final = "estimated_read_bytes"
ESTIMATED_WRITE_BYTES: Final = "estimated_write_bytes"
TRANSFERS: Final = "transfers"  # of KV blocks between servers that ended well, where this side records them, by rank
TRANSFER_SECONDS: Final = "transfer_seconds"  # their time, summed
TRANSFER_BYTES: Final = "transfer_bytes"
TRANSFERS_FAILED: Final = "transfers_failed"  # and handshakes and notifications that failed
LEASES_EXPIRED: Final = "leases_expired"  # prompts whose blocks were freed before the peer had them, by rank
READ_AFTER_EXPIRY: Final = "read_after_expiry"  # and then read by the peer, by rank
DRAFTS: Final = "drafts"  # requests that had draft tokens in a step
DRAFTS_ACCEPTED: Final = "drafts_accepted"  # draft tokens that were right
FINISHED_PREFIX: Final = "finished:"  # + finished_reason; "finished:stop", "finished:length", ...
REJECTED_PREFIX: Final = "rejected:"  # + reason, from admission_rejections (no engine label there)

# Histograms
TTFT: Final = "ttft"  # time to first token, seconds
INTER_TOKEN: Final = "inter_token"  # one observation per decoding request and output step, seconds
E2E: Final = "e2e"
QUEUE: Final = "queue"  # first queued -> first scheduled
PREFILL: Final = "prefill"
INFERENCE: Final = "inference"
ITERATION_TOKENS: Final = "iteration_tokens"
REQUEST_PROMPT: Final = "request_prompt_tokens"
REQUEST_OUTPUT: Final = "request_generation_tokens"
REQUEST_MAX_TOKENS: Final = "request_params_max_tokens"
KV_IDLE: Final = "kv_idle_before_evict"  # of a sample of blocks: from the last use to the eviction, seconds
KV_REUSE_GAP: Final = "kv_reuse_gap"  # of the same blocks: from use to use before that; blocks lost earlier have none

# Page values (one API server process; absent with several API servers)
PROCESS_CPU_SECONDS: Final = "process_cpu_seconds"
PROCESS_START: Final = "process_start_time_seconds"
LORA_MOMENT: Final = "lora_seconds"  # Unix time of the last look at adapters, where any are served
OPERATIONS_PREFIX: Final = "operations:"  # + kind: sleep and weight-update operations in flight
PROCESS_OPEN_FDS: Final = "process_open_fds"  # grows and falls with the clients' connections, one for one
HTTP_PREFIX: Final = "http:"  # + status class, "http:2xx", "http:4xx", "http:5xx": counters of requests
HTTP_GENERATED: Final = HTTP_PREFIX + "2xx:generated"  # those of 2xx that a request of the engine answers
HTTP_PAUSE: Final = HTTP_PREFIX + "2xx:pause"  # those of 2xx that let the server stand still
HTTP_RESUME: Final = HTTP_PREFIX + "2xx:resume"  # those of 2xx after which it goes on


@frozen
class GpuProcess:
    """A process on a GPU: host pid and its device memory in bytes (``None`` = not reported by the driver)."""

    pid: int
    used_bytes: int | None = None


@frozen
class GpuReading:
    """One GPU, MIG instance or AMD partition as read at one moment.

    ``memory_used_bytes`` is total minus free. ``utilization_ratio`` is a duty cycle (some kernel was running).
    ``error`` is why the device could not be read (``lost``, ``reset_required``, ``no_permission``, ...); other fields
    are then None. A MIG instance has ``parent_uuid`` and ``gpu_instance_id``, and index, minor and bus of its GPU;
    ``gpu_instance_start`` is its first memory slice. ``unseen_parts``: partitions of this GPU exist that cannot be
    read. ``xid_errors`` (by XID, 0 = any other) counts driver events since start; ``xid_last_times`` is when each XID
    came last.
    """

    uuid: str
    index: int
    vendor: str
    name: str | None = None
    driver: str | None = None
    pci_bus_id: str | None = None
    minor: int | None = None
    parent_uuid: str | None = None
    gpu_instance_id: int | None = None
    gpu_instance_start: int | None = None
    unseen_parts: bool = False
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    sm_activity_ratio: float | None = None
    tensor_activity_ratio: float | None = None
    dram_activity_ratio: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    xid_errors: Mapping[int, int] = field(default_factory=dict)
    xid_last_times: Mapping[int, float] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    error: str | None = None

    @property
    def memory_used_ratio(self) -> float | None:
        """Used share of the device's memory."""
        used, total = self.memory_used_bytes, self.memory_total_bytes
        return used / total if used is not None and total else None


@frozen
class Histogram:
    """A cumulative classic histogram as served.

    ``bounds`` ends with ``inf`` when buckets were served and is empty when only sum and count were;
    ``counts`` are cumulative and as long as ``bounds``.
    """

    bounds: tuple[float, ...] = ()
    counts: Sequence[float] = ()
    sum: float | None = None
    count: float | None = None

    def plus(self, other: Histogram) -> Histogram:
        """The observations of both; without buckets if their bounds differ."""
        alike = self.bounds == other.bounds
        return Histogram(
            self.bounds if alike else (),
            tuple(map(add, self.counts, other.counts)) if alike else (),
            None if self.sum is None or other.sum is None else self.sum + other.sum,
            None if self.count is None or other.count is None else self.count + other.count,
        )

    def mean(self) -> float | None:
        """Mean of the observations; ``None`` without any."""
        return self.sum / self.count if self.sum is not None and self.count and self.count > 0 else None


@frozen
class EngineReading:
    """One engine (model, data-parallel rank) of a metrics endpoint, under canonical names. ``dialect``: whose
    spellings were used. Where several servers share an endpoint, ``replica`` is Ray's identifier of the server and
    ``origin`` the pod or address that its series were collected from; both are part of ``engine`` too, the former as
    a number.
    """

    model_name: str
    engine: str
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    cache_config: Mapping[str, str] = field(default_factory=dict)
    dialect: str = ""
    replica: str = ""
    origin: str = ""


@frozen
class Scrape:
    """One scrape of one inference server.

    ``error``: a reason of ``reasons.REASONS`` when the scrape failed; ``engines`` is then empty. ``rival_label``: in
    which its series collide, where that is the reason; "" = another reason, or unknown. ``exposition``: the
    raw text, kept only while recording. ``bad_lines``: wanted lines that could not be read. ``cut``: what was left
    out, by reason: engines, series and plugin beyond limits; collisions where several series have one name.
    ``group``: the pods that may form the engine, of which this one serves; "" = it alone. ``flavour``: a word of
    the dialect ("v0", "v1", "rust"), None = unknown. ``dialect``: of its engines, else what discovery took the server
    for; "" = unknown. ``pool``: None = unknown. ``args_source``: as ``source`` of ``EngineArgs``. ``assumed``: nothing
    but an image or a text says that an engine is there, so that it is one from its first answer on.
    """

    target: str
    time: float
    namespace: str = ""
    pod: str = ""
    container: str = ""
    gpus: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[EngineReading, ...] = ()
    page: Mapping[str, float] = field(default_factory=dict)
    version: str | None = None
    flavour: str | None = None
    bad_lines: int = 0
    cut: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    rival_label: str = ""
    duration_seconds: float | None = None
    exposition: str | None = None
    dialect: str = ""
    group: str = ""
    pool: EnginePool | None = None
    args_source: str = "args"
    assumed: bool = False

    def engines_of_server(self, engine: EngineReading) -> int:
        """Number of engines here that belong to the same server as ``engine``: its data-parallel ranks."""
        server = (engine.dialect, engine.replica, engine.origin)
        return sum((one.dialect, one.replica, one.origin) == server for one in self.engines)


OOM_EXIT_CODE: Final = 137  # of a process that was killed, as for want of memory


@frozen
class Termination:
    """The container's last termination: kubelet's reason ("OOMKilled", "Error", ...), exit code, time."""

    reason: str | None = None
    exit_code: int | None = None
    finished_at: float | None = None


@frozen
class Run:
    """The present run of a container that serves, by its pod's status. ``since``: when the node took the pod.
    ``answered``: a time by which its readiness probe had succeeded in this run, None = not yet, or unknown.
    ``stopped``: why it does not run, in the kubelet's word, "" = it runs. ``ended``: why its pod is no longer meant to
    serve ("Failed", "Succeeded", "deleted"), "" = it is. ``counted``: as in ``Workload``; ``assumed``: in ``Scrape``.
    """

    since: float | None = None
    answered: float | None = None
    stopped: str = ""
    ended: str = ""
    counted: bool = False
    assumed: bool = False


ALERT_REACHES: Final = ("off", "ticket")
"""How far the alerts of a pod may go: no alert at all, or tickets only."""


@frozen
class ContainerReading:
    """The container around an engine, from the pod status and cgroup v2; ``memory_limit_bytes`` None = no limit or
    unknown. ``pool``: of its engine, known before that answers. ``run``: None = unknown, or it serves nothing itself.
    """

    namespace: str
    pod: str
    container: str
    restarts: int | None = None
    ready: bool | None = None
    last_termination: Termination | None = None
    cpu_usage_seconds: float | None = None
    cpu_limit_cores: float | None = None
    cpu_periods: int | None = None
    cpu_throttled_periods: int | None = None
    cpu_pressure_some_ratio: float | None = None
    memory_working_set_bytes: int | None = None
    memory_limit_bytes: int | None = None
    alerts: str | None = None  # one of ALERT_REACHES; None = as usual
    pool: EnginePool | None = None
    run: Run | None = None


@frozen
class LogLine:
    """One line of an engine container's log without prefix and ANSI colours. ``event``: as recognised by a dialect
    when it was read (``engines.registry.log_line``); ``None`` = nothing.
    """

    namespace: str
    pod: str
    container: str
    line: str
    event: LogEvent | None = None


@frozen
class AllocatorReading:
    """torch's caching allocator in the worker ``rank``, from the plugin, in bytes."""

    namespace: str
    pod: str
    rank: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None


@frozen
class StepStats:
    """The plugin's counts over the steps of one engine, all API servers together, since ``started``. ``sizes``: steps
    by batch size, which is requests decoding in the step when ``exact`` (one API server), else requests running after
    it. ``decoded``: sum of decoding requests over steps. ``written``: time of the report. ``kv_max``: largest KV
    usage of any step in the plugin's last ten reports, about ten seconds.
    """

    namespace: str
    pod: str
    engine: str
    started: float
    written: float
    steps: int
    decoded: int
    exact: bool = False
    kv_max: float | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)


@frozen
class CacheReading:
    """What the KV events of one engine add up to: sums and shares, never a hash, a token or a salt. ``target``: as of
    ``Scrape``; ``engine``: as the page calls it. ``reason``: why the contents of its prefix cache are unknown, "" =
    they are known. ``adapters``, ``salts``: shares (0-1) of the blocks by holder, means of a minute; salts are numbers
    that mean nothing outside this process. ``counters``: ``KV_SEEN`` and those that follow it, which its reading
    gets; none where blocks were stored outside the GPU too, so that what is stored again may have been loaded.
    """

    target: str
    engine: str
    time: float
    reason: str = ""
    adapters: Mapping[str, float] = field(default_factory=dict)
    salts: Mapping[str, float] = field(default_factory=dict)
    resident_tokens: int | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


@frozen
class GpuOwner:
    """One container that holds a GPU; a shared GPU has several, all with ``shared`` True. ``group``: the pods that
    form one engine whose metrics a pod on another node serves; "" = none.
    """

    uuid: str
    namespace: str
    pod: str
    container: str
    shared: bool = False
    group: str = ""


@frozen
class Discovered:
    """One container of this node that has an accelerator or looks like an inference server. ``result``: engine
    (scraped), no_target (an engine that is not scraped), not_engine. ``reason``: the sign of a scraped engine, else
    why it is not scraped or no engine; ``explanation``: the same in words. ``sign``: "" where it is no engine.
    ``address``: of its metrics, "" = none. ``complete``: all its arguments are visible, None = no engine. ``gpus``:
    accelerators requested, by resource. ``group``: the same for all pods of one engine; ``role``: prefill, decode
    or both, "" = none. ``arguments``: those of its command line, with their public values.
    """

    namespace: str
    pod: str
    container: str
    result: str
    reason: str
    sign: str
    explanation: str
    address: str
    complete: bool | None
    gpus: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    role: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)


@frozen
class NodeCondition:
    """A condition of this node, e.g. ("MemoryPressure", True)."""

    type: str
    status: bool | None = None


@frozen
class SourceHealth:
    """Health of one source, apart from its data. ``up`` None = no answer yet. ``reason``: of a closed set per source.
    ``errors``: failures since start by reason.
    """

    name: str
    up: bool | None = None
    reason: str | None = None
    last_success: float | None = None
    duration_seconds: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)

    def failed(self, reason: str, counts: Mapping[str, int] | None = None) -> Self:
        """The health after a failure; ``counts``: of what is counted for it, None = one of ``reason``."""
        errors = counted(self.errors, {reason: 1} if counts is None else counts)
        return replace(self, up=False, reason=reason, errors=errors)


MAX_REASONS: Final = 64  # kinds of failure counted apart; further ones count as "other"


def counted(errors: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """``errors`` by reason with ``new`` ones."""
    total = dict(errors)
    for reason, count in new.items():
        known = reason if reason in total or len(total) < MAX_REASONS else "other"
        total[known] = total.get(known, 0) + count
    return total


@frozen
class Snapshot:
    """Everything that arrived for one tick. What did not arrive is absent."""

    time: float
    gpus: tuple[GpuReading, ...] = ()
    pages: tuple[Scrape, ...] = ()
    containers: tuple[ContainerReading, ...] = ()
    owners: tuple[GpuOwner, ...] = ()
    logs: tuple[LogLine, ...] = ()
    allocator: tuple[AllocatorReading, ...] = ()
    steps: tuple[StepStats, ...] = ()
    caches: tuple[CacheReading, ...] = ()
    node_conditions: tuple[NodeCondition, ...] = ()
    discovered: tuple[Discovered, ...] = ()
    health: Mapping[str, SourceHealth] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None
    pods: Mapping[tuple[str, str], str] | None = None  # (namespace, pod) of those with an engine -> uid
    process_pods: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # host pid -> (namespace, pod)
    expected_gpus: Mapping[str, int] = field(default_factory=dict)  # by vendor, unreadable ones included


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    """Identity of an engine: the labels of its series."""

    namespace: str
    pod: str
    model_name: str
    engine: str


ABORTED: Final = FINISHED_PREFIX + "abort"
_ERROR: Final = FINISHED_PREFIX + "error"
_UNANSWERED: Final = (_ERROR, ABORTED)
_HTTP_5XX: Final = HTTP_PREFIX + "5xx"
FAILURES: Final = (_ERROR, _HTTP_5XX, REJECTED_PREFIX)  # how the names of counts of failures begin


def count_answered(counts: Mapping[str, float]) -> float:
    """Requests that finished with any reason but abort and error; engines without reasons count under one."""
    return sum([n for name, n in counts.items() if name.startswith(FINISHED_PREFIX) and name not in _UNANSWERED])


def count_failed(counts: Mapping[str, float]) -> float:
    """Failed requests: the largest of errors, 5xx responses and refusals, because they may count the same requests.
    Refusals of different reasons are different requests.
    """
    refused = sum(count for name, count in counts.items() if name.startswith(REJECTED_PREFIX))
    return max(counts.get(_ERROR, 0.0), counts.get(_HTTP_5XX, 0.0), refused)
