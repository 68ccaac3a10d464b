"""Reads one line of a vLLM log as an event with its numbers.

Pure. The texts are those of vLLM 0.5.5 to 0.33 (V0, V1 and the Rust frontend); only the message is matched, never the
prefix. Ratios are 0-1, times seconds. A line without any keyword costs about a microsecond; only the first
``MAX_LINE`` characters are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from kvpressure.engines.vllm.arguments import from_log, parse_logged
from kvpressure.model import ceilings
from kvpressure.model.log_events import MAX_LINE, LogEvent
from kvpressure.parsed import json_of, mapping

Values = dict[str, float | str]


# --- prefixes ---------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_PROCESS = re.compile(r"^\([A-Za-z][\w .:-]{0,60}?pid=\d{1,10}\) ")
_LEVEL = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,9})? "
    r"\[?[\w./-]{1,80}:\d{1,6}\] ?"
)
_PREFIX_REACH = 240  # VLLM_LOGGING_PREFIX may precede the level


def strip(line: str) -> str:
    """The message of a log line without JSON wrapper, ANSI colours, process name, level, time and file; at most
    ``MAX_LINE`` characters.
    """
    text = line[:MAX_LINE].rstrip("\r\n")
    if text.startswith("{"):
        text = _json_message(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    level = _LEVEL.search(text, 0, _PREFIX_REACH)
    if level is not None:
        return text[level.end() :]
    return _PROCESS.sub("", text, count=1)


def _json_message(text: str) -> str:
    document = mapping(json_of(text))
    said = (document.get(key) for key in ("message", "msg", "log"))
    return next((message.rstrip("\n") for message in said if isinstance(message, str)), text)


# --- numbers ----------------------------------------------------------------------------------------------

_UNITS: Final = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(-?[\d.]{1,20}) ?(bytes|B|[KMGT]iB)"


def _number(text: str) -> float | None:
    return ceilings.number_in(text.replace(",", ""), ceilings.WORK, -ceilings.WORK)


def _collect(match: re.Match[str] | None, scale: Mapping[str, float]) -> Values:
    """Named groups of ``match`` as numbers; ``scale`` gives factors for some names."""
    values: Values = {}
    if match is None:
        return values
    for name, text in match.groupdict().items():
        number = None if text is None else _number(text)
        if number is not None:
            values[name] = number * scale.get(name, 1)
    return values


def _search(pattern: str, **scale: float) -> Callable[[str], Values | None]:
    """A parser whose pattern must match; groups ending in ``_bytes`` are converted from GiB to bytes."""
    regex = re.compile(pattern)
    factors = {name: 2.0**30 for name in regex.groupindex if name.endswith("bytes")} | scale

    def parse(line: str) -> Values | None:
        match = regex.search(line)
        return None if match is None else _collect(match, factors)

    return parse


def _always(_line: str) -> Values:
    return {}


# --- single events ----------------------------------------------------------------------------------------

_OOM = re.compile(r"\b(CUDA|HIP|XPU|NPU)(?: error:)? out of memory\b")
_OOM_PARTS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("requested_bytes", rf"Tried to allocate {_SIZE}"),
        ("total_bytes", rf"has a total capaci?ty of {_SIZE}"),  # torch 2.1 has a misprint
        ("free_bytes", rf"of which {_SIZE} is free"),
        ("allocated_bytes", rf"{_SIZE} is allocated by PyTorch"),
        ("private_pool_bytes", rf"with {_SIZE} allocated in private pools"),
        ("reserved_unallocated_bytes", rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    )
)
_OLD_OOM_PARTS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (  # torch up to 2.0, torch_npu
        ("requested_bytes", rf"Tried to allocate {_SIZE}"),
        ("total_bytes", rf"; {_SIZE} total capacity"),
        ("free_bytes", rf"; {_SIZE} free"),
        ("allocated_bytes", rf"; {_SIZE} already allocated"),
        ("reserved_bytes", rf"; {_SIZE} reserved in total by PyTorch"),
    )
)


def _sizes(line: str, parts: tuple[tuple[str, re.Pattern[str]], ...]) -> Values:
    values: Values = {}
    for name, regex in parts:
        match = regex.search(line)
        number = None if match is None else _number(match[1])
        if match is not None and number is not None:
            values[name] = number * _UNITS[match[2]]
    return values


def _oom(line: str) -> Values | None:
    match = _OOM.search(line)
    if match is None:
        return None
    figures = _sizes(line, _OLD_OOM_PARTS if " total capacity; " in line else _OOM_PARTS)
    reserved, allocated = figures.pop("reserved_bytes", None), figures.get("allocated_bytes")
    if isinstance(reserved, float) and isinstance(allocated, float):
        figures["reserved_unallocated_bytes"] = max(0.0, reserved - allocated)
    return {"runtime": match[1], **figures}


def _warmup(line: str) -> Values:
    match = re.search(r"when warming up (sampler|pooler)(?: with (\d{1,9}) dummy requests)?", line)
    if match is None:
        return {}
    return {"stage": match[1]} | ({} if match[2] is None else {"dummy_requests": float(match[2])})


_CONTEXT_V1 = re.compile(
    r"max seq len \((?P<max_model_len>\d{1,12})\), \((?P<needed_bytes>[\d.]+) GiB KV cache is needed, which is larger "
    r"than the available KV cache memory \((?P<available_bytes>-?[\d.]+) GiB\)"
)
_CONTEXT_ESTIMATE = re.compile(r"estimated maximum model length is (?P<estimated_max_model_len>\d{1,12})")
_CONTEXT_V0 = re.compile(
    r"max seq len \((?P<max_model_len>\d{1,12})\) is larger than the maximum number of tokens that can be stored in KV "
    r"cache \((?P<capacity_tokens>\d{1,12})\)"
)


def _context(line: str) -> Values | None:
    match = _CONTEXT_V1.search(line) or _CONTEXT_V0.search(line)
    if match is None:
        return None
    values = _collect(match, {"needed_bytes": 2.0**30, "available_bytes": 2.0**30})
    return values | _collect(_CONTEXT_ESTIMATE.search(line), {})


def _preemption(line: str) -> Values | None:
    match = re.search(
        r"is preempted by (?:PreemptionMode\.)?(\w{1,40}) mode because there is not enough KV cache", line
    )
    if match is None:
        return None
    return {"mode": match[1].lower()} | _collect(
        re.search(r"total_num_cumulative_preemption=(?P<cumulative>\d{1,15})", line), {}
    )


_STATS_PARTS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"Avg prompt (?:throughput|tput): (?P<prompt_rate>[\d.]+) tok",
        r"Avg generation (?:throughput|tput): (?P<generation_rate>[\d.]+) tok",
        r"Running: (?P<running>\d{1,9})\b",
        r"(?:Waiting|Pending): (?P<waiting>\d{1,9})\b",
        r"Swapped: (?P<swapped>\d{1,9}) reqs",
        r"Deferred: (?P<deferred>\d{1,9}) reqs",
        r"Preemptions: (?P<preemptions>\d{1,9})",
        r", (?!CPU KV cache usage: [\d.]+%\.)[A-Z]+ KV cache (?:usage|used): (?P<kv_usage>-?[\d.]+)%",
        r"CPU KV cache usage: (?P<cpu_kv_usage>[\d.]+)%\.",
        r"Prefix cache hit rate: (?P<prefix_hit_ratio>[\d.]+)%",
        r"Engine (?P<engine>\d{3}): ",
        r"(?P<engines>\d{1,5}) Engines Aggregated: ",
    )
)
_PERCENT: Final = {"kv_usage": 0.01, "cpu_kv_usage": 0.01, "prefix_hit_ratio": 0.01}


def _stats(line: str) -> Values | None:
    """The periodic line of V0, V1 or the Rust frontend; parts that a version omits are missing."""
    values: Values = {}
    for regex in _STATS_PARTS:
        values.update(_collect(regex.search(line), _PERCENT))
    if not {"running", "waiting", "kv_usage"} <= values.keys():
        return None
    values["flavour"] = "v0" if "Pending: " in line else "rust" if "Reqs Running: " in line else "v1"
    return values


_CAPACITY_PARTS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b[A-Z]+(?: \+ host)? KV cache size: (?P<tokens>[\d,]{1,20}) tokens",
        r"Maximum concurrency for (?P<max_model_len>[\d,]{1,20}) tokens per request: (?P<max_concurrency>[\d.]+)x",
        r"# \w{1,20} blocks: (?P<device_blocks>\d{1,12})",
        r", # CPU blocks: (?P<cpu_blocks>\d{1,12})",
    )
)


def _capacity(line: str) -> Values | None:
    values: Values = {}
    for regex in _CAPACITY_PARTS:
        values.update(_collect(regex.search(line), {}))
    return values or None


def _pool(line: str) -> Values | None:
    match = re.search(r"Available KV cache memory: (-?[\d.]+) GiB", line)
    number = None if match is None else _number(match[1])
    if number is None:
        return None
    return {"bytes": number * 2.0**30} if number >= 0 else {"shortfall_bytes": -number * 2.0**30}


_BREAKDOWN_PARTS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("consumed_bytes", rf"Actual usage is {_SIZE} for consumed memory"),
        ("weights_bytes", rf"(?:Actual usage is|model weights take) {_SIZE}(?: for weight\b|;)"),
        ("activation_bytes", rf"{_SIZE} for peak activation"),
        ("activation_bytes", rf"activation peak memory takes {_SIZE}"),
        ("non_torch_bytes", rf"{_SIZE} for non-torch memory"),
        ("non_torch_bytes", rf"non_torch_memory takes {_SIZE}"),
        ("graphs_bytes", rf"{_SIZE} for CUDAGraph memory"),
        ("kv_bytes", rf"Current kv cache memory in use is {_SIZE}"),
        ("kv_bytes", rf"the rest of the memory reserved for KV Cache is {_SIZE}"),
    )
)


def _breakdown(line: str) -> Values | None:
    return _sizes(line, _BREAKDOWN_PARTS) or None


def _args(line: str) -> Values | None:
    form, arguments = parse_logged(line)
    if form is None:
        return None
    values: Values = {"form": form}
    for name, text in arguments.items():
        if text is not None:
            number = _number(text) if text[:1].isdigit() else None
            values[name] = text if number is None else number
    return values


_CONFIG: Final = {
    "version": r"LLM engine \(v([^)]{1,60})\)",
    "model": r"\bmodel='([^']{1,300})'",
    "max_model_len": r"\bmax_seq_len=(\d+)",
    "tensor_parallel_size": r"\btensor_parallel_size=(\d+)",
    "pipeline_parallel_size": r"\bpipeline_parallel_size=(\d+)",
    "data_parallel_size": r"\bdata_parallel_size=(\d+)",
    "decode_context_parallel_size": r"\bdecode_context_parallel_size=(\d+)",
    "kv_cache_dtype": r"\bkv_cache_dtype=([\w.-]{1,40})",
    "served_model_name": r"\bserved_model_name=([^,)]{1,300})",
    "enable_prefix_caching": r"\benable_prefix_caching=(True|False)",
    "enable_chunked_prefill": r"\benable_chunked_prefill=(True|False)",
}
_CONFIG_PARTS: Final = {name: re.compile(pattern) for name, pattern in _CONFIG.items()}


def _engine_config(line: str) -> Values | None:
    values: Values = {}
    for name, regex in _CONFIG_PARTS.items():
        match = regex.search(line)
        if match is not None:
            number = _number(match[1]) if match[1].isdigit() else None
            values[name] = match[1] if number is None else number
    return values if "version" in values else None


# --- the table --------------------------------------------------------------------------------------------

# (keyword, event, parser): the first row whose keyword is in the line and whose parser accepts it wins.
_TABLE: Final[tuple[tuple[str, str, Callable[[str], Values | None]], ...]] = (
    ("out of memory occurred when warming up", "warmup_oom", _warmup),
    ("out of memory", "cuda_oom", _oom),
    ("not enough GPU memory", "load_oom", _search(r"Failed to load model - not enough GPU memory")),
    ("No available memory for the cache blocks", "no_kv_blocks", _always),
    ("max seq len (", "context_too_long", _context),
    (
        "less than desired GPU memory utilization",
        "memory_profiling_failed",
        _search(
            r"\((?P<free_bytes>[\d.]{1,20})/(?P<total_bytes>[\d.]{1,20}) GiB\) on startup is less than desired GPU"
            r" memory "
            r"utilization \((?P<utilization>[\d.]{1,20}), (?P<desired_bytes>[\d.]{1,20}) GiB\)"
        ),
    ),
    ("Error in memory profiling", "memory_profiling_failed", _always),
    ("node running low on memory", "host_oom", _always),
    ("is preempted by", "preemption", _preemption),
    ("EngineCore encountered", "engine_dead", _always),
    ("EngineDeadError", "engine_dead", _always),
    ("ngine core initialization failed", "start_failed", _always),
    ("EngineCore failed to start", "start_failed", _always),
    (
        "block found in",
        "broadcast_wait",
        _search(r"No available (?:shared memory broadcast )?block found in (?P<seconds>\d{1,9}) second"),
    ),
    ("Running: ", "stats", _stats),
    (
        "Iteration(",
        "iteration",
        _search(
            r"Iteration\((?P<index>\d{1,15})\): (?P<context_requests>\d{1,9}) context requests, "
            r"(?P<context_tokens>\d{1,12}) context tokens, (?P<generation_requests>\d{1,9}) generation requests, "
            r"(?P<generation_tokens>\d{1,12}) generation tokens, iteration elapsed time: (?P<elapsed_seconds>[\d.]+) ms"
            r"(?: \(dummy\))?(?:, [A-Z]+ KV cache usage: (?P<kv_usage>[\d.]+)%)?",
            elapsed_seconds=0.001,
            kv_usage=0.01,
        ),
    ),
    (" KV cache size: ", "capacity", _capacity),
    ("Maximum concurrency for ", "capacity", _capacity),
    (" blocks: ", "capacity", _capacity),
    ("Available KV cache memory: ", "pool_bytes", _pool),
    (
        "Model loading took ",
        "weights_bytes",
        _search(r"Model loading took (?P<bytes>[\d.]+) GiB(?: memory)?(?: and (?P<seconds>[\d.]+) seconds)?"),
    ),
    (
        "Loading model weights took ",
        "weights_bytes",
        _search(r"Loading model weights took (?P<bytes>[\d.]+) GB"),  # "GB", yet divided by 2**30
    ),
    (
        "Graph capturing finished in ",
        "graphs_bytes",
        _search(r"Graph capturing finished in (?P<seconds>[\d.]+) secs(?:, took (?P<bytes>[\d.]+) GiB)?"),
    ),
    ("CUDA graph pool memory: ", "graphs_bytes", _search(r"CUDA graph pool memory: (?P<bytes>[\d.]+) GiB \(actual\)")),
    ("Actual usage is ", "breakdown", _breakdown),
    ("the rest of the memory reserved for KV Cache is ", "breakdown", _breakdown),
    (
        "Chunked prefill is enabled with",
        "max_num_batched_tokens",
        _search(r"max_num_batched_tokens=(?P<tokens>\d{1,12})"),
    ),
    ("non-default args: ", "args", _args),
    ("args: Namespace(", "args", _args),
    ("LLM engine (v", "engine_config", _engine_config),
    ("Using max model len ", "max_model_len", _search(r"Using max model len (?P<tokens>\d{1,12})")),
    (
        "Sleep mode freed ",
        "sleep",
        _search(r"Sleep mode freed (?P<freed_bytes>[\d.]+) GiB memory, (?P<used_bytes>[\d.]+) GiB"),
    ),
    ("seconds to fall asleep", "sleep", _search(r"It took (?P<seconds>[\d.]+) seconds to fall asleep")),
    (
        "may waste at most ",
        "kv_padding",
        _search(r"may waste at most (?P<waste_ratio>[\d.]+)% KV cache memory", waste_ratio=0.01),
    ),
)

# Every keyword above contains one of these short words: a cheap first test.
WORDS: Final = (
    "memory",
    "KV ",
    "Running: ",
    "took ",
    "rror",
    "EngineCore ",
    "ngine core",
    "preempted",
    "block",
    "Iteration(",
    "Maximum conc",
    "max ",
    "Chunked",
    "args: ",
    "LLM engine",
    "Sleep",
    "asleep",
    "Graph capt",
    "Actual",
    "may waste",
)

# Lines that quote a user's text, which must not be taken for an event.
_USER_TEXT = re.compile(r"Received request |Generated response |prompt: ['\"]|output: ['\"]|details: prompt")


def match(line: str) -> LogEvent | None:
    """The event of ``line``, or None. Never raises; linear in its length, at most ``MAX_LINE``."""
    if len(line) > MAX_LINE:
        line = line[:MAX_LINE]
    for word in WORDS:
        if word in line:
            break
    else:
        return None
    for keyword, event, parse in _TABLE:
        if keyword in line:
            if _USER_TEXT.search(line) is not None:
                return None
            if "\x1b" in line:
                line = _ANSI.sub("", line)
            values = parse(line)
            if values is not None:
                return LogEvent(event, values)
    return None


_FACTS: Final[Mapping[str, Mapping[str, str]]] = {  # event -> name of the value -> name of the fact
    "pool_bytes": {"bytes": "pool_bytes"},
    "weights_bytes": {"bytes": "weights_bytes"},
    "graphs_bytes": {"bytes": "graphs_bytes"},
    "max_num_batched_tokens": {"tokens": "max_num_batched_tokens"},
    "max_model_len": {"tokens": "max_model_len"},
    "engine_config": {"max_model_len": "max_model_len"},
    "capacity": {"tokens": "capacity_tokens", "max_model_len": "max_model_len"},
    "breakdown": {
        "activation_bytes": "activations_bytes",
        "graphs_bytes": "graphs_bytes",
        "kv_bytes": "pool_bytes",
    },
}


def recognise(line: str) -> LogEvent | None:
    """The event of a stripped line with its facts, arguments and version, or None."""
    event = match(line)
    if event is None:
        return None
    values = {
        name: value
        for name, value in event.values.items()
        if isinstance(value, int | float) and abs(value) <= ceilings.BYTES
    }
    facts = {
        fact: values[name]
        for name, fact in _FACTS.get(event.event, {}).items()
        if name in values and (values[name] > 0 or fact.endswith("_bytes"))
    }
    version = event.values.get("version") if event.event == "engine_config" else None
    return LogEvent(
        event.event,
        event.values,
        facts,
        from_log(line) if event.event == "args" else None,
        None if version is None else str(version),
    )
