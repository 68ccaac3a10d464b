"""``kvpressure replay``: run a recording through the pipeline, faster than real time, and show the verdicts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from kvpressure.errors import InputError
from kvpressure.model.readings import Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.openmetrics import OpenMetricsWriter
from kvpressure.recording.reader import Reader, ReadProblem
from kvpressure.recording.timeline import Timeline, json_line
from kvpressure.settings.thresholds import load

_SHOWN_PROBLEMS: Final = 10


_EXAMPLES: Final = """\
examples:
  kvpressure replay incident.jsonl.gz
  kvpressure replay day-1.jsonl.gz day-2.jsonl.gz --format json
  kvpressure replay incident.jsonl.gz --thresholds mine.yaml     # what other thresholds would have said
  kvpressure replay incident.jsonl.gz --openmetrics out.txt && promtool tsdb create-blocks-from openmetrics out.txt data

Exit status: 0 replayed, 2 the recording cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="recording (gzip or plain JSON lines); several are read as one, in the order given",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default=None,
        help="text: what changed, when, and why (default); json: one line per engine and tick",
    )
    parser.add_argument(
        "--openmetrics",
        metavar="OUT",
        default=None,
        help="write every published series with timestamps, for "
        "'promtool tsdb create-blocks-from openmetrics OUT DIR'; prints nothing else unless --format is given",
    )
    parser.add_argument(
        "--thresholds", metavar="FILE", default=None, help="file with thresholds to use instead of the built-in ones"
    )


def run(options: argparse.Namespace) -> int:
    """Replay. Raises ``InputError`` when recording, thresholds or output are unusable."""
    if "" in options.files:
        raise InputError("an empty name was given; allowed: the path of a recording")
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(file, on_problem=stack.enter_context(_damage(file)))) for file in options.files
        ]
        _replay(options, itertools.chain.from_iterable(readers))
    return 0


@contextlib.contextmanager
def _damage(file: str) -> Iterator[Callable[[ReadProblem], None]]:
    """Reports unreadable lines on standard error: the first few, then a count."""
    count = 0

    def report(problem: ReadProblem) -> None:
        nonlocal count
        count += 1
        if count <= _SHOWN_PROBLEMS:
            print(f"{file}:{problem.line}: {problem.text}", file=sys.stderr)

    yield report
    if count > _SHOWN_PROBLEMS:
        print(f"{file}: {count - _SHOWN_PROBLEMS} more lines skipped", file=sys.stderr)


def _replay(options: argparse.Namespace, ticks: Iterator[Snapshot]) -> None:
    form = options.format or ("text" if options.openmetrics is None else None)
    timeline = Timeline() if form == "text" else None
    pipeline = Pipeline(load(options.thresholds))
    count, engines = 0, False
    with contextlib.ExitStack() as stack:
        series = (
            stack.enter_context(OpenMetricsWriter(options.openmetrics, options.files))
            if options.openmetrics is not None
            else None
        )
        for count, snapshot in enumerate(ticks, 1):
            state = replace(pipeline.observe(snapshot), ticks=count)
            engines = engines or bool(state.engines)
            if timeline is not None:
                _print(timeline.lines(snapshot.time, state.engines))
            elif form == "json":
                _print(json_line(snapshot.time, engine) for engine in state.engines)
            if series is not None:
                series.add(snapshot.time, state)
        _refuse_nothing(options, count, engines or form is None)
    if timeline is not None:
        _print(timeline.summary())
    if series is not None:
        print(f"{options.openmetrics}: {series.samples} samples", file=sys.stderr)


def _refuse_nothing(options: argparse.Namespace, ticks: int, engines: bool) -> None:
    """Raise ``InputError`` where nothing could be shown."""
    files = ", ".join(options.files)
    if not ticks:
        raise InputError(f"{files}: no readable tick; allowed: a recording with at least one tick")
    if not engines:
        raise InputError(
            f"{files}: the recording contains no engine; allowed: a recording with at least one successful scrape of"
            " an engine"
        )


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
