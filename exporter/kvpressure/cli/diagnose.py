"""``kvpressure diagnose``: quick triage in under two minutes."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.toolbox import following, inputs, report
from kvpressure.toolbox.history import FoundEngines
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kvpressure diagnose http://10.0.0.5:8000 --args='--max-num-seqs 64' --gpu H100:80
      watch a server until the answer is certain, at most 30 s, and find what limits it
  kvpressure diagnose -n inference -l app=vllm
      the triage steps through kubectl (get, logs; nothing is changed): pods, restarts, logs, events, metrics
  kvpressure diagnose incident.jsonl.gz
  kvpressure diagnose --exporter http://node-1:9846
  kvpressure diagnose --prometheus http://prometheus:9090 --since 2h --pod vllm-0 --format json
  kvpressure diagnose --prometheus http://prometheus:9090 --at 2026-11-27T03:12:00Z

Without an input it asks the exporter on this machine. Exit status: 0 healthy or idle, 1 a problem or an unknown verdict,
2 the input cannot be used, 130 interrupted: the answer is what was known by then.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    inputs.add_arguments(parser)
    parser.add_argument(
        "--watch", action="store_true", help="go on, and print the answer again whenever a verdict changes"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Watch, judge, print. Raises ``InputError`` for unusable input."""
    thresholds = load(options.thresholds)
    if options.watch:
        _watch(options, thresholds)
    return _print(inputs.open_inputs(options, thresholds), options, thresholds)


def _watch(options: argparse.Namespace, thresholds: Thresholds) -> NoReturn:
    """Print the first certain answer, and each other one after it. Raises ``KeyboardInterrupt`` at the end."""
    looks = inputs.follow(options, thresholds)
    found = following.answered(looks, options.seconds, thresholds)
    while True:
        _print(found, options, thresholds)
        before = _verdicts(found)
        found = next(later for later in looks if _verdicts(later) != before)


def _verdicts(found: FoundEngines) -> tuple[object, ...]:
    engines = [case.view.engine for case in found.cases]
    said = ((one.key, one.up, one.diagnosis.verdict, one.diagnosis.stage) for one in engines)
    return (*said, *found.warnings)


def _print(found: FoundEngines, options: argparse.Namespace, thresholds: Thresholds) -> int:
    answered = report.answers(found, thresholds)
    answer(options.format, report.as_json(found, answered), report.as_text(found, answered))
    if found.interrupted:
        raise KeyboardInterrupt
    return 0 if all(answer.fine for answer in answered) else 1
