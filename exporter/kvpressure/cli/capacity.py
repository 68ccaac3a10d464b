"""``kvpressure capacity``: the size of a model's KV cache, what a GPU holds, and which limits follow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from kvpressure.capacity import kvbytes, load, models, plan, weights
from kvpressure.capacity.kvbytes import Parallel
from kvpressure.capacity.load import RequestLoad
from kvpressure.capacity.report import CapacityAnswer, as_json, as_text
from kvpressure.capacity.shapes import ModelShape
from kvpressure.errors import InputError
from kvpressure.settings.thresholds import Thresholds
from kvpressure.settings.thresholds import load as load_thresholds
from kvpressure.toolbox.option_values import above_zero, refused, whole_number
from kvpressure.toolbox.terminal import answer

_UNITS: Final = {
    "B": 1,
    **{p + "B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{p + "iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]?i?B)")

#: Options that say nothing without the memory of a GPU.
_OF_A_GPU: Final = (
    "concurrency",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "weights",
    "kv_cache_memory",
)

_EXAMPLES: Final = """\
examples:
  kvpressure capacity llama-3.1-70b --tp 4
      bytes per token, and per request at several lengths
  kvpressure capacity /models/my-model --gpu-memory 80GiB --prompt p50=1000,p95=4000,p100=9000 --output 500 --concurrency 40
      memory audit, what fits, and the limits to set
  kvpressure capacity llama_70b --worksheet --gpu-memory 80GB --tp 4 --context 8192 --concurrency 10
      the guides' own approximations

Sizes are bytes on one GPU, with their unit: 80GiB or 80GB. MODEL is a config.json, a model's directory, or a known name.

Exit status: 0 the load fits, or none was given; 1 the load does not fit; 2 the input cannot be used.

known names:
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES + "\n".join(f"  {name}" for name in models.CONFIGS)
    parser.add_argument("model", metavar="MODEL", help="config.json, a model's directory, or a known name")
    spread = parser.add_argument_group("how it is run, as for vLLM")
    whole = whole_number()
    spread.add_argument("--tp", "--tensor-parallel-size", dest="tp", type=whole, default=1, metavar="N")
    spread.add_argument("--pp", "--pipeline-parallel-size", dest="pp", type=whole, default=1, metavar="N")
    spread.add_argument("--dcp", "--decode-context-parallel-size", dest="dcp", type=whole, default=1, metavar="N")
    spread.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE", help=", ".join(kvbytes.CACHE_DTYPES))
    spread.add_argument("--block-size", type=whole, default=kvbytes.DEFAULT_BLOCK_SIZE, metavar="N")
    spread.add_argument("--disable-hybrid-kv-cache-manager", action="store_true")
    spread.add_argument("--enforce-eager", action="store_true", help="compute without CUDA graphs")
    for name in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"):
        spread.add_argument(name, type=whole, metavar="N")
    spread.add_argument(
        "--gpu-memory-utilization",
        type=above_zero(1),
        metavar="SHARE",
        help="share of GPU memory that vLLM reserves (default: 0.92, as in vLLM)",
    )
    memory = parser.add_argument_group("memory of one GPU")
    memory.add_argument(
        "--gpu-memory", type=_size, metavar="SIZE", help="memory of one GPU; the output then says whether the load fits"
    )
    memory.add_argument(
        "--weights",
        type=_size,
        metavar="SIZE",
        help="size of the whole model's weights; default: size of its files, or else an estimate",
    )
    memory.add_argument(
        "--kv-cache-memory", type=_size, metavar="SIZE", help="size of the KV pool, in place of the computed one"
    )
    tier = parser.add_argument_group("KV tier in host memory, for all GPUs together")
    tier.add_argument(
        "--tier",
        type=_size,
        metavar="SIZE",
        help="its size, e.g. of vLLM's --kv-offloading-size; kvpressure mitigate predicts its hit ratio from KV events",
    )
    tier.add_argument("--tier-speed", type=_size, metavar="SIZE", help="bytes loaded per second")
    tier.add_argument("--prefill-speed", type=whole, metavar="TOKENS", help="prompt tokens computed per second")
    sent = parser.add_argument_group("what is sent")
    sent.add_argument(
        "--context",
        type=whole,
        action="append",
        metavar="TOKENS",
        help="length of a request (prompt plus output); repeat for several lengths",
    )
    sent.add_argument("--concurrency", type=whole, metavar="N", help="requests that must fit at once")
    sent.add_argument("--prompt", metavar="TOKENS", help="prompt length, or quantiles: p50=1000,p95=4000,p100=9000")
    sent.add_argument("--output", metavar="TOKENS", help="output length, or quantiles as in --prompt")
    parser.add_argument(
        "--worksheet",
        action="store_true",
        help="print the documented approximations instead of kvpressure's own formulas",
    )
    parser.add_argument("--thresholds", metavar="FILE", help="file with thresholds to use instead of the built-in ones")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Print the answer; status 1 when the load does not fit. Raises ``InputError``."""
    thresholds = load_thresholds(
        options.thresholds
    )  # also where no value of it is asked for: a wrong file is a mistake
    if options.worksheet:
        return _worksheet(options)
    found = _answer(options, thresholds)
    answer(options.format, as_json(found), as_text(found))
    return 0 if found.fits is not False else 1


def _answer(options: argparse.Namespace, thresholds: Thresholds) -> CapacityAnswer:
    shape, path = models.find(options.model)
    parallel = Parallel(options.tp, options.pp, options.dcp)
    layout = kvbytes.layout(
        shape,
        parallel,
        options.kv_cache_dtype,
        options.block_size,
        hybrid_manager=not options.disable_hybrid_kv_cache_manager,
    )
    lengths = tuple(options.context or _lengths(shape, options.max_model_len))
    alone = _first_given(options, ("tier_speed", "prefill_speed"))
    if alone and options.tier is None:
        raise InputError(f"--{alone.replace('_', '-')}: needs --tier")
    answer = CapacityAnswer(
        *(shape, parallel, options.kv_cache_dtype, layout, lengths),
        tier=options.tier,
        load_speed=options.tier_speed,
        prefill_speed=options.prefill_speed,
    )
    sent = _sent(options)
    if options.gpu_memory is None:
        needless = _first_given(options, _OF_A_GPU)
        if sent is not None or needless:
            raise InputError(f"--{(needless or 'prompt').replace('_', '-')}: needs --gpu-memory")
        return answer
    given = _given(options, shape, path)
    found = plan.audit(
        shape,
        parallel,
        options.gpu_memory,
        _limits(options, shape, sent, thresholds),
        given,
        graphs=not options.enforce_eager,
    )
    if options.concurrency and sent is None and not options.context:
        raise InputError(
            "--concurrency also needs the lengths of the requests; give --context, or both --prompt and --output"
        )
    fit = plan.fit(layout, found, sent)
    needed = float(options.concurrency) if options.concurrency else None
    recommended = (
        plan.recommend(
            shape,
            parallel,
            layout,
            options.gpu_memory,
            given,
            sent,
            needed,
            thresholds,
            graphs=not options.enforce_eager,
        )
        if sent
        else None
    )
    answer = replace(answer, audit=found, fit=fit, load=sent, needed=needed, plan=recommended)
    return replace(
        answer,
        problems=tuple(_problems(answer, found, fit, options.context or ())),
        warnings=tuple(_warnings(answer, found, options.context or ())),
    )


def _lengths(shape: ModelShape, limit: int | None) -> list[int]:
    most = limit or shape.max_model_len or 131072
    return sorted({min(n, most) for n in (1024, 4096, 8192, 32768, 131072)} | {most})


def _sent(options: argparse.Namespace) -> RequestLoad | None:
    if (options.prompt is None) != (options.output is None):
        raise InputError("--prompt and --output: only one was given; give both or none")
    if options.prompt is None:
        return None
    sent = load.stated(options.prompt, options.output)
    if sent.longest == 0:
        raise InputError("--prompt and --output: no tokens in it; allowed: requests of 1 token or more")
    return sent


def _given(options: argparse.Namespace, shape: ModelShape, path: Path | None) -> plan.StatedMemory:
    size: int | None = options.weights
    origin: plan.Origin = "given"
    if size is None and path is not None:
        size, origin = weights.measured(path), "measured"
    if size is None:
        size, origin = weights.estimated(shape), "estimate"
    return plan.StatedMemory(size, origin, options.kv_cache_memory)


def _limits(
    options: argparse.Namespace, shape: ModelShape, sent: RequestLoad | None, thresholds: Thresholds
) -> plan.Limits:
    longest = sent.longest if sent else max(options.context or [int(thresholds["max_model_len_step_tokens"])])
    default = plan.default_limits_for(options.gpu_memory, options.max_model_len or shape.max_model_len or longest)
    tokens: int = options.max_num_batched_tokens or default.max_num_batched_tokens
    if options.max_num_seqs is not None and options.max_num_seqs > tokens:
        raise InputError(
            f"--max-num-seqs: {options.max_num_seqs} is above max_num_batched_tokens {tokens}: vLLM would not start;"
            f" allowed: up to {tokens}"
        )
    return plan.Limits(
        options.gpu_memory_utilization or default.gpu_memory_utilization,
        options.max_num_seqs or min(default.max_num_seqs, tokens),
        tokens,
        default.max_model_len,
    )


def _problems(answer: CapacityAnswer, found: plan.GpuAudit, fit: plan.Fit, lengths: Sequence[int]) -> Iterator[str]:
    """Why it does not fit, in the order in which vLLM or its users would notice."""
    if found.pool.bytes <= 0:
        yield f"no memory is left for the KV cache: {-found.pool.bytes / 2**30:.1f} GiB short"
        return
    if found.missing > 0:
        yield f"the GPU does not have enough memory for these parts: {found.missing / 2**30:.1f} GiB short"
    limit, needed = found.limits.max_model_len, answer.needed
    if fit.longest < limit:
        yield (
            f"one request of max_model_len {limit} does not fit and vLLM will not start; the longest that fits is "
            f"{fit.longest} tokens"
        )
    if needed is not None and fit.requests is not None and fit.requests < needed:
        yield f"{needed:g} requests of this load do not fit at once; {fit.requests} do"
    for length in lengths if needed is not None and fit.requests is None else ():
        if (answer.concurrent(length) or 0) < (needed or 0):
            yield f"{needed:g} requests of {length} tokens do not fit at once; {answer.concurrent(length)} do"


def _warnings(answer: CapacityAnswer, found: plan.GpuAudit, lengths: Sequence[int]) -> Iterator[str]:
    limit, own = found.limits.max_model_len, answer.shape.max_model_len
    longest = max([*lengths, *([answer.load.longest] if answer.load else [])], default=0)
    if longest > limit:
        yield (
            f"requests of {longest} tokens are longer than max_model_len {limit}: vLLM refuses them or cuts their"
            " answers"
        )
    if own is not None and limit > own:
        yield (
            f"max_model_len {limit} is above the {own} of the model's configuration: vLLM refuses it without rope"
            " scaling that allows it"
        )
    if found.outside < 0 and not found.missing:
        yield (
            f"CUDA context and allocator overhead need {-found.outside / 2**30:.1f} GiB more than "
            f"gpu_memory_utilization {found.limits.gpu_memory_utilization:g} leaves"
        )


def _first_given(options: argparse.Namespace, names: Iterable[str]) -> str | None:
    """The first of these options that was given."""
    return next(
        (name for name in names if getattr(options, name) is not None and getattr(options, name) is not False), None
    )


def _worksheet(options: argparse.Namespace) -> int:
    from kvpressure.capacity.worksheet import KV_GB_PER_TOKEN, guide_name, memory_audit, worksheet

    if options.gpu_memory is None:
        raise InputError("--worksheet: needs --gpu-memory, e.g. 80GB")
    unused = _first_given(
        options,
        ("prompt", "output", "max_model_len", "tier", *(name for name in _OF_A_GPU if name != "concurrency")),
    )
    if unused is not None or len(options.context or ()) > 1:
        raise InputError(
            f"--{(unused or 'context').replace('_', '-')}: not with --worksheet; allowed: --gpu-memory, --tp,"
            " --concurrency and one --context, which the guide's formula takes"
        )
    context, gigabytes = (options.context or [8192])[0], options.gpu_memory / 1e9
    model = guide_name(options.model)
    sheet = worksheet(model, context, options.concurrency or 1, gigabytes, options.tp)
    found = memory_audit(model, gigabytes, options.tp)
    named = model in KV_GB_PER_TOKEN
    known = f" (not in the guide, which then assumes 0.001 GB a token and 50 GB; it knows {', '.join(KV_GB_PER_TOKEN)})"
    left = found.available_for_kv_cache
    remains = f"{left:g} GB are left" if left > 0 else "no memory is left"
    gpus = "one GPU" if options.tp == 1 else f"each of {options.tp} GPUs"
    answer(
        options.format,
        {
            "model": model,
            "known_to_the_guide": named,
            "worksheet": asdict(sheet),
            "memory_audit": asdict(found),
        },
        f"The guide's approximation for {model}{'' if named else known}, GB on {gpus}:\n"
        f"  KV cache needed          {sheet.kv_cache_needed_per_gpu:10.2f}\n"
        f"  available                {sheet.available_per_gpu:10.2f}\n"
        f"  fits                     {'yes' if sheet.will_fit else 'no':>10}\n"
        f"  headroom                 {sheet.headroom_gb:10.2f}\n"
        f"  most concurrent requests {max(0, sheet.max_concurrent):10d}\n"
        f"The guide's memory audit: weights {found.model_weights_per_gpu:g}, CUDA context {found.cuda_context:g}, "
        f"allocator {found.allocator_overhead:g}; {remains} for KV.\n"
        "It counts every attention head; without --worksheet the model's own shape is used.",
    )
    return 0 if sheet.will_fit else 1


# --- values -------------------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value <= 0:
        raise refused(text, "a size with its unit, e.g. 80GiB or 80GB")
    return value
