"""The inputs that ``diagnose`` and ``mitigate`` share: their options, and how they are opened."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Final

from kvpressure import redaction
from kvpressure.capacity import models
from kvpressure.capacity.shapes import ModelShape
from kvpressure.engines.mistakes import mistake
from kvpressure.errors import InputError, refused_file, shown
from kvpressure.model.arguments import GIB, parse_version
from kvpressure.model.readings import Snapshot
from kvpressure.printable import command
from kvpressure.recording.reader import Reader
from kvpressure.settings.kinds import LOOK_BACK
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import FIVE_MINUTES
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import api_key as secret
from kvpressure.toolbox import fetch, following, prometheus
from kvpressure.toolbox import live_pages as live
from kvpressure.toolbox.exporter_document import engine_views
from kvpressure.toolbox.history import Case, FoundEngines, judge
from kvpressure.toolbox.live_pages import GivenGpu
from kvpressure.toolbox.option_values import moment, number, of_kind, refused
from kvpressure.toolbox.terminal import waiting

MAX_SECONDS: Final = 110.0  # quick triage: under two minutes
_FIRST_TICKS: Final = 20  # of a Prometheus, to measure the interval of samples
_BETWEEN_SAMPLES: Final = (
    "what happened between samples, which are {:.0f} s apart: short peaks and bursts, single long requests"
)
_APART: Final = (
    "samples are {:.0f} s apart: weak evidence. Short peaks are lost; verdicts are one sample late and less confident"
    " than from an exporter (1 s). Give the server's limits with --args"
)
_GIVEN: Final = re.compile(r"([^:]{1,80}):(\d{1,5}(?:\.\d{1,3})?)(?:GiB)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the input options; exactly one kind may be given."""
    parser.add_argument(
        "inputs",
        metavar="URL|RECORDING",
        nargs="*",
        help="vLLM servers ([NS/POD=]http://HOST:PORT[;args=...]), or one recording",
    )
    group = parser.add_argument_group("other inputs")
    group.add_argument("--exporter", metavar="URL", help="address of a running exporter (default port 9846)")
    group.add_argument(
        "--prometheus", metavar="URL", help="address of a Prometheus that scrapes vLLM, to diagnose a past incident"
    )
    group.add_argument(
        "--at",
        type=moment,
        metavar="TIME",
        help="with --prometheus: report this moment, as kvpressure judged it then, where that Prometheus scrapes"
        " exporters; e.g. 2026-11-27T03:12:00Z (default: the worst moment)",
    )
    group.add_argument(
        "--since",
        type=of_kind(LOOK_BACK),
        default=3600.0,
        metavar="T",
        help="how far back to look: 30m, 1h (default), up to 7d",
    )
    group.add_argument(
        "--namespace",
        "-n",
        metavar="NS",
        help="read pods of this namespace through kubectl; with --prometheus: only this namespace",
    )
    group.add_argument("--selector", "-l", metavar="LABELS", help="with -n: pods with these labels, e.g. app=vllm")
    group.add_argument("--workload", metavar="KIND/NAME", help="with -n: the pods of this workload, e.g. deploy/chat")
    group.add_argument(
        "--pod", metavar="NAME", help="only this pod of those found through --prometheus, --exporter or kubectl"
    )
    group.add_argument("--model", metavar="NAME", help="only this model (for --prometheus, --exporter and recordings)")
    group.add_argument("--context", metavar="NAME", help="kubectl context to use")
    group.add_argument("--prometheus-token-file", metavar="FILE", help="file with the bearer token for --prometheus")
    add_server_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is told about servers, and how long they are watched."""
    parser.add_argument(
        "--args",
        metavar="ARGS",
        type=arguments,
        default=(),
        help="the server's command line, quoted: --args='--max-num-seqs 64'",
    )
    parser.add_argument(
        "--gpu", metavar="NAME:GiB", type=given_gpu, help="the GPU, e.g. H100:80; some of vLLM's defaults depend on it"
    )
    parser.add_argument(
        "--seconds",
        type=number(5, MAX_SECONDS),
        default=30.0,
        metavar="S",
        help=f"how long live servers are watched at most, 5 to {MAX_SECONDS:g} (default 30)",
    )
    parser.add_argument("--thresholds", metavar="FILE", help="file with the thresholds for the diagnosis")


def given_gpu(text: str) -> GivenGpu:
    """``H100:80`` or ``A100:80GiB``; for argparse."""
    found = _GIVEN.fullmatch(text.strip())
    if found is None or not 0 < float(found[2]) <= 10_000:
        raise refused(text, "NAME:GiB, e.g. H100:80")
    return GivenGpu(found[1].strip(), int(float(found[2]) * GIB))


def engine_version(text: str) -> str:
    """A version like ``0.11.2``; for argparse."""
    if parse_version(text) is None:
        raise refused(text, "a version like 0.11.2")
    return text


def model_shape(text: str) -> ModelShape:
    """The model named by ``--model-config``. Raises ``InputError``."""
    try:
        return models.find(text)[0]
    except InputError as error:
        raise InputError(f"--model-config: {error}") from error


def arguments(text: str) -> tuple[str, ...]:
    """A command line as words; for argparse. One that the server refuses is rejected."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; allowed: a command line with closed quotes") from None
    if (found := mistake(words)) is not None:
        raise argparse.ArgumentTypeError(
            f"{found.what}; did you mean {found.meant}?" if found.meant else f"{found.what}; allowed: {found.allowed}"
        )
    return words


def given(options: argparse.Namespace) -> bool:
    """Whether any input was given."""
    return bool(options.inputs or options.exporter or options.prometheus or options.namespace)


def open_inputs(options: argparse.Namespace, thresholds: Thresholds, *, for_plan: bool = False) -> FoundEngines:
    """Read the input. ``for_plan``: the numbers that a plan needs, of live servers to the end of the watch and of the
    past from the servers' own series; else until the answer is certain. Raises ``InputError`` when it is unusable or
    does not answer.
    """
    _check_combination(options)
    if options.prometheus:
        return _prometheus(options, thresholds, for_plan)
    if options.namespace:
        from kvpressure.toolbox.cluster import open_cluster

        return open_cluster(options, thresholds, for_plan)
    if not options.inputs:
        return _exporter(options)
    recordings = [text for text in options.inputs if _is_file(text)]
    if not recordings:
        return watched(options, thresholds, to_the_end=for_plan)
    if len(options.inputs) > 1:
        raise InputError(
            f"{recordings[0]}: a recording cannot be combined with other inputs; allowed: one recording, or several"
            " URLs"
        )
    return _recording(recordings[0], options, thresholds)


def _check_combination(options: argparse.Namespace) -> None:
    """Raise ``InputError`` where inputs were given that exclude each other."""
    kinds = [
        name
        for name, value in (
            ("URL or RECORDING", options.inputs),
            ("--exporter", options.exporter),
            ("--prometheus", options.prometheus),
        )
        if value
    ]
    if options.namespace and not options.prometheus:
        kinds.append("-n NAMESPACE")
    if len(kinds) > 1:
        raise InputError(f"{' and '.join(kinds)} cannot be combined; give one kind of input at a time")
    if options.at and not options.prometheus:
        raise InputError("--at: only with --prometheus")
    if options.selector and not options.namespace:
        raise InputError("-l: needs -n NAMESPACE")
    if options.workload and (not options.namespace or options.prometheus or options.selector):
        raise InputError("--workload: only with -n NAMESPACE, and without -l and --prometheus")


def follow(options: argparse.Namespace, thresholds: Thresholds) -> Iterator[FoundEngines]:
    """Live servers, or an exporter, once a second without end. Raises ``InputError`` for other inputs."""
    _check_combination(options)
    if options.prometheus or options.namespace or any(map(_is_file, options.inputs)):
        raise InputError("--watch: only live servers and exporters can be watched; give URLs or --exporter")
    if options.inputs:
        return following.servers(live_targets(options), options.gpu, thresholds, command(*options.inputs))
    return (_of_exporter(found, options) for (found,) in following.exporters([exporter_address(options)]))


def _is_file(text: str) -> bool:
    """Whether a text is a recording's path, also a missing one that looks like a path and not like an address."""
    if "://" in text:
        return False
    if not text:
        raise InputError("an empty name; allowed: a recording or an address")
    path = Path(text)
    try:
        if path.is_dir():
            raise InputError(f"{text}: a directory; allowed: a recording or an address")
    except OSError as error:
        raise InputError(refused_file(shown(text), error, "a recording or an address")) from error
    looks = text.endswith((".gz", ".jsonl", ".json")) or text.startswith(("/", "./", "../", "~"))
    return path.is_file() or looks


# --- live -------------------------------------------------------------------------------------------------


def live_targets(options: argparse.Namespace) -> list[Target]:
    """The servers to watch. Raises ``InputError``."""
    targets = [fetch.target_of(text, "URL") for text in options.inputs]
    if options.args:
        targets = [replace(target, args=target.args or options.args) for target in targets]
    if len(targets) > live.MAX_TARGETS:
        raise InputError(f"{len(targets)} URLs; allowed: up to {live.MAX_TARGETS}")
    if len({target.name for target in targets}) < len(targets):
        raise InputError("URL: the same server was given twice; give each server once")
    return targets


def watched(options: argparse.Namespace, thresholds: Thresholds, *, to_the_end: bool = False) -> FoundEngines:
    """The servers of the command line, until their answers are certain. Raises ``InputError`` when none ever
    answered.
    """
    targets = live_targets(options)
    looks = following.servers(targets, options.gpu, thresholds, command(*options.inputs))
    found = following.answered(looks, options.seconds, thresholds, to_the_end=to_the_end)
    following.refuse_unscraped(found, targets)
    return found


def _recording(path: str, options: argparse.Namespace, thresholds: Thresholds) -> FoundEngines:
    problems: list[str] = []
    with Reader(path, on_problem=lambda problem: problems.append(f"{path}:{problem.line}: {problem.text}")) as reader:
        cases = judge(reader, thresholds)
    if not cases:
        raise InputError(
            f"{path}: the recording contains no engine; allowed: a recording with at least one"
            " successful scrape of an engine"
        )
    shown = problems[:3] + ([f"{len(problems) - 3} more lines skipped"] if len(problems) > 3 else [])
    return FoundEngines(_filtered(cases, options), command(path), {}, tuple(shown))


def _prometheus(options: argparse.Namespace, thresholds: Thresholds, for_plan: bool) -> FoundEngines:
    query = prometheus.Query(
        options.prometheus,
        options.at or live.CLOCK.now(),
        options.since,
        options.namespace,
        options.pod,
        options.model,
        secret.read(options.prometheus_token_file, "--prometheus-token-file"),
        options.args,
    )
    api = prometheus.Prometheus(query)
    published = prometheus.published(api, query, thresholds) if options.at and not for_plan else ()
    cases = [Case(engine_views({"time": t, "engines": [entry]})[0], t) for t, entry in published]
    pods = [(case.view.engine.key.namespace, case.view.engine.key.pod) for case in cases]
    warnings: list[str] = []
    within = min(options.since, FIVE_MINUTES) if options.at else options.since
    for server in prometheus.servers(api, query, within, pods):
        name = prometheus.pod_of(server)[1]
        waiting(f"reading {name}")
        ticks = prometheus.snapshots(api, query, server, options.gpu)
        first = list(islice(ticks, _FIRST_TICKS))
        gap = _usual_gap(first)
        sparse = gap > thresholds["kv_recent_seconds"]  # the shortest window of the signals
        unseen = [
            "GPU, restarts, CPU of the container, log: not in the server's own metrics",
            *([_BETWEEN_SAMPLES.format(gap)] if sparse else ()),
        ]
        found = judge(chain(first, ticks), thresholds, at_the_end=bool(options.at))
        cases += [case.without(unseen) for case in found]
        if sparse:
            warnings.append(f"{name}: {_APART.format(gap)}")
    moment = ("--at", f"{options.at:.0f}") if options.at else ()
    again = command("--prometheus", redaction.value(options.prometheus), *moment)
    return FoundEngines(_filtered(cases, options), again, {}, tuple(warnings))


def _usual_gap(ticks: Sequence[Snapshot]) -> float:
    """Seconds between samples; 0 with too few."""
    gaps = [after.time - before.time for before, after in pairwise(ticks) if after.time > before.time]
    return median(gaps) if gaps else 0.0


# --- an exporter ------------------------------------------------------------------------------------------


def _exporter(options: argparse.Namespace) -> FoundEngines:
    try:
        return _of_exporter(following.exporter(exporter_address(options)), options)
    except fetch.NoExporterError as error:
        if options.exporter:
            raise
        raise InputError(
            "no input, and no exporter on this machine; give a URL, a recording, --exporter, --prometheus or"
            f" -n NAMESPACE ({error.problem})"
        ) from error


def exporter_address(options: argparse.Namespace) -> str:
    """The given exporter, or the one on this machine."""
    return options.exporter or f"http://127.0.0.1:{fetch.EXPORTER_PORT}"


def _of_exporter(found: FoundEngines, options: argparse.Namespace) -> FoundEngines:
    """The engines asked for. Raises ``InputError`` where there are none."""
    if not found.cases and not found.warnings:
        raise InputError(f"--exporter: {exporter_address(options)}: no engine found yet; kvpressure discover says why")
    return replace(found, cases=_filtered(found.cases, options) if found.cases else ())


def _filtered(cases: Sequence[Case], options: argparse.Namespace) -> tuple[Case, ...]:
    kept = tuple(
        case
        for case in cases
        if options.pod in (None, case.view.engine.key.pod) and options.model in (None, case.view.engine.key.model_name)
    )
    if not kept:
        known = ", ".join(sorted({case.view.name for case in cases})[:8])
        raise InputError(f"no engine matches --pod and --model; engines found: {known}")
    return kept
