"""Reads one line of SGLang's log as an event. Pure; only the first ``MAX_LINE`` characters are read.

A line is matched by one pattern of fixed words and numbers; its public part is what the pattern matched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvpressure.model import ceilings
from kvpressure.model.log_events import MAX_LINE, LogEvent

_ANSI: Final = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_PREFIX: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?((?: [A-Z]{2,4}\d{1,5}){0,5})\] ?")
_FURTHER: Final = re.compile(r"(?<!\S)TP[1-9]\d*")
FURTHER_RANK: Final = "[TP+] "
"""Prefix of messages of further tensor-parallel ranks, which repeat most lines."""

N: Final = r"\d{1,15}"
F: Final = r"\d{1,12}(?:\.\d{1,12})?"
GB: Final = 2.0**30  # "GB" in the text

_START: Final = (
    rf"max_total_num_tokens=(?P<tokens>{N})(?:, chunked_prefill_size=(?:(?P<chunk>{N})|-1|None))?"
    rf"(?:, max_prefill_tokens={N})?(?:, max_running_requests=(?P<seqs>{N}))?(?:, context_len=(?P<max_model_len>{N}))?"
)
_POOL: Final = (
    rf"KV Cache is allocated\. (?:dtype: [\w.]{{1,40}}, )?#tokens: (?P<tokens>{N}), "
    rf"(?:K size: (?P<k_bytes>{F}) GB, V size: (?P<v_bytes>{F}) GB|KV size: (?P<kv_bytes>{F}) GB)"
)
_USAGE: Final = rf"(?:#(?:full )?token: {N}, )?(?:full )?token usage: (?P<kv_usage>{F})"
# Parts between the known ones, which differ by release: names, numbers, True and False.
_PARTS: Final = (
    rf"(?:, (?!#running-req|#queue-req|gen throughput)[#A-Za-z][\w #()/-]{{0,40}}: (?:{F}|True|False)%?){{0,16}}"
)
_DECODE: Final = (
    rf"Decode batch[.,] #running-req: (?P<running>{N}), {_USAGE}{_PARTS}"
    rf", gen throughput \(token/s\): (?P<generation_rate>{F}){_PARTS}, #queue-req: (?P<waiting>{N})"
)
_PREFILL: Final = (
    rf"Prefill batch[.,] #new-seq: {N}, #new-token: {N}, #cached-token: {N}(?:, cache hit rate: {F}%)?,"
    rf" {_USAGE}{_PARTS}"
    rf", #running-req: (?P<running>{N}){_PARTS}, #queue-req: (?P<waiting>{N})"
)
_SIZE: Final = r"\d{1,9}(?:\.\d{1,4})? [KMGT]iB"
_OOM: Final = (
    rf"(?P<runtime>CUDA|HIP|XPU|NPU)(?: error:)? out of memory\.(?: Tried to allocate (?P<requested_bytes>{_SIZE})\.)?"
    rf"(?: GPU \d{{1,3}} has a total capacity of (?P<total_bytes>{_SIZE}) of which (?P<free_bytes>{_SIZE}) is free)?"
)

# (word, event, pattern): the first row whose pattern is found wins.
_TABLE: Final = tuple(
    (word, event, re.compile(pattern))
    for word, event, pattern in (
        ("#running-req", "stats", _DECODE),
        ("#running-req", "stats", _PREFILL),
        (
            "#retracted_reqs",
            "preemption",
            (
                r"(?:KV cache pool is full\. Retract requests\.|Decode out of memory happened\.) #retracted_reqs:"
                rf" (?P<requests>{N})"
            ),
        ),
        ("max_total_num_tokens=", "capacity", rf"(?<![\w.]){_START}"),
        ("KV Cache is allocated", "capacity", _POOL),
        (
            "max_running_requests was reduced",
            "engine_config",
            rf"max_running_requests was reduced from (?:the )?requested {N} to (?P<seqs>{N})",
        ),
        (
            "Load weight end",
            "weights_bytes",
            rf"(?P<head>Load weight end\.).{{0,400}}?(?P<tail>mem usage=(?P<bytes>{F}) GB)",
        ),
        ("out of memory", "cuda_oom", _OOM),
        ("Not enough memory", "no_kv_blocks", r"Not enough memory\. Please try to increase --mem-fraction-static"),
        ("out of memory", "engine_dead", r"(?:Decode|Prefill) out of memory\. Try to lower your batch size"),
        ("runs out of memory", "engine_dead", r"alloc_req_slots runs out of memory"),
        ("No space left for only", "engine_dead", r"No space left for only one request"),
        ("ut of memory even after", "engine_dead", r"Out of memory even after retracting all other requests"),
        ("Scheduler hit an", "engine_dead", r"Scheduler hit an exception"),
        ("Received sigquit", "engine_dead", r"Received sigquit from a child process?\b"),
        ("Watchdog timeout", "engine_dead", r"Watchdog timeout \(self\.watchdog_timeout="),
    )
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
)
REPEATED: Final = frozenset({"stats", "preemption", "capacity", "engine_config", "weights_bytes"})
"""Events that each rank reports."""
_FACTS: Final[Mapping[str, str]] = {
    "tokens": "capacity_tokens",
    "chunk": "max_num_batched_tokens",
    "seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
}
_UNITS: Final = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


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


def _match(line: str) -> tuple[str, re.Match[str]] | None:
    for word, event, pattern in _TABLE:
        if word in line and (found := pattern.search(line)) is not None:
            return None if event in REPEATED and line.startswith(FURTHER_RANK) else (event, found)
    return None


def _value(text: str) -> float | str:
    number, _, unit = text.partition(" ")
    if unit in _UNITS:
        return float(number) * _UNITS[unit]
    return text if text.isalpha() else float(text)


def recognise(line: str) -> LogEvent | None:
    """The event of a stripped line with its facts, or None."""
    known = _match(line[:MAX_LINE])
    if known is None:
        return None
    event, found = known
    values = {
        name: _value(text)
        for name, text in found.groupdict().items()
        if text is not None and name not in ("head", "tail")
    }
    facts: dict[str, float] = {}
    for name, value in values.items():
        fact = _FACTS.get(name)
        if fact is not None and isinstance(value, float) and 0 < value <= ceilings.COUNT:
            facts[fact] = value
    sizes = [values.pop(name) for name in ("k_bytes", "v_bytes", "kv_bytes") if name in values]
    pool = sum(size for size in sizes if isinstance(size, float)) * GB
    if pool > 0:
        facts["pool_bytes"] = pool
    if event == "weights_bytes":
        values["bytes"] = facts["weights_bytes"] = float(values["bytes"]) * GB
    return LogEvent(event, values, facts)


def public_line(text: str) -> str | None:
    """The public part of a recognised line: the fixed words and numbers that are matched."""
    message = strip(text)
    known = _match(message)
    if known is None:
        return None
    found = known[1]
    if "head" in found.groupdict():
        return f"{found['head']} {found['tail']}"
    return found[0]
