"""The guide "Preventing KV Cache Pressure", item by item, checked against a deployment.

``cannot see`` is a result of its own: a manifest does not show whether anybody tests with long prompts. Where the
evidence qualifies a documented value, ``why`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvpressure.capacity import weights
from kvpressure.model import ceilings
from kvpressure.model.arguments import EngineArgs
from kvpressure.parsed import json_of, mapping
from kvpressure.printable import grouped
from kvpressure.toolbox.audit_container import container
from kvpressure.toolbox.audit_subject import OF_GIVEN, Fits, Given, Item, Result, Subject, fits, refusal


def checklist(subject: Subject) -> list[Item]:
    """All items in the guide's order."""
    return [item for section in _SECTIONS for item in section(subject)]


# --- the sections -----------------------------------------------------------------------------------------

_REQUESTS: Final = "1 request-level limits"
_CONCURRENCY: Final = "2 concurrency"
_BATCHING: Final = "3 batching"
_MEMORY: Final = "4 memory headroom"
_SIGNALS: Final = "5 signals"
_TRAFFIC: Final = "6 prompt and traffic shape"
_EXPLICIT: Final = "7 explicit and reviewable"
_LOAD: Final = "8 realistic load"
_NOW: Final = "right now"

_WHY_REQUESTS: Final = "long or unbounded prompts are the most common cause of KV cache pressure"


def _requests(s: Subject) -> Iterator[Item]:
    args = s.args
    length = args.max_model_len
    limit = f"{s.flag('max_model_len')} {length} ({s.dialect.title} answers 400 to longer prompts)" if length else None
    full = args.is_explicit("max_model_len") is False
    yield Item(
        "input_limit",
        _REQUESTS,
        "max input tokens enforced",
        "pass" if limit else "fail" if full else "cannot see",
        _WHY_REQUESTS,
        limit or (f"no {s.flag('max_model_len')}: prompts may use the model's whole context" if full else "not seen"),
        "" if limit else f"{s.flag('max_model_len')} {_length(s)}, and a limit on the request body at the gateway",
    )
    cap = _output_cap(args)
    capped_by = s.flag("override_generation_config")
    found = f"{capped_by} max_new_tokens {cap}" if cap else None
    yield Item(
        "output_limit",
        _REQUESTS,
        "max output tokens enforced for every request",
        "pass" if found else "cannot see",
        "a request without max_tokens may fill the whole context",
        found or "no limit seen; the gateway may have one",
        ""
        if found
        else f"{capped_by} '{{\"max_new_tokens\": 1024}}', or a cap at the gateway"
        if capped_by
        else "a cap at the gateway",
    )
    truncation = s.dialect.truncation
    truncates = bool(truncation) and truncation in json.dumps(dict(args.values))
    yield Item(
        "rejected_not_truncated",
        _REQUESTS,
        "too large requests are rejected, not truncated silently",
        "fail" if truncates else "pass",
        "a truncated prompt gives a wrong answer without an error",
        f"{truncation} is set"
        if truncates
        else f"{s.dialect.title} rejects prompts above the context length with HTTP 400"
        + (" (max_new_tokens shortens outputs silently)" if capped_by else ""),
        f"no {truncation}" if truncates else "",
    )
    yield Item(
        "bounded_streams",
        _REQUESTS,
        "streaming responses have bounded duration or tokens",
        "pass" if found else "cannot see",
        "an abandoned stream holds its KV blocks until it ends",
        found or "no timeout seen; the gateway may have one",
        "" if found else "HTTPRoute timeouts.request, or an output cap",
    )


_NO_CONTEXT: Final = "give --context TOKENS (prompt plus output of a usual request) to compute a value"


def _output_cap(args: EngineArgs) -> int | None:
    """``max_new_tokens`` of ``--override-generation-config``, which vLLM enforces for every request."""
    cap = mapping(json_of(args.values.get("override_generation_config") or "")).get("max_new_tokens")
    return ceilings.whole(cap, ceilings.LABEL, 1)


def _length(s: Subject) -> str:
    if s.context is None:
        return "LONGEST_REQUEST"
    step = int(s.thresholds["max_model_len_step_tokens"])
    return str(-(-int(s.context * s.thresholds["max_model_len_spare_ratio"]) // step) * step)


def _explicit(s: Subject, name: str) -> Result:
    return OF_GIVEN.get(s.given(name), "fail")


def _concurrency(s: Subject) -> Iterator[Item]:
    room, share = fits(s), s.thresholds["gpu_memory_utilization_recommended"]
    advised = fits(s, share)  # both values are to be set together
    seqs = s.limit("max_num_seqs")
    known = [
        (at, found.at_once)
        for at, found in (
            (f"at {s.option('gpu_memory_utilization')} {share:g} or less", advised),
            ("in the KV cache as it is", room),
        )
        if found is not None
    ]
    at, fitting = next(((at, number) for at, number in known if number), ("", 0))
    if fitting and s.context is None:  # a request of the model's whole context is no measure of usual ones
        advice = f"{s.flag('max_num_seqs')} N; {_NO_CONTEXT}"
    elif fitting:
        advice = f"{s.flag('max_num_seqs')} {fitting} (fits {at})"
    elif known:
        advice = f"a smaller {s.flag('max_model_len')}, a larger GPU or more GPUs: not one request of this length fits"
    else:
        advice = (
            f"{s.flag('max_num_seqs')} N; compute N with kvpressure capacity MODEL --gpu-memory SIZE --prompt TOKENS"
            " --output TOKENS"
        )
    result = _explicit(s, "max_num_seqs")
    yield Item(
        "max_num_seqs_explicit",
        _CONCURRENCY,
        f"{s.called('max_num_seqs')} is explicitly set",
        result,
        f"concurrency multiplies KV usage, and {s.dialect.title}'s default does not depend on your requests",
        s.found("max_num_seqs"),
        "" if result == "pass" else advice,
    )
    yield _derived(s, room, seqs, advice)
    yield _apart(s)


def _apart(s: Subject) -> Item:
    name = "separate_long_context"
    text = "separate deployments for long- and short-context traffic"
    why = "one long request takes the KV cache of many short ones"
    if s.seen is not None and s.seen.bimodal_prompts.value is not None:
        mixed = s.seen.bimodal_prompts
        advice = "a separate deployment for long prompts" if mixed.value else ""
        return Item(name, _CONCURRENCY, text, "fail" if mixed.value else "pass", why, mixed.text, advice)
    lengths = {other.args.max_model_len for other in s.siblings if other.args.model == s.args.model} | {
        s.args.max_model_len
    }
    apart = len(lengths - {None}) > 1
    return Item(
        name,
        _CONCURRENCY,
        text,
        "pass" if apart else "cannot see",
        why,
        f"deployments of the same model with {s.called('max_model_len')} {sorted(n for n in lengths if n)}"
        if apart
        else "one deployment of this model; kvpressure_prompt_lengths_bimodal shows mixed traffic",
    )


def _derived(s: Subject, room: Fits | None, seqs: float | None, advice: str) -> Item:
    name, text = "concurrency_from_memory", "concurrency is derived from GPU memory"
    why = f"if more requests run than the KV cache holds, they are {s.called('preempted')} and recomputed"
    refused = refusal(s)
    if refused is not None and s.seen is None:
        return Item(
            name,
            _CONCURRENCY,
            text,
            "fail",
            why,
            f"{s.dialect.title} does not start: {refused}",
            "parallel sizes that the model's heads allow",
        )
    if room is None or seqs is None:
        missing = [
            word
            for word, value in (
                ("the model (--model-config)", s.shape),
                ("the size of its weights", s.shape is None or weights.estimated(s.shape)),
                ("the GPU (--gpu NAME:GiB)", s.gpu),
                (s.called("max_model_len"), s.limit("max_model_len")),
                (s.called("max_num_seqs"), seqs),
            )
            if value is None
        ]
        return Item(
            name,
            _CONCURRENCY,
            text,
            "cannot see",
            why,
            f"unknown: {', '.join(missing) or 'the memory left for the KV cache'}",
            advice,
        )
    said = (
        f"{s.called('max_num_seqs')} {seqs:g}; the KV cache holds about {grouped(room.capacity_tokens)} tokens:"
        f" {room.full_length:.1f} requests of {s.called('max_model_len')}"
    )
    if room.full_length < 1 and s.seen is None:
        then = "does not start unless one fits" if s.dialect.one_request_fits else "rejects longer ones than fit"
        return Item(name, _CONCURRENCY, text, "fail", why, f"{said}; {s.dialect.title} {then}", advice)
    if room.stated is not None and s.context is not None:
        most = s.limit("max_model_len") or s.context
        said += f", {room.stated} of {min(s.context, most):.0f} tokens" + (
            f" (--context {s.context} is above {s.called('max_model_len')})" if s.context > most else ""
        )
        ok = seqs <= room.stated
        return Item(name, _CONCURRENCY, text, "pass" if ok else "fail", why, said, "" if ok else advice)
    ok = seqs <= room.full_length
    return Item(
        name,
        _CONCURRENCY,
        text,
        "pass" if ok else "cannot see",
        why,
        said + ("" if ok else "; the length of a usual request decides (--context TOKENS)"),
        "" if ok else _NO_CONTEXT,
    )


def _batching(s: Subject) -> Iterator[Item]:
    result, found = _explicit(s, "max_num_batched_tokens"), s.found("max_num_batched_tokens")
    tokens, seqs = s.args.max_num_batched_tokens, s.args.max_num_seqs
    best = s.default("max_num_batched_tokens")
    if s.dialect.step_holds_batch and seqs is not None:
        best = max(best or s.limit("max_num_batched_tokens") or 0.0, float(seqs))
    if s.dialect.step_holds_batch and tokens is not None and seqs is not None and tokens < seqs:
        result = "fail"
        found = f"{found}; below {s.called('max_num_seqs')} {seqs}: {s.dialect.title} does not start"
    flag = s.flag("max_num_batched_tokens")
    advice = f"{flag} N; N: the default of this version and GPU ({s.inputs})" if best is None else f"{flag} {best:.0f}"
    yield Item(
        "max_num_batched_tokens_explicit",
        _BATCHING,
        f"{s.option('max_num_batched_tokens')} is explicitly set",
        result,
        "it bounds peak activation memory and how long a prompt delays decoding; KV cache usage is bounded by"
        f" {s.called('max_num_seqs')}",
        found,
        "" if result == "pass" else advice,
    )
    yield _unseen(
        "batching_tested",
        _BATCHING,
        "batching limits are tested under peak prompt sizes",
        "a limit that is sufficient on average may fail at the peak",
        "kvpressure probe, or a load test with the longest prompts",
    )
    yield _unseen(
        "batch_monitored",
        _BATCHING,
        "batch effectiveness is monitored (p95, p99)",
        "a collapsing batch is the first sign of KV cache pressure",
        "deploy the exporter and its rules, which watch kvpressure_effective_batch_size",
    )


def _memory(s: Subject) -> Iterator[Item]:
    t, share = s.thresholds, s.limit("gpu_memory_utilization")
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    why = (
        "Documented: allocator overhead and fragmentation crash a GPU before its memory is full."
        " A lower value makes the KV pool smaller, so check with kvpressure capacity first that the load fits"
    )
    found = s.found("gpu_memory_utilization")
    if s.args.kv_cache_memory_bytes is not None:
        found += f"; {s.flag('kv_cache_memory_bytes')} sets the pool's size and overrides it"
    result: Result = "cannot see" if share is None else "pass" if share <= usual else "fail"
    if share is None and _explicit(s, "gpu_memory_utilization") == "fail":
        result = "fail"
    hidden = s.args.is_explicit("gpu_memory_utilization") is None and s.seen is None
    if hidden:
        result = "cannot see"
    yield Item(
        "gpu_memory_utilization",
        _MEMORY,
        f"{s.option('gpu_memory_utilization')} is at most {usual:g}",
        result,
        why,
        found,
        "" if result == "pass" else f"{s.flag('gpu_memory_utilization')} {usual:g}",
    )
    safe = share is not None and share <= lower and not hidden
    result = "pass" if safe else "fail" if s.demanding and share is not None and not hidden else "cannot see"
    yield Item(
        "gpu_memory_utilization_demanding",
        _MEMORY,
        f"at most {lower:g} for long-context or bursty load",
        result,
        why,
        found + ("" if s.demanding or safe else "; load type unknown (--demanding)"),
        "" if safe else f"{s.flag('gpu_memory_utilization')} {lower:g} if it is",
    )
    yield _unseen(
        "headroom_validated",
        _MEMORY,
        "headroom is validated under peak traffic",
        "an average hides the peak",
        "check kvpressure_kv_cache_used_ratio_max and kvpressure_gpu_memory_demand_ratio in the busiest hour",
    )


@dataclass(frozen=True, slots=True)
class _Metrics:
    """Whether the server's metrics are scraped, by what, and what else to do. ``off``: the switch that is missing or
    too much, "" = on.
    """

    result: Result
    found: str
    fix: str
    off: str


def _metrics(s: Subject) -> _Metrics:
    exporter = s.seen.exporter if s.seen is not None else None
    scraped = exporter or ("prometheus.io/scrape annotation" if s.server.scrape_annotation else None)
    if s.dialect.silent(s.args):
        how, _, switch = s.dialect.metrics_switch.partition(" ")
        off, fix = (f"no {switch}", f"add {switch}") if how == "with" else (switch, f"remove {switch}")
        return _Metrics("fail", f"{off}: {s.dialect.title} publishes no metrics", fix, off)
    if scraped:
        return _Metrics("pass", scraped, "", "")
    return _Metrics(
        "cannot see",
        "no scrape configuration seen",
        "a PodMonitor, a ServiceMonitor or the kvpressure exporter",
        "",
    )


def _signals(s: Subject) -> Iterator[Item]:
    why = "under KV cache pressure, memory is high and compute is low; GPU utilization alone is misleading"
    engine = _metrics(s)
    gpu = s.seen.exporter if s.seen is not None and s.seen.gpus_watched else None
    yield Item(
        "observe_gpu_memory",
        _SIGNALS,
        "GPU memory utilization",
        "pass" if gpu else "cannot see",
        why,
        gpu or "no GPU exporter seen",
        "" if gpu else "the kvpressure exporter (or DCGM's) on the node",
    )
    for name, text in (
        ("observe_batch", "effective batch size (p95)"),
        ("observe_latency", "p95 / p99 request latency"),
        ("observe_active", "active sequences, requests in flight"),
    ):
        yield Item(name, _SIGNALS, text, engine.result, why, engine.found, engine.fix)


def _traffic(s: Subject) -> Iterator[Item]:
    why = "the shape of traffic matters more than requests per second"
    metrics, title = _metrics(s), s.dialect.title
    found = f"{title}'s histograms, {metrics.found}" if metrics.result == "pass" else metrics.off or metrics.found
    fix = metrics.fix if metrics.off else f"scrape {title}, or deploy the exporter (kvpressure_request_tokens)"
    for name, text in (
        ("prompt_lengths", "prompt length distribution is tracked"),
        ("max_tokens", "max_tokens distribution is tracked"),
    ):
        yield Item(
            name,
            _TRAFFIC,
            text,
            metrics.result,
            why,
            found,
            "" if metrics.result == "pass" else fix,
        )
    yield _bursts(s, why)
    yield _unseen(
        "rag_chunks",
        _TRAFFIC,
        "RAG chunk sizes are bounded",
        why,
        "bound them in the application that builds the prompts",
    )


def _bursts(s: Subject, why: str) -> Item:
    text, advice = "bursty traffic patterns are identified", "check kvpressure_arrival_burst_ratio over a week"
    if s.seen is None or s.seen.bursts.value is None:
        return _unseen("bursts", _TRAFFIC, text, why, advice)
    if s.seen.exporter is not None:
        return Item("bursts", _TRAFFIC, text, "pass", why, f"{s.seen.bursts.text}; the exporter tracks it")
    return Item("bursts", _TRAFFIC, text, "cannot see", why, s.seen.bursts.text, advice)


def _now(s: Subject) -> Iterator[Item]:
    """Items about conditions of a running server; none for a manifest."""
    for name, value in sorted(s.seen.conditions.items()) if s.seen is not None else ():
        result: Result = "cannot see" if value is None else "fail" if value else "pass"
        yield Item(
            f"condition_{name}",
            _NOW,
            f"no {name.replace('_', ' ')}",
            result,
            "a condition that holds now points to a missing limit",
            "unknown" if value is None else "holds now" if value else "does not hold",
            "run kvpressure diagnose" if value else "",
        )


def _reviewable(s: Subject) -> Iterator[Item]:
    misspelt = s.dialect.misspelt(s.args.explicit)
    if misspelt:
        yield Item(
            "options_known",
            _EXPLICIT,
            f"every option is one of {s.dialect.title}'s",
            "fail",
            f"{s.dialect.title} does not start with an option that it does not have",
            ", ".join(f"{s.flag(name)} (did you mean {s.flag(meant)}?)" for name, meant in misspelt.items()),
            ", ".join(s.flag(meant) for meant in misspelt.values()),
        )
    why = "limits that are not written down are rediscovered during incidents"
    for name, text, limits in (
        ("token_limits_documented", "token limits are documented", ("max_model_len",)),
        (
            "concurrency_limits_documented",
            "concurrency limits are documented",
            ("max_num_seqs", "max_num_batched_tokens"),
        ),
        ("memory_targets_documented", "GPU memory targets are documented", ("gpu_memory_utilization",)),
    ):
        results = {limit: _explicit(s, limit) for limit in limits}
        result: Result = (
            "fail" if "fail" in results.values() else "cannot see" if "cannot see" in results.values() else "pass"
        )
        yield Item(
            name,
            _EXPLICIT,
            text,
            result,
            why,
            _which_are_set(s, results),
            "" if result == "pass" else "set them in the manifest, even to their defaults",
        )
    yield _unseen(
        "reviewed",
        _EXPLICIT,
        "limits are reviewed before production rollout",
        why,
        "run kvpressure audit in CI",
    )


def _load(_s: Subject) -> Iterator[Item]:
    why = "most KV cache failures appear only under realistic traffic"
    for name, text, advice in (
        ("load_long_prompts", "load tests include long prompts", "step 4 of kvpressure probe, or your own load test"),
        ("load_bursts", "load tests include burst scenarios", "step 3 of kvpressure probe, or your own load test"),
        (
            "load_kv_observed",
            "KV cache behaviour is observed during tests",
            "run kvpressure record during the test, and kvpressure replay after it",
        ),
    ):
        yield _unseen(name, _LOAD, text, why, advice)


def _which_are_set(s: Subject, results: Mapping[str, Result]) -> str:
    """The limits that are not set, not accepted or not visible."""
    parts: tuple[tuple[str, Given], ...] = (
        ("not set", "not set"),
        (f"{s.dialect.title} does not accept its value", "refused"),
        ("set to no limit", "no number"),
        ("not visible", "not visible"),
    )
    named = ((text, [s.called(name) for name in results if s.given(name) == given]) for text, given in parts)
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in named if names) or "all set"


def _unseen(name: str, section: str, text: str, why: str, advice: str) -> Item:
    return Item(name, section, text, "cannot see", why, "cannot be seen from here", advice)


_SECTIONS: Final[tuple[Callable[[Subject], Iterator[Item]], ...]] = (
    _requests,
    _concurrency,
    _batching,
    _memory,
    _signals,
    _traffic,
    _reviewable,
    _load,
    container,
    _now,
)
