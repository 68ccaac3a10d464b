"""``kvpressure diagnose``: quick triage in under two minutes."""

from __future__ import annotations

import argparse

from kvpressure.settings.thresholds import load
from kvpressure.toolbox import inputs, report
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kvpressure diagnose http://10.0.0.5:8000 --args='--max-num-seqs 64' --gpu H100:80
      watch a server for 30 s and find what limits it
  kvpressure diagnose -n inference -l app=vllm
      the triage steps through kubectl (get, logs; nothing is changed): pods, restarts, logs, events, metrics
  kvpressure diagnose incident.jsonl.gz
  kvpressure diagnose --exporter http://node-1:9846
  kvpressure diagnose --prometheus http://prometheus:9090 --since 2h --pod vllm-0 --format json

Without an input it asks the exporter on this machine. Exit status: 0 healthy or idle, 1 a problem or an unknown verdict,
2 the input cannot be used.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    inputs.add_arguments(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Watch, judge, print. Raises ``InputError`` for unusable input."""
    thresholds = load(options.thresholds)
    found = inputs.open_inputs(options, thresholds)
    answered = report.answers(found, thresholds)
    answer(options.format, report.as_json(found, answered), report.as_text(found, answered))
    return 0 if all(answer.fine for answer in answered) else 1
