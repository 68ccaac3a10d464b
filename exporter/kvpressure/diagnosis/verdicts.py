"""Verdicts: one small function each, asked in a fixed order. The first that holds is the answer.

The order is the order of vetoes: what makes every other number meaningless comes first (no page, sleep, frozen gauges,
a stall), then nothing to do (idle), then a queue that no resource of the engine explains (deferred), then the binding
resource (cache, sequence limit, host, GPU), then healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpressure.signals.model import Signals
from kvpressure.signals.score import NONE as NO_GPU
from kvpressure.signals.score import PROFILING
from kvpressure.state import Evidence
from kvpressure.thresholds import Thresholds

UNSORTED: Final = (
    "how many of the waiting requests wait for a LoRA slot or for KV blocks from elsewhere (vLLM from 0.20 on tells)"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict that holds. ``supporting`` and ``opposing`` name evidence, ``missing`` says what was not seen."""

    verdict: str
    confidence: float
    stage: str | None = None
    supporting: tuple[str, ...] = ()
    opposing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    frozen: bool | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What a verdict function may look at."""

    signals: Signals
    evidence: Mapping[str, Evidence]
    thresholds: Thresholds
    samples: int
    notes: list[str] = field(default_factory=list)

    def true(self, name: str) -> bool:
        """The evidence is known and holds."""
        return self.evidence[name].value is True

    def false(self, name: str) -> bool:
        """The evidence is known and does not hold."""
        return self.evidence[name].value is False

    def unknown(self, name: str) -> bool:
        """The evidence is not known."""
        return self.evidence[name].value is None

    def queue_unsorted(self) -> bool:
        """Requests wait, and nobody tells whether for something that no resource of the engine explains."""
        return self.true("queue_present") and self.unknown("queue_for_capacity")


def no_page(case: Case) -> Finding | None:
    """Nothing fresh to judge by."""
    if case.true("page_fresh"):
        return None
    why = "page_fresh"
    return Finding("unknown", 0.0, supporting=(why,), missing=(case.evidence[why].text,))


def asleep(case: Case) -> Finding | None:
    """Sleep mode has offloaded the weights: whoever waits, waits for somebody to wake the engine up."""
    if not case.true("engine_asleep") or case.false("work_present"):
        return None
    return Finding(
        "unknown",
        case.thresholds["confidence_undecided"],
        supporting=("engine_asleep", "work_present"),
        missing=("what the engine does when it is awake: it is asleep, its weights are offloaded",),
    )


def frozen_or_stalled(case: Case) -> Finding | None:
    """Work is said to be present and nothing useful happens: a stall, a long prefill, a first request, or gauges that froze.

    * A long prefill fills the cache, which is not full yet, and pushes nobody out; it gets more patience. So does the first
      request of a process, for which kernels are compiled.
    * A queue that is all deferred while nothing runs waits for something else than the engine.
    * Frozen: no number moves, nobody waits, the GPU is idle and the clients' connections are gone, so the gauges stayed
      behind. Where connections are not known: the API server answers nobody, which a hang looks like as well.
    * A step that takes long moves no gauge until it ends: a model on the CPU, a prompt that is computed as a whole.
    * Otherwise a stall, which nobody is sure of while it may be gauges that froze.
    """
    s, t = case.signals, case.thresholds
    stuck = s.progress.seconds_without_progress
    if stuck is None or not case.true("no_progress"):
        return None
    moved, runs = (s.progress.seconds_still or 0.0) < t["no_progress_seconds"], (s.load.running or 0.0) > 0
    computing = (
        s.kv.kv_slope_per_second is not None
        and s.kv.kv_slope_per_second > 0
        and moved
        and runs
        and not case.true("preempting")
        and not case.true("kv_full")
    )
    if computing and stuck < t["prefill_patience_seconds"]:
        if case.true("queue_present"):
            return Finding(
                "compute_bound",
                t["confidence_long_prefill"],
                supporting=("queue_present", "work_present"),
                opposing=("no_progress",),
                missing=_absent(case, "gpu_saturated"),
            )
        return None
    if stuck < t["stalled_seconds"]:
        return Finding(
            "unknown", t["confidence_no_progress"], supporting=("no_progress",), missing=("whether it moves again",)
        )
    if s.progress.ever_useful is False and runs and stuck < t["prefill_patience_seconds"]:
        return Finding(
            "unknown",
            t["confidence_no_progress"],
            supporting=("no_progress",),
            missing=(
                "what a first answer takes: nothing has come out since the start, so kernels may be compiled for the first request",
            ),
        )
    if stuck < t["prefill_patience_seconds"] and (step := _long_step(case, runs)):
        return Finding("unknown", t["confidence_no_progress"], supporting=("no_progress",), missing=(step,))
    if not runs and (waits := deferred(case)) is not None:
        return waits
    if not runs and case.queue_unsorted() and s.load.waits_for_blocks:  # who runs nothing has LoRA slots to give away
        return Finding(
            "stalled", t["confidence_stalled_alone"], supporting=("no_progress", "work_present"), missing=(UNSORTED,)
        )
    return _frozen(case, moved) or _stalled(case, moved)


def _long_step(case: Case, runs: bool) -> str:
    """Why one step may take this long and move no gauge until it ends; empty where nothing says so."""
    if not runs or case.true("preempting") or case.true("kv_full"):
        return ""
    if case.signals.compute.activity_level == NO_GPU and case.true("cpu_saturated"):
        return "when the present step ends: the model seems to compute on the CPU, which is busy"
    if case.signals.progress.prompt_at_once and not case.true("gpu_idle"):
        return "when the present step ends: a prompt was let in last, and it is computed as a whole"
    return ""


def _frozen(case: Case, moved: bool) -> Finding | None:
    s = case.signals
    if moved or (s.load.waiting or 0.0) > 0 or case.false("gpu_idle") or not _clients_gone(s):
        return None
    return Finding(
        "unknown",
        case.thresholds["confidence_frozen"],
        supporting=("no_progress",),
        frozen=True,
        missing=(
            "whether requests are really there: no gauge moves and the clients seem to be gone, so the gauges may be left "
            "over from aborted requests",
        ),
    )


def _stalled(case: Case, moved: bool) -> Finding:
    s, t = case.signals, case.thresholds
    ground = "confidence_stalled_seen" if case.true("queue_present") or case.true("gpu_idle") else "confidence_stalled"
    missing: tuple[str, ...] = ()
    silent = case.true("gpu_idle") or ((s.compute.gpus_shared or s.compute.gpus_of_others) and case.unknown("gpu_idle"))
    if not moved and s.load.waiting == 0 and silent and not case.true("clients_came"):
        ground, missing = (
            "confidence_stalled_alone",
            (
                "whether requests are really there: nobody waits and the GPU is idle, so the gauges may be left over from aborted "
                "requests, whose clients or gateway keep their connections",
            ),
        )
    return Finding(
        "stalled",
        t[ground],
        supporting=("no_progress", "work_present", *(n for n in ("gpu_idle", "clients_came") if case.true(n))),
        opposing=("tokens_flow",) if case.true("tokens_flow") else (),
        missing=missing,
    )


def _clients_gone(s: Signals) -> bool:
    """Connections tell; where they are not known, an API server that answers nobody may have no clients."""
    if s.progress.connections_dropped is not None:
        return s.progress.connections_dropped
    return s.progress.http_moved is False


def idle(case: Case) -> Finding | None:
    """Nothing runs, nothing waits, nothing comes out."""
    if not case.false("work_present") or case.true("tokens_lately"):
        return None
    if case.true("cpu_saturated"):
        return None  # requests may be prepared that the engine has not seen yet
    return Finding("idle", case.thresholds["confidence_idle"], supporting=("work_present", "tokens_lately"))


def deferred(case: Case) -> Finding | None:
    """Every request that waits is deferred: no slot for its LoRA adapter, a grammar still compiling, or KV blocks on their
    way from elsewhere. Neither cache nor limit nor GPU keeps it waiting, and no metric says which of the three does.
    """
    if not case.true("queue_present") or not case.false("queue_for_capacity"):
        return None
    return host_bound(case) or Finding(
        "unknown",
        case.thresholds["confidence_undecided"],
        supporting=("queue_for_capacity",),
        missing=("what the deferred requests wait for: LoRA slots, a grammar, or KV blocks from elsewhere",),
    )


def kv_pressure(case: Case) -> Finding | None:
    """The cache is full, or the next prompt does not fit, and requests wait for it or are pushed out."""
    if case.false("work_present"):
        return None
    known_limit = case.signals.load.max_num_seqs_source in ("args", "log")
    at_limit = case.true("running_at_limit") and known_limit and case.signals.load.running_at_limit_now is not False
    pushed = (
        case.true("preempting")
        and not case.false("kv_near_full_now")
        and (case.true("preempting_now") or not case.false("waited_lately"))
    )
    if at_limit and not pushed:
        return None
    supports = [
        name
        for name in (
            "kv_full",
            "queue_for_capacity",
            "preempting",
            "running_falls_waiting_rises",
            "head_of_line_blocked",
            "latency_multiplied",
            "gpu_out_of_memory",
        )
        if case.true(name)
    ]
    opposing = tuple(name for name in ("running_at_limit", "prefill_dominates") if case.true(name))
    queue = case.true("queue_for_capacity") or (case.queue_unsorted() and case.true("kv_near_full"))
    ground = _kv_ground(case, queue, pushed)
    if ground is None:
        return None
    missing = _absent(case, "kv_full", "running_at_limit", "gpu_saturated")
    confidence = case.thresholds[ground]
    if _held_for_others(case):
        confidence = min(confidence, case.thresholds["confidence_kv_near_full"])
        missing = ("whether the blocks are held until another server has pulled them", *missing)
    return Finding("kv_pressure", confidence, stage(case), tuple(supports), opposing, missing)


def _held_for_others(case: Case) -> bool:
    """Hardly anything runs, so whoever holds the blocks may be a server that has yet to pull them."""
    load = case.signals.load
    return (
        load.waits_for_blocks
        and load.kv_role != "kv_consumer"
        and (load.running or 0.0) < case.thresholds["host_min_requests"]
    )


def _kv_ground(case: Case, queue: bool, pushed: bool) -> str | None:
    """What the pressure is seen by, as the threshold that says how confident that is; ``None`` if it is not seen."""
    counted = case.signals.kv.preemptions_counted
    borne_out = counted is None or counted >= case.thresholds["preemptions_min"]  # clients that come and go look alike
    if case.true("kv_full") and (queue or pushed):
        if pushed and queue:
            return "confidence_kv_full_pushed"
        if not queue and not borne_out:
            return "confidence_kv_near_full"
        if case.false("waited_lately"):
            return "confidence_kv_pushed"
        if case.true("queue_short") and not pushed:
            return "confidence_kv_near_full"
        return "confidence_kv_full_below_limit" if case.false("running_at_limit") else "confidence_kv_full"
    if pushed and case.true("kv_near_full"):
        return "confidence_kv_pushed" if borne_out else "confidence_kv_near_full"
    if case.true("queue_for_capacity") and case.true("mean_prompt_blocked"):
        return "confidence_kv_head_of_line"
    if queue and case.true("head_of_line_blocked") and not case.true("running_at_limit"):
        return "confidence_kv_long_prompt"
    if _queued(case) and queue and case.true("kv_near_full") and not case.true("running_at_limit"):
        return "confidence_kv_near_full"
    return "confidence_kv_unseen" if pushed and case.unknown("kv_near_full") else None


def stage(case: Case) -> str:
    """How far it has gone: failing > thrashing > saturated > building."""
    per_running = case.signals.kv.preemptions_per_running_minute
    if case.true("allocation_failure_logged"):
        return "failing"
    if (
        per_running is not None
        and case.true("preempting")
        and (
            per_running >= case.thresholds["thrashing_preemptions_per_running_minute"]
            or case.true("latency_multiplied")
        )
    ):
        return "thrashing"
    return "saturated" if case.true("kv_full") or case.true("preempting") else "building"


_LIMIT_GROUNDS: Final[Mapping[str, str]] = {
    "args": "confidence_limit_told",
    "log": "confidence_limit_told",
    "default": "confidence_limit_default",
}


def _queued(case: Case) -> bool:
    """A queue stands, and it is more than the moment that every request waits for the next step."""
    return case.true("queue_present") and not case.true("queue_short")


def concurrency_limited(case: Case) -> Finding | None:
    """``max_num_seqs`` is reached, requests wait, the cache has room.

    Not sure of it where the GPU computes as much as it can, or may, because prompts take the time: more requests at once would
    then be no faster in all, and each slower.
    """
    if not case.true("running_at_limit") or not _queued(case):
        return None
    t, source = case.thresholds, case.signals.load.max_num_seqs_source or ""
    if source == "observed" and case.true("prefill_dominates"):
        return None  # the level stands still because prompts take all the time
    confidence = t[_LIMIT_GROUNDS.get(source, "confidence_limit_observed")]
    if case.true("kv_full"):
        confidence = max(0.0, confidence - t["confidence_limit_cut_kv_full"])
    elif case.unknown("kv_full") or case.unknown("queue_short") or (source == "observed" and _may_not_fit(case)):
        confidence = max(0.0, confidence - t["confidence_limit_cut_kv_unseen"])
    if case.unknown("tokens_flow"):  # a scheduler that has stopped looks just like this
        confidence = max(0.0, confidence - t["confidence_limit_cut_flow_unseen"])
    busy = _gpu_may_bind(case)
    if busy:
        confidence = min(confidence, t["confidence_limit_doubt"])
    opposing = [n for n in ("kv_full", "gpu_starved") if case.true(n)] + ["any_prompt_fits"] * _may_not_fit(case) + busy
    return Finding(
        "concurrency_limited",
        confidence,
        supporting=("running_at_limit", "queue_present"),
        opposing=tuple(opposing),
        missing=_absent(case, "kv_full", "tokens_flow"),
    )


def _gpu_may_bind(case: Case) -> list[str]:
    """What says that the GPU computes as much as it can, or may, whatever the limit. Busy memory does not: a larger batch reads the
    weights once for more requests.
    """
    gpu, t = case.signals.compute, case.thresholds
    used, most = (
        (gpu.tensor_activity, "tensor_busy_ratio")
        if gpu.activity_level == PROFILING
        else (gpu.power_ratio, "power_prefill_ratio")
    )
    found = ["gpu_works"] if used is not None and used >= t[most] and case.true("gpu_works") else []
    may = found or ((used is None or gpu.gpus_of_others) and not case.false("gpu_saturated"))
    return [*found, "prefill_dominates"] if may and case.true("prefill_dominates") else found


def host_bound(case: Case) -> Finding | None:
    """The GPU waits for the host: CPU quota, a saturated API server, preprocessing, grammar work.

    A CPU that is short says it for sure only where somebody is harmed and the GPU is seen to wait: a pod that is throttled now
    and then may serve as fast as ever, and a model may compute on the CPU. A GPU that is starved, or one that waits while most
    periods are throttled, says it until the engine's normal is known and nobody is harmed: some models never need more of it.
    """
    busy = case.true("tokens_flow") or case.true("work_present")
    reasons = [
        n
        for n in ("cpu_throttled", "cpu_contended", "cpu_saturated", "outside_engine_time", "gpu_starved")
        if case.true(n)
    ]
    if case.true("api_server_saturated") and case.true("outside_engine_time"):
        reasons.append("api_server_saturated")
    gpu_waits, gpu_low = not case.true("gpu_saturated"), case.true("gpu_utilization_low")
    suffers = _harmed(case) or not case.false("gpu_utilization_low")
    mostly = (case.signals.host.cpu_throttled_ratio or 0.0) >= case.thresholds["cpu_throttled_most_ratio"]
    stopped = mostly and gpu_low and case.false("gpu_saturated") and not case.false("latency_multiplied")
    if (case.true("cpu_throttled") or case.true("cpu_contended")) and gpu_waits and busy and suffers:
        return _host(
            case, "confidence_host_throttled_gpu_low" if gpu_low else "confidence_host_throttled", reasons, sure=stopped
        )
    if case.true("cpu_saturated") and gpu_waits and (busy or case.true("gpu_idle")) and suffers:
        return _host(case, "confidence_host_cpu_gpu_low" if gpu_low and busy else "confidence_host_cpu", reasons)
    several = (case.signals.load.running or 0.0) >= case.thresholds["host_min_requests"]
    if case.true("gpu_starved") and case.true("tokens_flow") and several:
        return _host(case, "confidence_host_gpu_starved", reasons, sure=not case.false("latency_multiplied"))
    if "api_server_saturated" in reasons and not case.true("kv_near_full"):
        return _host(case, "confidence_host_api_server", reasons, sure=True)
    if (
        _queued(case)
        and case.true("queue_for_capacity")
        and gpu_low
        and case.false("kv_near_full")
        and case.true("tokens_flow")
        and not case.true("prefill_dominates")
    ):
        return _host(case, "confidence_host_queue", ["queue_present", "gpu_utilization_low"])
    return None


def _harmed(case: Case) -> bool:
    """Somebody waits, or waits longer than usual, or gets much less than before."""
    return _queued(case) or any(case.true(n) for n in ("latency_multiplied", "outside_engine_time", "throughput_fell"))


def _host(case: Case, ground: str, reasons: list[str], sure: bool = False) -> Finding:
    t = case.thresholds
    sure = sure or (_harmed(case) and case.false("gpu_saturated"))
    unsorted = case.queue_unsorted()
    sure = sure and not unsorted
    harm = [n for n in ("queue_present", "latency_multiplied", "throughput_fell") if case.true(n) and n not in reasons]
    return Finding(
        "host_bound",
        t[ground] if sure else min(t[ground], t["confidence_host_harmless"]),
        supporting=(*reasons, *harm),
        opposing=tuple(n for n in ("kv_near_full", "gpu_saturated") if case.true(n)),
        missing=(UNSORTED,) * unsorted + _absent(case, "gpu_saturated", "cpu_throttled", "cpu_saturated"),
    )


def compute_bound(case: Case) -> Finding | None:
    """Requests wait, the cache has room, the limit is not reached: prompts or decoding saturate the GPU.

    Not sure of it where the next prompt may be one that does not fit, where the batch stands still below its limit, as if
    another limit held it, or while nobody tells whether the few who wait do so for long.
    """
    limited = case.true("running_at_limit") and case.signals.load.max_num_seqs_source != "observed"
    if not _queued(case) or case.true("kv_full") or limited:
        return None
    ground, t = _compute_ground(case), case.thresholds
    if ground is None:
        return None
    # where nobody told the limit, the level at which the batch stands became the limit, and it is reached by definition
    below = case.false("running_at_limit") or case.signals.load.max_num_seqs_source == "observed"
    held = ("running_stands_still",) if case.true("running_stands_still") and below else ()
    doubts = held + ("any_prompt_fits",) * _may_not_fit(case)
    unsure = doubts or case.unknown("queue_short") or case.queue_unsorted()
    return Finding(
        "compute_bound",
        min(t[ground], t["confidence_compute_doubt"]) if unsure else t[ground],
        supporting=tuple(n for n in ("prefill_dominates", "gpu_saturated", "queue_present") if case.true(n)),
        opposing=doubts + tuple(n for n in ("kv_near_full",) if case.true(n)),
        missing=(UNSORTED,) * case.queue_unsorted() + _absent(case, "kv_full", "gpu_saturated"),
    )


def _may_not_fit(case: Case) -> bool:
    """The next prompt may be one for which the cache has no room; where the room is not known, from half full on."""
    warm = (case.signals.kv.kv_used_ratio_recent_max or 0.0) >= case.thresholds["kv_warm_ratio"]
    return case.false("any_prompt_fits") or (warm and case.unknown("any_prompt_fits"))


def _compute_ground(case: Case) -> str | None:
    """What says that the GPU has more to do than it can, as the threshold of how confident that is.

    Many prompt tokens do not say it alone: where the GPU waits, something else holds them up. NVML utilization does not
    either: it is a duty cycle, high with any large model that decodes.
    """
    room = case.false("kv_near_full")
    if case.true("prefill_dominates"):
        if case.false("gpu_saturated"):
            return "confidence_compute_gpu_waits"
        seen = room and case.true("gpu_saturated")
        return "confidence_compute_prefill" if seen else "confidence_compute_prefill_kv"
    if not case.true("gpu_saturated"):
        return None
    if not room:
        return "confidence_compute_gpu_kv"
    return "confidence_compute_gpu" if case.true("gpu_works") else "confidence_compute_gpu_weak"


def healthy(case: Case) -> Finding | None:
    """Tokens flow and nobody waits for long. Not sure while requests are pushed out of a full cache."""
    if not case.true("tokens_flow") or _queued(case):
        return None
    thrashing = case.true("kv_full") and case.true("preempting")
    seen = not case.unknown("queue_present") and case.false("no_progress") and not thrashing
    return Finding(
        "healthy",
        case.thresholds["confidence_healthy" if seen else "confidence_healthy_unseen"],
        supporting=("tokens_flow", "queue_short" if case.true("queue_present") else "queue_present"),
        opposing=tuple(n for n in ("kv_full", "preempting", "latency_multiplied", "cpu_throttled") if case.true(n)),
        missing=_absent(case, "queue_present", "kv_full"),
    )


def undecided(case: Case) -> Finding:
    """Nothing above holds: say what is missing instead of guessing."""
    missing = _absent(
        case, "tokens_flow", "work_present", "kv_full", "running_at_limit", "gpu_saturated", "cpu_throttled"
    )
    if case.queue_unsorted():
        missing = (UNSORTED, *missing)
    if case.samples <= 1:
        missing = ("a second reading", *missing)
    present = tuple(n for n in ("queue_present", "work_present", "kv_near_full") if case.true(n))
    return Finding("unknown", case.thresholds["confidence_undecided"], supporting=present, missing=missing)


_MISSING: Final[Mapping[str, str]] = {
    "kv_full": "KV usage",
    "running_at_limit": "max_num_seqs (arguments, start-up log or version and card)",
    "gpu_saturated": "GPU activity",
    "cpu_throttled": "CPU throttling of the container",
    "cpu_saturated": "CPU use of the container",
    "tokens_flow": "token counters",
    "work_present": "running and waiting requests",
    "queue_present": "waiting requests",
}


def _absent(case: Case, *names: str) -> tuple[str, ...]:
    return tuple(_MISSING[name] for name in names if case.unknown(name))


ORDER: Final[tuple[Callable[[Case], Finding | None], ...]] = (
    no_page,
    asleep,
    frozen_or_stalled,
    idle,
    deferred,
    kv_pressure,
    concurrency_limited,
    host_bound,
    compute_bound,
    healthy,
)


def decide(case: Case) -> Finding:
    """The first verdict of ``ORDER`` that holds."""
    for verdict in ORDER:
        finding = verdict(case)
        if finding is not None:
            return finding
    return undecided(case)
