"""The guide "Preventing KV Cache Pressure", item by item, checked against a deployment.

``cannot see`` is a result of its own: a manifest does not show whether anybody tests with long prompts. Where the
evidence qualifies a documented value, ``why`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Final

from kvpressure.capacity import weights
from kvpressure.engines.base import option
from kvpressure.model import ceilings
from kvpressure.model.arguments import GIB, EngineArgs, context_limit, value_text
from kvpressure.model.state import Found
from kvpressure.parsed import json_of, mapping
from kvpressure.printable import grouped, say
from kvpressure.toolbox.audit_subject import OF_GIVEN, Fits, Given, Item, Subject, fits, refusal, request_bytes


def checklist(subject: Subject) -> dict[str, list[Item]]:
    """The items of each section, in the guide's order."""
    return {title: items for title, section in _SECTIONS.items() if (items := list(section(subject)))}


# --- the sections -----------------------------------------------------------------------------------------


def _requests(s: Subject) -> Iterator[Item]:
    args = s.args
    length = args.max_model_len
    limit = f"{s.flag('max_model_len')} {length} ({s.dialect.title} answers 400 to longer prompts)" if length else None
    full = args.is_explicit("max_model_len") is False
    yield Item(
        Found(
            "input_limit",
            True if limit else False if full else None,
            limit
            or (f"no {s.flag('max_model_len')}: prompts may use the model's whole context" if full else "not seen"),
        ),
        "max input tokens enforced",
        "long or unbounded prompts are the most common cause of KV cache pressure",
        f"{s.flag('max_model_len')} {_length(s)}, and a limit on the request body at the gateway",
    )
    cap = _output_cap(args)
    capped_by = s.flag("override_generation_config")
    found = f"{capped_by} max_new_tokens {cap}" if cap else None
    yield Item(
        Found("output_limit", True if found else None, found or "no limit seen; the gateway may have one"),
        "max output tokens enforced for every request",
        "a request without max_tokens may fill the whole context",
        f"{capped_by} '{{\"max_new_tokens\": 1024}}', or a cap at the gateway" if capped_by else "a cap at the gateway",
    )
    truncation = s.dialect.truncation
    truncates = bool(truncation) and truncation in json.dumps(dict(args.values))
    yield Item(
        Found(
            "rejected_not_truncated",
            not truncates,
            f"{truncation} is set"
            if truncates
            else f"{s.dialect.title} rejects prompts above the context length with HTTP 400"
            + (" (max_new_tokens shortens outputs silently)" if capped_by else ""),
        ),
        "too large requests are rejected, not truncated silently",
        "a truncated prompt gives a wrong answer without an error",
        f"no {truncation}",
    )
    yield Item(
        Found("bounded_streams", True if found else None, found or "no timeout seen; the gateway may have one"),
        "streaming responses have bounded duration or tokens",
        "an abandoned stream holds its KV blocks until it ends",
        "HTTPRoute timeouts.request, or an output cap",
    )


_NO_CONTEXT: Final = "give --context TOKENS (prompt plus output of a usual request) to compute a value"


def _output_cap(args: EngineArgs) -> int | None:
    """``max_new_tokens`` of ``--override-generation-config``, which vLLM enforces for every request."""
    cap = mapping(json_of(args.values.get("override_generation_config") or "")).get("max_new_tokens")
    return ceilings.whole(cap, ceilings.LABEL, 1)


def _length(s: Subject) -> str:
    return "LONGEST_REQUEST" if s.context is None else str(context_limit(s.context, s.thresholds))


def _explicit(s: Subject, name: str) -> bool | None:
    return OF_GIVEN.get(s.given(name), False)


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
        Found("max_num_seqs_explicit", result, s.found("max_num_seqs")),
        f"{s.called('max_num_seqs')} is explicitly set",
        f"concurrency multiplies KV usage, and {s.dialect.title}'s default does not depend on your requests",
        advice,
    )
    yield _derived(s, room, seqs, advice)
    yield _apart(s)


def _apart(s: Subject) -> Item:
    name = "separate_long_context"
    text = "separate deployments for long- and short-context traffic"
    why = "one long request takes the KV cache of many short ones"
    lengths = {other.args.max_model_len for other in s.siblings if other.args.model == s.args.model} | {
        s.args.max_model_len
    }
    apart = len(lengths - {None}) > 1
    return Item(
        Found(
            name,
            True if apart else None,
            f"deployments of the same model with {s.called('max_model_len')} {sorted(n for n in lengths if n)}"
            if apart
            else "one deployment of this model; kvpressure_prompt_lengths_bimodal shows mixed traffic",
        ),
        text,
        why,
    )


def _derived(s: Subject, room: Fits | None, seqs: float | None, advice: str) -> Item:
    name, text = "concurrency_from_memory", "concurrency is derived from GPU memory"
    why = f"if more requests run than the KV cache holds, they are {s.called('preempted')} and recomputed"
    refused = refusal(s)
    if refused is not None:
        return Item(
            Found(name, False, f"{s.dialect.title} does not start: {refused}"),
            text,
            why,
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
            Found(name, None, f"unknown: {', '.join(missing) or 'the memory left for the KV cache'}"),
            text,
            why,
            advice,
        )
    said = (
        f"{s.called('max_num_seqs')} {seqs:g}; the KV cache holds about {grouped(room.capacity_tokens)} tokens:"
        f" {room.full_length:.1f} requests of {s.called('max_model_len')}"
    )
    if room.full_length < 1:
        then = "does not start unless one fits" if s.dialect.one_request_fits else "rejects longer ones than fit"
        return Item(Found(name, False, f"{said}; {s.dialect.title} {then}"), text, why, advice)
    if room.stated is not None and s.context is not None:
        most = s.limit("max_model_len") or s.context
        said += f", {room.stated} of {min(s.context, most):.0f} tokens" + (
            f" (--context {s.context} is above {s.called('max_model_len')})" if s.context > most else ""
        )
        ok = seqs <= room.stated
        return Item(Found(name, ok, said), text, why, advice)
    ok = seqs <= room.full_length
    return Item(
        Found(
            name,
            True if ok else None,
            said + ("" if ok else "; the length of a usual request decides (--context TOKENS)"),
        ),
        text,
        why,
        _NO_CONTEXT,
    )


def _batching(s: Subject) -> Iterator[Item]:
    result, found = _explicit(s, "max_num_batched_tokens"), s.found("max_num_batched_tokens")
    tokens, seqs = s.args.max_num_batched_tokens, s.args.max_num_seqs
    best = s.default("max_num_batched_tokens")
    if s.dialect.step_holds_batch and seqs is not None:
        best = max(best or s.limit("max_num_batched_tokens") or 0.0, float(seqs))
    if s.dialect.step_holds_batch and tokens is not None and seqs is not None and tokens < seqs:
        result = False
        found = f"{found}; below {s.called('max_num_seqs')} {seqs}: {s.dialect.title} does not start"
    flag = s.flag("max_num_batched_tokens")
    advice = f"{flag} N; N: the default of this version and GPU ({s.inputs})" if best is None else f"{flag} {best:.0f}"
    yield Item(
        Found("max_num_batched_tokens_explicit", result, found),
        f"{s.option('max_num_batched_tokens')} is explicitly set",
        "it bounds peak activation memory and how long a prompt delays decoding; KV cache usage is bounded by"
        f" {s.called('max_num_seqs')}",
        advice,
    )
    yield _unseen(
        "batching_tested",
        "batching limits are tested under peak prompt sizes",
        "a limit that is sufficient on average may fail at the peak",
        "kvpressure probe, or a load test with the longest prompts",
    )
    yield _unseen(
        "batch_monitored",
        "batch effectiveness is monitored (p95, p99)",
        "a collapsing batch is the first sign of KV cache pressure",
        "deploy the exporter and its rules, which watch kvpressure_effective_batch_size",
    )


_SMALLER_POOL: Final = "on a real vLLM, a smaller KV pool meant more preemptions; set it if memory allocations fail"


def _memory(s: Subject) -> Iterator[Item]:
    t, share = s.thresholds, s.limit("gpu_memory_utilization")
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    why = "Documented: allocator overhead and fragmentation crash a GPU before its memory is full"
    against = _SMALLER_POOL if share is not None else ""
    found = s.found("gpu_memory_utilization")
    if s.args.kv_cache_memory_bytes is not None:
        found += f"; {s.flag('kv_cache_memory_bytes')} sets the pool's size and overrides it"
    result: bool | None = None if share is None else share <= usual
    if share is None and _explicit(s, "gpu_memory_utilization") is False:
        result = False
    hidden = s.args.is_explicit("gpu_memory_utilization") is None
    if hidden:
        result = None
    yield Item(
        Found("gpu_memory_utilization", result, found),
        f"{s.option('gpu_memory_utilization')} is at most {usual:g}",
        why,
        f"{s.flag('gpu_memory_utilization')} {usual:g}",
        against,
    )
    safe = share is not None and share <= lower and not hidden
    result = True if safe else False if s.demanding and share is not None and not hidden else None
    yield Item(
        Found(
            "gpu_memory_utilization_demanding",
            result,
            found + ("" if s.demanding or safe else "; load type unknown (--demanding)"),
        ),
        f"at most {lower:g} for long-context or bursty load",
        why,
        f"{s.flag('gpu_memory_utilization')} {lower:g}",
        against,
    )
    yield _unseen(
        "headroom_validated",
        "headroom is validated under peak traffic",
        "an average hides the peak",
        "check kvpressure_kv_cache_used_ratio_max and kvpressure_gpu_memory_demand_ratio in the busiest hour",
    )
    yield from _tier(s)


def _tier(s: Subject) -> Iterator[Item]:
    """Whether a KV tier is one, and holds a request; nothing where none is asked for."""
    mistake, tier, request = s.dialect.tier_mistake(s.args), s.dialect.tier(s.args, None), request_bytes(s)
    if not mistake and not tier.configured:
        return
    result, found, advice = (False, mistake, "") if mistake else (None, "size or model unknown", "")
    if not mistake and tier.size is not None and request is not None:
        length, size = request
        result = True if tier.size >= size else False if s.context is not None else None
        found = f"{say(tier.size, 'bytes')} for requests of {length} tokens, {say(size, 'bytes')} each"
        advice = s.dialect.tier_flags["add"].format(gib=ceil(size / GIB)) + " or more"
    yield Item(
        Found("kv_tier", result, found),
        "the KV tier in host memory holds at least one request",
        "a tier smaller than a session evicts it before its next turn: it costs copies and gives nothing back",
        advice,
    )


def _scraped(s: Subject, *items: tuple[str, str], why: str) -> Iterator[Item]:
    """Items, by name and text, that hold where the server's metrics are scraped."""
    result, found, fix = (
        None,
        "no scrape configuration seen",
        "a PodMonitor, a ServiceMonitor or the kvpressure exporter",
    )
    if s.dialect.silent(s.args):
        how, _, switch = s.dialect.metrics_switch.partition(" ")
        off, fix = (f"no {switch}", f"add {switch}") if how == "with" else (switch, f"remove {switch}")
        result, found = False, f"{off}: {s.dialect.title} publishes no metrics"
    elif s.server.scrape_annotation:
        result, found, fix = True, "prometheus.io/scrape annotation", ""
    return (Item(Found(name, result, found), text, why, fix) for name, text in items)


def _signals(s: Subject) -> Iterator[Item]:
    why = "under KV cache pressure, memory is high and compute is low; GPU utilization alone is misleading"
    exporter = "the kvpressure exporter (or DCGM's) on the node"
    yield _unseen("observe_gpu_memory", "GPU memory utilization", why, exporter)
    yield from _scraped(
        s,
        ("observe_batch", "effective batch size (p95)"),
        ("observe_latency", "p95 / p99 request latency"),
        ("observe_active", "active sequences, requests in flight"),
        why=why,
    )


def _traffic(s: Subject) -> Iterator[Item]:
    why = "the shape of traffic matters more than requests per second"
    yield from _scraped(
        s,
        ("prompt_lengths", "prompt length distribution is tracked"),
        ("max_tokens", "max_tokens distribution is tracked"),
        why=why,
    )
    yield _unseen(
        "bursts",
        "bursty traffic patterns are identified",
        why,
        "check kvpressure_arrival_burst_ratio over a week",
    )
    yield _unseen(
        "rag_chunks",
        "RAG chunk sizes are bounded",
        why,
        "bound them in the application that builds the prompts",
    )


def _reviewable(s: Subject) -> Iterator[Item]:
    misspelt = s.dialect.options.misspelt(s.args.explicit)
    if misspelt:
        yield Item(
            Found(
                "options_known",
                False,
                ", ".join(f"{option(name)} (did you mean {s.flag(meant)}?)" for name, meant in misspelt.items()),
            ),
            f"every option is one of {s.dialect.title}'s",
            f"{s.dialect.title} does not start with an option that it does not have",
            ", ".join(s.flag(meant) for meant in misspelt.values()),
        )
    why = "limits that are not written down are rediscovered during incidents"
    share = s.limit("gpu_memory_utilization")
    in_force = f"{s.flag('gpu_memory_utilization')} {'N' if share is None else value_text(share)}"
    for name, text, limits, advice in (
        ("token_limits_documented", "token limits are documented", ("max_model_len",), "as above"),
        (
            "concurrency_limits_documented",
            "concurrency limits are documented",
            ("max_num_seqs", "max_num_batched_tokens"),
            "as above",
        ),
        ("memory_targets_documented", "GPU memory targets are documented", ("gpu_memory_utilization",), in_force),
    ):
        results = {limit: _explicit(s, limit) for limit in limits}
        result: bool | None = False if False in results.values() else None if None in results.values() else True
        yield Item(Found(name, result, _which_are_set(s, results)), text, why, advice)
    yield _unseen(
        "reviewed",
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
        yield _unseen(name, text, why, advice)


def _which_are_set(s: Subject, results: Mapping[str, bool | None]) -> str:
    """The limits that are not set, not accepted or not visible."""
    parts: tuple[tuple[str, Given], ...] = (
        ("not set", "not set"),
        (f"{s.dialect.title} does not accept its value", "refused"),
        ("set to no limit", "no number"),
        ("not visible", "not visible"),
    )
    named = ((text, [s.called(name) for name in results if s.given(name) == given]) for text, given in parts)
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in named if names) or "all set"


def _unseen(name: str, text: str, why: str, advice: str) -> Item:
    return Item(Found(name, None, "cannot be seen from here"), text, why, advice)


_SECTIONS: Final[Mapping[str, Callable[[Subject], Iterator[Item]]]] = {
    "1 request-level limits": _requests,
    "2 concurrency": _concurrency,
    "3 batching": _batching,
    "4 memory headroom": _memory,
    "5 signals": _signals,
    "6 prompt and traffic shape": _traffic,
    "7 explicit and reviewable": _reviewable,
    "8 realistic load": _load,
}
