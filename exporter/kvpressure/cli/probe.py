"""``kvpressure probe``: the guides' four measuring steps against a server that is idle."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from kvpressure import __version__
from kvpressure.capacity import kvbytes
from kvpressure.capacity.kvbytes import CacheLayout, Parallel
from kvpressure.capacity.shapes import ModelShape
from kvpressure.errors import InputError, shown
from kvpressure.model import ceilings
from kvpressure.parsed import items, mapping
from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import api_key as secret
from kvpressure.toolbox import fetch, probing
from kvpressure.toolbox.completions import Api
from kvpressure.toolbox.inputs import model_shape
from kvpressure.toolbox.kv_block_meter import Meter
from kvpressure.toolbox.option_values import whole_number
from kvpressure.toolbox.probing import Probe, ProbeReport, Result, Stage
from kvpressure.toolbox.terminal import answer, waiting

_EXAMPLES = """\
examples:
  kvpressure probe http://127.0.0.1:8000
      says what it would send, and asks
  kvpressure probe http://127.0.0.1:8000 --yes --model-config llama-3.1-8b
  kvpressure probe http://127.0.0.1:8000 --yes --max-requests 4 --max-tokens 8000 --format json

Steps: baseline; one request, and whether its blocks come back; ten at once with 2k tokens; one with 16k (or what fits). Growth is
KV usage times capacity, not device memory. Exit status: 0 all as expected, 1 something is not or could not be measured, 2 refused
or the input cannot be used.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "url", metavar="URL", help="vLLM server whose /metrics is read and whose /v1/completions is called"
    )
    consent = parser.add_argument_group("consent and limits")
    consent.add_argument("--yes", action="store_true", help="send the requests without asking")
    consent.add_argument(
        "--max-requests", type=whole_number(), default=12, metavar="N", help="requests in all (default 12)"
    )
    consent.add_argument(
        "--max-tokens",
        type=whole_number(),
        default=50_000,
        metavar="N",
        help="tokens in all, prompts and outputs (default 50000)",
    )
    consent.add_argument(
        "--force", action="store_true", help="also run on a busy server; other traffic makes the numbers less exact"
    )
    parser.add_argument(
        "--output", type=whole_number(), default=64, metavar="N", help="tokens of each output (default 64)"
    )
    parser.add_argument("--model", metavar="NAME", help="served model name (default: the first of /v1/models)")
    parser.add_argument(
        "--model-config",
        metavar="MODEL",
        help="compute the expected KV bytes per token from this model: config.json, its directory, or a known name",
    )
    parser.add_argument(
        "--tp",
        type=whole_number(),
        default=1,
        metavar="N",
        help="tensor parallel size, for the expected KV bytes per token",
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE", help="KV cache dtype, for the expected KV bytes per token"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the bearer token for /v1")
    parser.add_argument("--thresholds", metavar="FILE")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Ask for consent, measure, print. Raises ``InputError`` for a refusal and unusable input."""
    thresholds = load(options.thresholds)
    shape = None if options.model_config is None else model_shape(options.model_config)
    target = fetch.target_of(options.url, "URL")
    key = secret.read(options.api_key_file, "--api-key-file")
    meter = Meter(target)
    try:
        layout = None if shape is None else _layout(shape, options, meter.cache.block_size)
        report = _probe(options, target, meter, key, layout, thresholds)
    finally:
        meter.close()
    answer(options.format, _as_json(report), _as_text(report))
    return 0 if report.fine else 1


def _probe(
    options: argparse.Namespace,
    target: Target,
    meter: Meter,
    key: str | None,
    layout: CacheLayout | None,
    thresholds: Thresholds,
) -> ProbeReport:
    model, length = _model(target, options.model, key)
    plan = probing.stages(meter.cache, length, options.output, options.max_requests, options.max_tokens)
    _consent(options, target, plan)
    probe = Probe(meter, Api(target, model, key), layout, thresholds, forced=options.force)
    busy = probe.busy()
    if busy is not None and not options.force:
        raise InputError(
            f"{target.name}: busy ({busy}): users would be disturbed and the numbers wrong; choose an idle server, or"
            " add --force"
        )
    results: list[Result] = []
    for result in probe.run(plan):
        waiting(f"step {result.step}, {result.name}: {result.verdict}")
        results.append(result)
    return ProbeReport(target.name, model, meter.cache, tuple(results), busy)


def _model(target: Target, wanted: str | None, key: str | None) -> tuple[str, int | None]:
    """Served name and context length in tokens. A server that requires a key lists no models without it."""
    served = [mapping(item) for item in items(mapping(fetch.get_json(target, "/v1/models")).get("data"))]
    names = [str(item.get("id")) for item in served if item.get("id")]
    if wanted is None and not names:
        hint = " and --api-key-file" if key is None else ""
        raise InputError(f"{target.name}: /v1/models lists no model; name the model with --model NAME{hint}")
    if wanted is not None and names and wanted not in names:
        raise InputError(f"--model: {shown(wanted)} is not served; allowed: {', '.join(names[:8])}")
    chosen = wanted or names[0]
    entry = next((item for item in served if item.get("id") == chosen), {})
    return chosen, ceilings.whole(entry.get("max_model_len"), ceilings.LABEL, 1)


def _layout(shape: ModelShape, options: argparse.Namespace, block_size: int) -> CacheLayout:
    try:
        return kvbytes.layout(shape, Parallel(options.tp), options.kv_cache_dtype, block_size)
    except InputError as error:
        raise InputError(f"--model-config: {error}") from error


def _consent(options: argparse.Namespace, target: Target, plan: list[Stage]) -> None:
    asks = [ask for stage in plan for ask in stage.asks]
    if not asks:
        raise InputError(
            f"the limits are too low for a probe: {'; '.join(stage.note for stage in plan)}; raise --max-requests and"
            " --max-tokens"
        )
    said = f"{len(asks)} requests with {sum(ask.total for ask in asks)} tokens in all will be sent to {target.name}"
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{said}; give --yes to confirm")
    print(f"{said}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("not confirmed; nothing was sent")


def _as_json(report: ProbeReport) -> dict[str, Any]:
    return {
        "version": __version__,
        "server": report.server,
        "model": report.model,
        "fine": report.fine,
        "cache": {**asdict(report.cache), "tokens": report.cache.tokens},
        "busy": report.busy,
        "steps": [asdict(result) for result in report.results],
    }


def _as_text(report: ProbeReport) -> str:
    cache = report.cache
    lines = [
        f"{report.server} {report.model}: {cache.blocks} blocks of {cache.block_size} tokens, {cache.tokens} tokens"
        " in all"
    ]
    for result in report.results:
        lines += [f"{result.step}. {result.name}: {result.verdict.upper()}", f"     {result.text}"]
    lines += [f"note: the server was busy ({report.busy})"] if report.busy else []
    return "\n".join([*lines, "all as expected" if report.fine else "not all is as expected"])
