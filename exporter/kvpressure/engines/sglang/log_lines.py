"""Reads one line of SGLang's log as an event. Pure; only the first ``MAX_LINE`` characters are read."""

from __future__ import annotations

import re
from typing import Final

from kvpressure.engines.log_table import SIZE, Found, asked, event_of, find, public, row
from kvpressure.model.log_events import MAX_LINE, LogEvent

_ANSI: Final = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_PREFIX: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?((?: [A-Z]{2,4}\d{1,5}){0,5})\] ?")
_FURTHER: Final = re.compile(r"(?<!\S)TP[1-9]\d*")
FURTHER_RANK: Final = "[TP+] "
"""Prefix of messages of further tensor-parallel ranks, which repeat most lines."""

N: Final = r"\d{1,15}"
F: Final = r"\d{1,12}(?:\.\d{1,12})?"

_START: Final = (
    rf"max_total_num_tokens=(?P<capacity_tokens>{N})"
    rf"(?:, chunked_prefill_size=(?:(?P<max_num_batched_tokens>{N})|-1|None))?(?:, max_prefill_tokens={N})?"
    rf"(?:, max_running_requests=(?P<max_num_seqs>{N}))?(?:, context_len=(?P<max_model_len>{N}))?"
)
_USAGE: Final = rf"(?:#(?:full )?token: {N}, )?(?:full )?token usage: {F}"
# Parts between the known ones, which differ by release: names, numbers, True and False.
_PARTS: Final = (
    rf"(?:, (?!#running-req|#queue-req|gen throughput)[#A-Za-z][\w #()/-]{{0,40}}: (?:{F}|True|False)%?){{0,16}}"
)
_DECODE: Final = (
    rf"Decode batch[.,] #running-req: {N}, {_USAGE}{_PARTS}"
    rf", gen throughput \(token/s\): {F}{_PARTS}, #queue-req: {N}"
)
_PREFILL: Final = (
    rf"Prefill batch[.,] #new-seq: {N}, #new-token: {N}, #cached-token: {N}(?:, cache hit rate: {F}%)?,"
    rf" {_USAGE}{_PARTS}"
    rf", #running-req: {N}{_PARTS}, #queue-req: {N}"
)
_OOM: Final = (
    rf"(?:CUDA|HIP|XPU|NPU)(?: error:)? out of memory\.(?: Tried to allocate (?P<requested_bytes>{SIZE})\.)?"
    rf"(?: GPU \d{{1,3}} has a total capacity of (?P<total_bytes>{SIZE}) of which (?P<free_bytes>{SIZE}) is free)?"
)

TABLE: Final = (
    row("#running-req", "stats", _DECODE),
    row("#running-req", "stats", _PREFILL),
    row(
        "#retracted_reqs",
        "preemption",
        rf"(?:KV cache pool is full\. Retract requests\.|Decode out of memory happened\.) #retracted_reqs: {N}",
    ),
    row("max_total_num_tokens=", "capacity", rf"(?<![\w.]){_START}"),
    row(
        "KV Cache is allocated",
        "capacity",
        rf"KV Cache is allocated\. (?:dtype: [\w.]{{1,40}}, )?#tokens: (?P<capacity_tokens>{N})",
        more=(rf"\bKV size: (?P<pool_bytes>{F} GB)", *(rf"\b{part} size: (?P<pool_bytes>{F} GB)" for part in "KV")),
    ),
    row(
        "max_running_requests was reduced",
        "engine_config",
        rf"max_running_requests was reduced from (?:the )?requested {N} to (?P<max_num_seqs>{N})",
    ),
    row("Load weight end.", "weights_bytes", rf"mem usage=(?P<weights_bytes>{F} GB)"),
    row("out of memory", "cuda_oom", _OOM),
    row("Not enough memory. Please try to increase --mem-fraction-static", "no_kv_blocks"),
    row("out of memory", "engine_dead", r"(?:Decode|Prefill) out of memory\. Try to lower your batch size"),
    row("Health check failed", "broadcast_wait", r"couldn't get a response from detokenizer"),
    row("alloc_req_slots runs out of memory", "engine_dead"),
    row("No space left for only one request", "engine_dead"),
    row("ut of memory even after", "engine_dead", r"Out of memory even after retracting all other requests"),
    row("Scheduler hit an exception", "engine_dead"),
    row("Received sigquit", "engine_dead", r"Received sigquit from a child process?\b"),
    row("Watchdog timeout (self.watchdog_timeout=", "engine_dead"),
    *(asked(path, "pause") for path in ("/pause_generation", "/release_memory_occupation")),
    *(asked(path, "resume") for path in ("/continue_generation", "/resume_memory_occupation")),
)
WORDS: Final = (
    "#running-req",
    "memory",
    "#retracted",
    "max_",
    "KV Cache is",
    "Load weight",
    "No space",
    "Scheduler hit",
    "sigquit",
    "Watchdog",
    "POST /pause",
    "POST /release",
    "POST /continue",
    "POST /resume",
)
REPEATED: Final = frozenset({"stats", "preemption", "capacity", "engine_config", "weights_bytes"})
"""Events that each rank reports."""


def strip(line: str) -> str:
    """The message of a log line without colours and its bracket of time and ranks; ``FURTHER_RANK`` precedes those of
    further ranks.
    """
    text = line[:MAX_LINE].rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    found = _PREFIX.match(text)
    if found is None:
        return text
    further = "DP" not in found[1] and _FURTHER.search(found[1])
    return (FURTHER_RANK if further else "") + text[found.end() :]


def _match(line: str) -> Found | None:
    found = find(TABLE, line[:MAX_LINE])
    return None if found and found[0] in REPEATED and line.startswith(FURTHER_RANK) else found


def recognise(line: str) -> LogEvent | None:
    """The event of a stripped line with its facts, or None."""
    found = _match(line)
    return None if found is None else event_of(found)


def public_line(text: str) -> str | None:
    """The public part of a recognised line."""
    message = strip(text)
    found = _match(message)
    return None if found is None else public(message, found)
