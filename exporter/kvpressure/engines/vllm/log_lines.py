"""Reads one line of a vLLM log as an event.

Pure. The texts are those of vLLM 0.5.5 to 0.33 (V0, V1 and the Rust frontend); only the message is matched, never the
prefix.
"""

from __future__ import annotations

import re
from typing import Final

from kvpressure.engines.base import PAUSES
from kvpressure.engines.log_table import SIZE, Found, asked, event_of, find, row
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.model.log_events import MAX_LINE, LogEvent
from kvpressure.parsed import json_of, mapping

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
    return text[level.end() :] if level is not None else _PROCESS.sub("", text, count=1)


def _json_message(text: str) -> str:
    document = mapping(json_of(text))
    said = (document.get(key) for key in ("message", "msg", "log"))
    return next((message.rstrip("\n") for message in said if isinstance(message, str)), text)


# --- the table --------------------------------------------------------------------------------------------

_OOM_PARTS: Final = (  # of torch, its releases up to 2.0 and torch_npu
    rf"Tried to allocate (?P<requested_bytes>{SIZE})",
    rf"has a total capaci?ty of (?P<total_bytes>{SIZE})",  # torch 2.1 has a misprint
    rf"; (?P<total_bytes>{SIZE}) total capacity",
    rf"of which (?P<free_bytes>{SIZE}) is free",
    rf"; (?P<free_bytes>{SIZE}) free",
    rf"(?P<allocated_bytes>{SIZE}) is allocated by PyTorch",
    rf"; (?P<allocated_bytes>{SIZE}) already allocated",
    rf"with (?P<private_pool_bytes>{SIZE}) allocated in private pools",
    rf"and (?P<reserved_unallocated_bytes>{SIZE}) is reserved by PyTorch but unallocated",
    rf"; (?P<reserved_bytes>{SIZE}) reserved in total by PyTorch",
)
_CONCURRENCY: Final = r"Maximum concurrency for (?P<max_model_len>[\d,]{1,20}) tokens per request: [\d.]+x"
_KV_REST: Final = rf"the rest of the memory reserved for KV Cache is (?P<pool_bytes>{SIZE})"
_BREAKDOWN: Final = (
    rf"(?P<activations_bytes>{SIZE}) for peak activation",
    rf"activation peak memory takes (?P<activations_bytes>{SIZE})",
    rf"(?P<graphs_bytes>{SIZE}) for CUDAGraph memory",
    rf"Current kv cache memory in use is (?P<pool_bytes>{SIZE})",
)
_CAPTURED: Final = r"Graph capturing finished in [\d.]+ secs(?:, took (?P<graphs_bytes>[\d.]+ GiB))?"

TABLE: Final = (
    row(
        "out of memory occurred when warming up",
        "warmup_oom",
        more=(r"when warming up (?:sampler|pooler)(?: with \d{1,9} dummy requests)?",),
    ),
    row("out of memory", "cuda_oom", r"\b(?:CUDA|HIP|XPU|NPU)(?: error:)? out of memory\b", more=_OOM_PARTS),
    row("Failed to load model - not enough GPU memory", "load_oom"),
    row("No available memory for the cache blocks", "no_kv_blocks"),
    row(
        "max seq len (",
        "context_too_long",
        rf"max seq len \(\d{{1,12}}\), \((?P<needed_bytes>{SIZE}) KV cache is needed, which is larger than the"
        rf" available KV cache memory \((?P<available_bytes>{SIZE})\)",
        more=(r"estimated maximum model length is (?P<fitting_tokens>\d{1,12})",),
    ),
    row(
        "exceeds available Mamba cache blocks",
        "too_few_blocks",
        r"max_num_seqs \(\d{1,12}\) exceeds available Mamba cache blocks \((?P<fitting_requests>\d{1,12})\)",
    ),
    row(
        "max seq len (",
        "context_too_long",
        r"max seq len \(\d{1,12}\) is larger than the maximum number of tokens that can be stored in KV "
        r"cache \((?P<fitting_tokens>\d{1,12})\)",
    ),
    row(
        "less than desired GPU memory utilization",
        "memory_profiling_failed",
        r"\([\d.]{1,20}/[\d.]{1,20} GiB\) on startup is less than desired GPU memory utilization "
        r"\([\d.]{1,20}, [\d.]{1,20} GiB\)",
    ),
    row("Error in memory profiling", "memory_profiling_failed"),
    row("node running low on memory", "host_oom"),
    row(
        "is preempted by",
        "preemption",
        r"is preempted by (?:PreemptionMode\.)?\w{1,40} mode because there is not enough KV cache",
        more=(r"total_num_cumulative_preemption=\d{1,15}",),
    ),
    row("EngineCore encountered", "engine_dead"),
    row("EngineDeadError", "engine_dead"),
    row("WorkerProc hit an exception", "engine_dead"),
    row("ngine core initialization failed", "start_failed"),
    row("EngineCore failed to start", "start_failed"),
    row(
        "block found in",
        "broadcast_wait",
        r"No available (?:shared memory broadcast )?block found in \d{1,9} second",
    ),
    row(
        "Running: ",
        "stats",
        r"Running: \d{1,9}\b",
        r"(?:Waiting|Pending): \d{1,9}\b",
        r"\b[A-Z]+ KV cache (?:usage|used): -?[\d.]+%",
        more=(
            r"Avg prompt (?:throughput|tput): [\d.]+ tok",
            r"Avg generation (?:throughput|tput): [\d.]+ tok",
            r"Swapped: \d{1,9} reqs",
            r"Deferred: \d{1,9} reqs",
            r"Preemptions: \d{1,9}",
            r"Prefix cache hit rate: [\d.]+%",
        ),
    ),
    row(
        "Iteration(",
        "iteration",
        r"Iteration\(\d{1,15}\): \d{1,9} context requests, \d{1,12} context tokens, \d{1,9} generation requests, "
        r"\d{1,12} generation tokens, iteration elapsed time: [\d.]+ ms",
        more=(r"[A-Z]+ KV cache usage: [\d.]+%",),
    ),
    row("KV cache size: ", "capacity", r"KV cache size: (?P<capacity_tokens>[\d,]{1,20}) tokens", more=(_CONCURRENCY,)),
    row("Maximum concurrency for ", "capacity", _CONCURRENCY),
    row(" blocks: ", "capacity", r"# \w{1,20} blocks: \d{1,12}"),
    row("Available KV cache memory: ", "pool_bytes", r"Available KV cache memory: (?P<pool_bytes>-?[\d.]+ GiB)"),
    row("Model loading took ", "weights_bytes", r"Model loading took (?P<weights_bytes>[\d.]+ GiB)"),
    row("Loading model weights took ", "weights_bytes", r"Loading model weights took (?P<weights_bytes>[\d.]+ GB)"),
    row("Graph capturing finished in ", "graphs_bytes", _CAPTURED),
    row("CUDA graph pool memory: ", "graphs_bytes", r"CUDA graph pool memory: (?P<graphs_bytes>[\d.]+ GiB) \(actual\)"),
    row("Actual usage is ", "breakdown", rf"Actual usage is {SIZE} for (?:consumed memory|weight\b)", more=_BREAKDOWN),
    row("the rest of the memory reserved for KV Cache is ", "breakdown", _KV_REST, more=_BREAKDOWN),
    row(
        "Chunked prefill is enabled with",
        "max_num_batched_tokens",
        r"max_num_batched_tokens=(?P<max_num_batched_tokens>\d{1,12})",
    ),
    row("non-default args: {", "args"),
    row("args: Namespace(", "args"),
    row(
        "LLM engine (v",
        "engine_config",
        r"LLM engine \(v(?P<version>[\w.+-]{1,60})\)",
        more=(r"\bmax_seq_len=(?P<max_model_len>\d{1,15})",),
    ),
    row("Using max model len ", "max_model_len", r"Using max model len (?P<max_model_len>\d{1,12})"),
    row("Sleep mode freed ", "sleep", r"Sleep mode freed [\d.]+ GiB memory, [\d.]+ GiB"),
    row("seconds to fall asleep", "sleep", r"It took [\d.]+ seconds to fall asleep"),
    *(asked(path, event) for path, event in PAUSES.items()),
    row("may waste at most ", "kv_padding", r"may waste at most [\d.]+% KV cache memory"),
)

# Every keyword above contains one of these short words: a cheap first test of every line.
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
    "Mamba cache",
    "WorkerProc hit",
    "max ",
    "Chunked",
    "args: ",
    "LLM engine",
    "Sleep",
    "asleep",
    "Graph capt",
    "Actual",
    "may waste",
    "POST /pause",
    "POST /sleep",
    "POST /resume",
    "POST /wake_up",
)

# Lines that quote a user's text, which must not be taken for an event.
_USER_TEXT = re.compile(r"Received request |Generated response |prompt: ['\"]|output: ['\"]|details: prompt")


def match(message: str) -> Found | None:
    """The event of a stripped line with its parts, or None."""
    found = find(TABLE, message[:MAX_LINE])
    return None if found is None or _USER_TEXT.search(message) else found


def recognise(message: str) -> LogEvent | None:
    """The event of a stripped line with its facts, arguments and version, or None."""
    found = match(message)
    if found is None:
        return None
    return LogEvent("args", arguments=from_log(message)) if found[0] == "args" else event_of(found)
