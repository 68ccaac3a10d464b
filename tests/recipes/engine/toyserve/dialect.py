"""ToyServe as a dialect: everything that the exporter knows of an inference server, in one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvpressure.engines.base import EffectiveLimit, EngineDialect, Known
from kvpressure.engines.command import Command
from kvpressure.engines.series import counter, gauge, table
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.log_events import LogEvent
from kvpressure.model.readings import EngineReading

FLAGS = {"max_num_seqs": "--slots", "max_model_len": "--window", "port": "--listen", "model": "--weights"}


def starts(argv: Sequence[str], _env: Mapping[str, str] | None = None) -> bool:
    return any(word.rsplit("/", 1)[-1] == "toyserve" for word in argv)


def read_command(argv: Sequence[str], env: Mapping[str, str] | None = None, *_: object, **__: object) -> Command:
    words = list(argv)
    values = {
        name: words[place + 1]
        for name, flag in FLAGS.items()
        for place in range(len(words) - 1)
        if words[place] == flag
    }
    return Command(EngineArgs(values, frozenset(values), complete=True), starts(argv, env), other_program=False)


def public_words(args: EngineArgs) -> tuple[str, ...]:
    given = ((flag, args.values.get(name)) for name, flag in FLAGS.items())
    return ("toyserve", *(word for flag, value in given if value is not None for word in (flag, value)))


def limits(known: Known) -> dict[str, EffectiveLimit]:
    found = {"max_num_seqs": EffectiveLimit(8.0, False, "default")}
    for name, value in (("max_num_seqs", known.merged.max_num_seqs), ("max_model_len", known.merged.max_model_len)):
        if value is not None:
            found[name] = EffectiveLimit(float(value), True, "args")
    return found


def recognise(line: str) -> LogEvent | None:
    pool = re.search(r"pool holds (\d+) tokens", line)
    if pool:
        return LogEvent("capacity", {"tokens": float(pool[1])}, facts={"capacity_tokens": float(pool[1])})
    return LogEvent("preemption") if "evicted a request" in line else None


def capacity_tokens(reading: EngineReading, _engines_on_page: int) -> float | None:
    return reading.gauges.get(r.KV_CAPACITY)


TOYSERVE = EngineDialect(
    name="toyserve",
    title="ToyServe",
    may_start=starts,
    names_server=starts,
    read_command=read_command,
    public_words=public_words,
    public_line=lambda line: None if recognise(line) is None else line,
    default_port=7000,
    samples=table(
        "toyserve",
        (
            gauge(r.RUNNING, "active"),
            gauge(r.WAITING, "queued"),
            gauge(r.KV_USAGE, "pool_used", ceiling=ceilings.RATIO),
            gauge(r.KV_CAPACITY, "pool_tokens", ceiling=ceilings.COUNT),
            counter(r.PREEMPTIONS, "evictions"),
            counter(r.PROMPT_TOKENS, "tokens_in"),
            counter(r.GENERATION_TOKENS, "tokens_out"),
        ),
        prefixes=("toyserve_",),
    ),
    identify=lambda labels: (labels.get("weights"), labels.get("rank")),
    log_words=("pool holds", "evicted"),
    recognise=recognise,
    limits=limits,
    capacity_tokens=capacity_tokens,
    words={"preemption": "eviction", "preemptions": "evictions", "preempted": "evicted"},
    flag=lambda name: FLAGS.get(name, ""),
)
