"""The same load on several tensor-parallel sizes and KV cache dtypes: what a replica holds, and how many GPUs follow.

Memory only: throughput, latency, and the accuracy of a smaller dtype are not computed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Final

from kvpressure.capacity import kvbytes, plan
from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.kvbytes import Parallel
from kvpressure.capacity.load import RequestLoad
from kvpressure.capacity.shapes import ModelShape
from kvpressure.printable import grouped

TENSOR_SIZES: Final = (1, 2, 4, 8)  # a node has up to eight GPUs
DTYPES: Final = ("auto", "fp8")  # the model's own type, and the smaller one that every engine has


@dataclass(frozen=True, slots=True)
class Question:
    """What is the same for every choice. ``length``: tokens of a request if there is no ``load``; ``needed``: requests
    that must fit at once, None = not stated; ``tensor_sizes``, ``dtypes``: what is compared.
    """

    shape: ModelShape
    gpu_bytes: int
    limits: plan.Limits
    given: plan.StatedMemory
    load: RequestLoad | None
    length: int
    needed: float | None
    pipeline: int = 1
    block_size: int = kvbytes.DEFAULT_BLOCK_SIZE
    hybrid_manager: bool = True
    graphs: bool = True
    tensor_sizes: Sequence[int] = TENSOR_SIZES
    dtypes: Sequence[str] = DTYPES


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to serve the model. ``at_once``: requests that one replica holds; ``gpus``: of all replicas, or of one
    where no concurrency is stated. ``problem``: why it does not work, then the numbers that it has none of are None.
    """

    tensor: int
    cache_dtype: str
    bytes_per_token: float | None = None
    pool_bytes: int | None = None
    capacity_tokens: int | None = None
    at_once: int | None = None
    replicas: int | None = None
    gpus: int | None = None
    problem: str = ""


def choices(question: Question) -> list[Choice]:
    """Every size and dtype, also those that do not work."""
    return [_choice(question, size, dtype) for size in question.tensor_sizes for dtype in question.dtypes]


def _choice(q: Question, tensor: int, dtype: str) -> Choice:
    choice = Choice(tensor, dtype)
    try:
        parallel = Parallel(tensor, q.pipeline)
        layout = kvbytes.layout(q.shape, parallel, dtype, q.block_size, hybrid_manager=q.hybrid_manager)
        audit = plan.audit(q.shape, parallel, q.gpu_bytes, q.limits, q.given, graphs=q.graphs)
    except CapacityError as error:
        return replace(choice, problem=str(error))
    choice = replace(choice, bytes_per_token=float(layout.bytes_per_token))
    if audit.pool.bytes <= 0 or audit.missing:
        short = -audit.pool.bytes if audit.pool.bytes <= 0 else audit.missing
        return replace(choice, problem=f"does not start: each GPU lacks {short / 2**30:.1f} GiB")
    fit = plan.fit(layout, audit, q.load)
    choice = replace(choice, pool_bytes=audit.pool.bytes, capacity_tokens=fit.capacity_tokens)
    if fit.longest < q.limits.max_model_len:
        return replace(choice, problem=f"does not start: the longest request that fits has {fit.longest} tokens")
    at_once = fit.usable_blocks // layout.blocks(q.length) if fit.requests is None else fit.requests
    if at_once < 1:
        return replace(choice, at_once=0, problem="not one request of this load fits")
    replicas = None if q.needed is None else ceil(q.needed / at_once)
    return replace(choice, at_once=at_once, replicas=replicas, gpus=(replicas or 1) * tensor * q.pipeline)


def best(found: Sequence[Choice]) -> Choice | None:
    """The choice with the fewest GPUs, or with the most requests for each GPU where no concurrency is stated; the
    smaller tensor-parallel size where equal. None if none works.
    """
    working = [one for one in found if not one.problem]
    return min(working, key=_cost, default=None)


def _cost(one: Choice) -> tuple[float, int, str]:
    cost = one.gpus if one.replicas is not None else (one.gpus or 0) / (one.at_once or 1)
    return float(cost or 0), one.tensor, one.cache_dtype


# --- as text ------------------------------------------------------------------------------------------------------


_COLUMNS: Final = (
    "TP",
    "KV cache",
    "bytes/token",
    "KV pool",
    "tokens",
    "at once",
    "replicas",
    "GPUs",
    "problem",
)


def as_text(q: Question, found: Sequence[Choice]) -> str:
    """For a person."""
    return "\n".join([_title(q), "", *_table(_rows(q, found)), "", *_conclusion(q, found)])


def as_markdown(q: Question, found: Sequence[Choice]) -> str:
    """A table in Markdown, with title and conclusion."""
    head, *rows = _rows(q, found)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([_title(q), "", *(f"| {' | '.join(row)} |" for row in lines), "", *_conclusion(q, found)])


def as_csv(found: Sequence[Choice]) -> str:
    """A line for each choice, sizes in bytes; a number that does not exist is empty."""
    out = io.StringIO()
    rows = [asdict(one) for one in found]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def as_json(q: Question, found: Sequence[Choice]) -> dict[str, Any]:
    """Plain JSON values; sizes in bytes."""
    chosen = best(found)
    return {
        "model": q.shape.name,
        "gpu_memory_bytes": q.gpu_bytes,
        "limits": asdict(q.limits),
        "needed_concurrency": q.needed,
        "choices": [asdict(one) for one in found],
        "best": None if chosen is None else {"tensor": chosen.tensor, "cache_dtype": chosen.cache_dtype},
    }


def _title(q: Question) -> str:
    of_load = "requests of this load" if q.load else f"requests of {grouped(q.length)} tokens"
    return (
        f"{q.shape.name} on GPUs of {q.gpu_bytes / 2**30:.1f} GiB, gpu_memory_utilization"
        f" {q.limits.gpu_memory_utilization:g}, max_model_len {grouped(q.limits.max_model_len)}; "
        + (of_load if q.needed is None else f"{q.needed:g} {of_load} at once")
    )


def _rows(q: Question, found: Sequence[Choice]) -> list[list[str]]:
    rows = [
        [
            str(one.tensor),
            one.cache_dtype,
            _number(one.bytes_per_token),
            "" if one.pool_bytes is None else f"{one.pool_bytes / 2**30:.1f} GiB",
            _number(one.capacity_tokens),
            _number(one.at_once),
            _number(one.replicas),
            _number(one.gpus),
            one.problem,
        ]
        for one in found
    ]
    shown = [
        index
        for index, name in enumerate(_COLUMNS)
        if (name != "replicas" or q.needed is not None) and (name != "problem" or any(one.problem for one in found))
    ]
    return [[row[index] for index in shown] for row in (list(_COLUMNS), *rows)]


def _number(value: float | None) -> str:
    return "" if value is None else grouped(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width, numbers to the right; the problem, which is text, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, *(index for index, name in enumerate(rows[0]) if name == "problem")}
    for row in rows:
        cells = (
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _conclusion(q: Question, found: Sequence[Choice]) -> Iterator[str]:
    chosen = best(found)
    if chosen is None:
        yield "None of these works: use larger GPUs, a shorter max_model_len, or --pp."
        return
    named = f"TP {chosen.tensor} with KV cache {chosen.cache_dtype}"
    if q.needed is None:
        yield f"Most requests per GPU: {named}."
    else:
        yield f"Fewest GPUs: {named} (GPUs: {chosen.gpus}, replicas: {chosen.replicas})."
    yield "Bytes per token and KV pool are those of one GPU. Tokens and requests at once are those of one replica."
    yield "Memory only: throughput, latency, and the accuracy of an fp8 KV cache are not compared."
