"""The plan for KV pressure: the guide "Emergency Mitigation" in its order, with values computed for one engine and what each costs;
then what the guides do not know and measurements support (``docs/mitigations.md``). One plan for page, JSON and command line.

Pure. Nothing is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Final, Literal, Protocol

from kvpressure.args import option, parse_version, value_text
from kvpressure.diagnosis.advice import at_once
from kvpressure.publish.wording import number_text, percent_text, seconds_text
from kvpressure.thresholds import Thresholds

Advice = Literal["do", "if it stays", "not here"]

WATERMARK: Final = 0.1
_WATERMARK_SINCE: Final = (0, 24, 0)
_EXAMPLE: Final = (4096, 1024)
_PROMPT_STEP: Final = 256
_OUTPUT_STEP: Final = 64
_FULL: Final = 0.9  # share of the cache that capped requests may want together

MEASURED: Final = {
    "caps": "24 preemptions instead of 40 and 57 % less engine time, with 60 of 72 requests let in",
    "limit": "half the limit that was set, still above what ran at once, left 40 of 40 preemptions",
    "cut": "25 % below what ran at once left 28 of 40 preemptions, 50 % left 5, for the same engine time and the same queue",
    "pool": "a KV pool 30 % smaller took 18 % more engine time and 50 preemptions instead of 40",
    "watermark": "5 preemptions instead of 40 and 5 % less engine time, without knowing how long requests are",
}
"""What each step did to the same overload of a real vLLM, from ``docs/mitigations.md``; a test holds the figures together."""


class Limited(Protocol):
    """A limit as published: in force, where it was read, what to set."""

    @property
    def value(self) -> float | None: ...
    @property
    def source(self) -> str | None: ...
    @property
    def recommended(self) -> float | None: ...


class Pressed(Protocol):
    """One engine, as the plan asks for it. ``signal`` and ``shape`` take flat names (``prompt_quantiles:0.95``); ``shape`` may answer with
    what holds since the server started. ``address`` is empty when there is none to ask.
    """

    @property
    def stage(self) -> str | None: ...
    @property
    def version(self) -> str | None: ...
    @property
    def address(self) -> str: ...
    def gpu_bytes(self) -> Sequence[float]: ...
    def limit(self, name: str) -> Limited: ...
    def signal(self, name: str) -> float | None: ...
    def shape(self, name: str) -> float | None: ...
    def evidence(self, name: str) -> bool | None: ...
    def condition(self, name: str) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class Caps:
    """Most tokens of a prompt and of an answer. ``known`` False = nothing was seen, the numbers are an example."""

    input_tokens: int
    output_tokens: int
    known: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``values`` are arguments of vLLM to set; ``cost`` is what it takes away; ``measured`` what it did to the overload of
    ``docs/mitigations.md``; ``commands`` are for a shell.
    """

    title: str
    advice: Advice
    text: str
    cost: str = ""
    measured: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """What to set now, as it stands on a command line."""
        return (
            tuple(f"{option(name)} {value_text(value)}" for name, value in self.values.items())
            if self.advice == "do"
            else ()
        )


@dataclass(frozen=True, slots=True)
class PressurePlan:
    """Steps in order and the caps for the edge."""

    steps: tuple[Step, ...]
    caps: Caps

    @property
    def values(self) -> dict[str, float]:
        """Everything to be set now."""
        return {name: value for step in self.steps if step.advice == "do" for name, value in step.values.items()}


def pressure_plan(engine: Pressed, t: Thresholds, workload: str) -> PressurePlan:
    """The plan for ``engine``; ``workload`` is how kubectl names it, e.g. ``-n inference deploy/chat``."""
    caps = caps_for(engine)
    steps = [
        _edge(engine, caps),
        _sequences(engine, t),
        _batched_tokens(engine, t),
        _memory_share(engine, t),
        *_beyond(engine, t),
        _roll_out(workload),
        _restart(engine, workload),
        _verify(engine),
    ]
    return PressurePlan(tuple(steps), caps)


# --- step 1 -----------------------------------------------------------------------------------------------


def target_sequences(engine: Pressed) -> float | None:
    """``max_num_seqs`` after the plan: what is recommended, else the limit in force."""
    limit = engine.limit("max_num_seqs")
    return limit.recommended or limit.value


def _together(engine: Pressed) -> float | None:
    """How many requests the caps have to let fit: what is recommended, else what runs at once."""
    return engine.limit("max_num_seqs").recommended or _at_once(engine) or target_sequences(engine)


def _at_once(engine: Pressed) -> float | None:
    limit = engine.limit("max_num_seqs").value
    return at_once(_measured(engine), limit, engine.signal("limits:kv_capacity"))


def _measured(engine: Pressed) -> float | None:
    return engine.signal("batch_p99") or engine.signal("running")


def caps_for(engine: Pressed) -> Caps:
    """Caps that leave 95 % of the present prompts and answers alone, unless even those do not fit together."""
    prompt, output = engine.shape("prompt_quantiles:0.95"), engine.shape("output_quantiles:0.95")
    if prompt is None or output is None:
        return _example(engine.limit("max_model_len").value)
    answer = ceil(max(output, 1) / _OUTPUT_STEP) * _OUTPUT_STEP
    question = ceil(max(prompt, 1) / _PROMPT_STEP) * _PROMPT_STEP
    most = engine.limit("max_model_len").value
    if most is not None:  # rounded up beyond it they would not be limits
        question, answer = min(question, max(1, int(most))), min(answer, max(1, int(most)))
    capacity, together = engine.signal("kv_capacity_tokens"), _together(engine)
    if capacity and together:
        budget = floor(_FULL * capacity / together)
        if question + answer > budget >= 2 * _OUTPUT_STEP:
            scale = budget / (question + answer)
            answer, question = max(_OUTPUT_STEP, floor(answer * scale)), max(_OUTPUT_STEP, floor(question * scale))
    return Caps(question, answer, known=True)


def _example(max_model_len: float | None) -> Caps:
    """Numbers to be replaced, within what the server accepts."""
    most = int(max_model_len or 4 * _EXAMPLE[0])
    return Caps(max(1, min(_EXAMPLE[0], most // 2)), max(1, min(_EXAMPLE[1], most // 4)), known=False)


def _edge(engine: Pressed, caps: Caps) -> Step:
    said = f"reject prompts above {caps.input_tokens} tokens (413) and require max_tokens of at most {caps.output_tokens} (400)"
    capacity, together = engine.signal("kv_capacity_tokens"), _together(engine)
    if not caps.known:
        said += "; example values: no request of this server was seen, take the 95th percentile of your gateway's log"
    elif capacity and together:
        wanted = together * (caps.input_tokens + caps.output_tokens)
        said += (
            f": then {together:.0f} requests want at most {wanted:.0f} of the cache's {capacity:.0f} tokens"
            if wanted <= capacity
            else f": even so {together:.0f} requests may want {wanted:.0f} tokens, and the cache holds {capacity:.0f}"
        )
    p95 = [
        f"{kind} {value:.0f}"
        for kind, name in (("prompts", "prompt"), ("answers", "output"), ("max_tokens", "max_tokens"))
        if (value := engine.shape(f"{name}_quantiles:0.95")) is not None
    ]
    if p95:
        when = "today's p95" if engine.signal("prompt_quantiles:0.95") is not None else "p95 since the server started"
        said += f" ({when} in tokens: {', '.join(p95)})"
    length = engine.limit("max_model_len").recommended
    if length is not None:
        said += (
            f". In the engine, --max-model-len {length:.0f} does the same for the prompt, with a restart (the longest request of the last "
            "hour with some to spare)"
        )
    return Step(
        "Cap input and output tokens at the edge",
        "do",
        f"{said}. It works at once, needs no restart, and shortens the queue for everybody else.",
        'whoever sends more is rejected; --override-generation-config \'{"max_new_tokens": '
        f"{caps.output_tokens}}}' caps without rejecting, by cutting answers short",
        MEASURED["caps"],
    )


# --- steps 2 to 4 -----------------------------------------------------------------------------------------


def _now(engine: Pressed, name: str) -> str:
    limit = engine.limit(name)
    return "not known" if limit.value is None else f"{value_text(limit.value)} ({limit.source or 'source not known'})"


def _sequences(engine: Pressed, t: Thresholds) -> Step:
    limit, measured, fits = engine.limit("max_num_seqs"), _measured(engine), engine.signal("limits:kv_capacity")
    low, high = t["max_num_seqs_cut_min_ratio"], t["max_num_seqs_cut_max_ratio"]
    title, now = "Lower max_num_seqs", f"now {_now(engine, 'max_num_seqs')}"
    base = _at_once(engine)
    if limit.recommended is None and base is not None and 0 < base <= 1:
        small = measured is None and fits is not None and fits <= 1
        why = "the cache holds no more than one request of this length" if small else "one request runs at once"
        return Step(
            title,
            "not here",
            f"{now}; {why}: there is nothing left to lower. What is left is shorter requests or more KV memory",
        )
    if limit.recommended is None or (
        limit.value is not None and limit.recommended > limit.value
    ):  # a raise, for another verdict
        why = (
            "a value is computed for KV pressure only"
            if base is not None and base > 1
            else "too little is known to compute a value: --args tells the limit, --running with --verdict what runs"
        )
        return Step(
            title,
            "if it stays",
            f"{now}; cut what really runs at once by {percent_text(low)} to {percent_text(high)} ({why})",
            "fewer requests at once, the others wait",
        )
    base = base or limit.recommended
    cut, least = 1 - limit.recommended / base, max(1, floor(base * (1 - high)))
    if least >= limit.recommended:
        least = max(1, floor(limit.recommended * (1 - high)))
    of = "that run at once"
    if measured is None:
        of = "that are set" if fits is None or fits > base else "requests of this length that the cache holds"
    said = (
        f"{now}; to {limit.recommended:.0f}, {percent_text(max(0.0, cut))} below the {base:.0f} {of} (documented: {percent_text(low)} to "
        f"{percent_text(high)})"
    )
    if measured is None:
        said += ". How many run was not measured"
        if fits is None or fits > base:
            said += ": if fewer do, this changes nothing (--running; or --capacity-tokens with --prompt and --output)"
    elif fits is not None:
        said += f", sized by the cache: it holds about {fits:.0f} requests of the present length"
        if engine.signal("output_quantiles:0.95") is None and engine.signal("prompt_quantiles:0.95") is None:
            said += " (none finished while it was watched, so that answers count only as far as they had come: rather less than more)"
    if least < limit.recommended:
        said += f". If requests are still pushed out, {least}: where their lengths differ much it takes the larger cut"
    result = MEASURED["cut"]
    if limit.value is not None and limit.value * (1 - high) > base:
        said += f". Half of the {value_text(limit.value)} set would change nothing"
        result = f"{MEASURED['limit']}; {result}"
    return Step(
        title,
        "do",
        said,
        "fewer requests at once, the others wait as long as before, now in the queue; when requests become shorter the "
        "GPU is not used up",
        result,
        {"max_num_seqs": limit.recommended},
    )


def _batched_tokens(engine: Pressed, t: Thresholds) -> Step:
    limit, least = engine.limit("max_num_batched_tokens"), t["max_num_batched_tokens_floor"]
    title, now = "Lower max-num-batched-tokens", f"now {_now(engine, 'max_num_batched_tokens')}"
    cost = "long prompts take more steps: later first tokens; it must stay at or above max_num_seqs"
    value = limit.recommended
    if value is None:
        small = limit.value is not None and limit.value <= least
        return Step(
            title,
            "not here" if small else "if it stays",
            f"{now}; "
            + (
                f"not below {least:g}"
                if small
                else "halve it"
                if limit.value is not None
                else "halve it; where --args tells what is set, the value is computed"
            ),
            cost,
        )
    value = max(value, target_sequences(engine) or 0.0)
    now_set = limit.value or 2 * value
    if value >= now_set:
        return Step(title, "not here", f"{now}; not below max_num_seqs, {value:.0f}", cost)
    much = "half" if 2 * value <= now_set + 1 else f"{now_set - value:.0f} less (not below that)"
    return Step(
        title,
        "do",
        f"{now}; to {value:.0f}, {much}. Fewer prompts are computed at once and the peak of activations is lower; what the "
        "cache holds it does not bound",
        cost,
        values={"max_num_batched_tokens": value},
    )


def _memory_share(engine: Pressed, t: Thresholds) -> Step:
    limit = engine.limit("gpu_memory_utilization")
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    title = f"Lower gpu-memory-utilization to {usual:g}, then {lower:g}"
    cost = _pool_cost(engine, limit.value, usual, lower)
    now = f"now {_now(engine, 'gpu_memory_utilization')}"
    if limit.recommended is not None:
        return Step(
            title,
            "do",
            f"{now}; to {limit.recommended:g}: allocations fail on the device, so room is needed beside the pool"
            + (f". If it stays: {lower:g}" if limit.recommended > lower else ""),
            cost,
            MEASURED["pool"],
            {"gpu_memory_utilization": limit.recommended},
        )
    if engine.condition("gpu_out_of_memory"):
        return Step(
            title,
            "not here",
            f"{now}. Allocations fail although it is that low: a smaller share frees nothing more that the guide knows of. "
            "Look for what else uses the card, and lower max_num_batched_tokens: the peak of activations",
            cost,
            MEASURED["pool"],
        )
    return Step(
        title,
        "not here",
        f"{now}. The guide's step for failing allocations; none was seen here. A full cache gets fuller "
        "by it: vLLM takes the KV pool out of this share",
        cost,
        MEASURED["pool"],
    )


def _pool_cost(engine: Pressed, share: float | None, usual: float, lower: float) -> str:
    """What the KV pool loses, in bytes and tokens where card and pool are known."""
    sizes = engine.gpu_bytes()
    pool, capacity = engine.signal("kv_pool_bytes"), engine.signal("kv_capacity_tokens")
    if share is None or share <= lower:
        return "it shrinks the KV pool by the same share of the card"
    lower_ones = [target for target in (usual, lower) if target < share]
    if not sizes or not pool:
        lost = ", ".join(f"at {target:g} {percent_text(share - target)}" for target in lower_ones)
        return f"the KV pool loses of the card's memory {lost}; the cache is fuller by that"
    told = []
    for target in lower_ones:
        left = pool - (share - target) * min(sizes)
        if left <= 0:
            told.append(f"at {target:g} nothing is left and vLLM does not start")
            continue
        tokens = f" ({capacity * left / pool:.0f} of {capacity:.0f} tokens)" if capacity else ""
        told.append(f"at {target:g} the KV pool shrinks from {pool / 2**30:.1f} to {left / 2**30:.1f} GiB{tokens}")
    return "; ".join(told)


# --- what the guides do not know --------------------------------------------------------------------------


def _beyond(engine: Pressed, t: Thresholds) -> Iterator[Step]:
    if engine.evidence("preempting") or engine.stage == "thrashing":
        yield _watermark(engine)
    if not engine.condition("gpu_out_of_memory"):
        yield _more_memory(engine)
    spike = engine.signal("context_spike_ratio")
    if engine.signal("two_humps") == 1.0 or (spike is not None and spike >= t["context_spike_ratio"]):
        yield Step(
            "Split long-context traffic off (beyond the guides)",
            "if it stays",
            "short and long requests share this cache: route "
            "prompts above the cap to a deployment of their own, with a small max_num_seqs",
            "a second deployment, and a router that looks at the length",
        )


def _watermark(engine: Pressed) -> Step:
    version = parse_version(engine.version)
    title = "Set --watermark (beyond the guides)"
    measured = MEASURED["watermark"]
    cost = f"{percent_text(WATERMARK)} of the cache stays free on admission: fewer requests at once"
    if version is not None and version < _WATERMARK_SINCE:
        return Step(title, "not here", f"vLLM {engine.version} does not know it (since 0.24)", cost)
    if version is None:
        return Step(
            title,
            "if it stays",
            f"--watermark {WATERMARK:g}: requests are pushed out and computed again. Needs vLLM 0.24 or later",
            cost,
            measured,
        )
    return Step(title, "do", "requests are pushed out and computed again", cost, measured, {"watermark": WATERMARK})


def _more_memory(engine: Pressed) -> Step:
    share = engine.limit("gpu_memory_utilization").value
    ways = [
        "--kv-cache-dtype fp8 (half the bytes a token, where model and card support it)",
        "more GPUs (tensor parallel)",
        "replicas",
    ]
    if share is not None and share < 0.9:
        ways.insert(0, f"a higher --gpu-memory-utilization (now {share:g}; no allocation fails)")
    return Step(
        "More KV memory instead of less (beyond the guides)",
        "if it stays",
        "the cache is what is missing, and no allocation failed: " + ", ".join(ways),
        "fp8 costs accuracy that has to be tested; the others cost GPUs, or the room that allocator peaks need",
    )


# --- after the values -------------------------------------------------------------------------------------


def _roll_out(workload: str) -> Step:
    return Step(
        "Apply and watch the rollout",
        "do",
        "kvpressure mitigate prints the change as a patch (--format patch) and as Helm values (--format helm); or by hand",
        "a restart of every replica: prefix cache and running requests are lost",
        commands=(f"kubectl edit {workload}", f"kubectl rollout status {workload}"),
    )


def _restart(engine: Pressed, workload: str) -> Step:
    needed = bool(
        engine.condition("crash_loop")
        or engine.condition("allocator_fragmentation")
        or engine.condition("host_oom_killed")
    )
    return Step(
        "Controlled restart, only after the limits are down",
        "do" if needed else "not here",
        "it crashes again and again or its memory is fragmented; before the limits are down a restart only repeats it"
        if needed
        else "for crash loops and fragmented memory; neither was seen",
        commands=(f"kubectl rollout restart {workload}", f"kubectl rollout status {workload}"),
    )


def _verify(engine: Pressed) -> Step:
    now = (
        f"now KV cache {percent_text(engine.signal('kv_used_ratio_max'))} at most, {number_text(engine.signal('waiting'))} waiting, batch p95 "
        f"{number_text(engine.signal('batch_p95'))}, time per output token p95 {seconds_text(engine.signal('inter_token:0.95'))}"
    )
    return Step(
        "Verify",
        "do",
        f"headroom is back, latency stands, the batch grows, fewer timeouts and 503s ({now})",
        commands=(f"kvpressure mitigate --verify {engine.address or 'URL'}",),
    )
