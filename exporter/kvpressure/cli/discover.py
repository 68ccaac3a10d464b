"""``kvpressure discover``: which containers or processes are taken for engines and why, and why the others are not."""

from __future__ import annotations

import argparse
import sys

from kvpressure.errors import InputError
from kvpressure.settings.settings import Settings
from kvpressure.toolbox import discovering
from kvpressure.toolbox.terminal import answer

_EXAMPLES = """\
examples:
  kvpressure discover
      the servers among the processes of this host
  kvpressure discover --exporter 10.0.0.7
      what the exporter on a node found
  kvpressure discover -n inference
      reads the pods through kubectl (get; nothing is changed)
  kvpressure discover -f pod.yaml --format json
      pods, the pod templates of Deployments and other workloads, LLMInferenceServices
  docker compose config | kvpressure discover -f -

Exit status: 0 all engines found can be scraped, 1 some cannot, 2 nothing was found, or a part of the input cannot be read.
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--exporter", metavar="ADDRESS", help="address of a running exporter: host, host:port or URL")
    where.add_argument("-n", "--namespace", metavar="NAMESPACE", help="namespace whose pods are read through kubectl")
    where.add_argument("-f", "--filename", metavar="FILE", action="append", help="YAML or JSON, - = standard input")
    parser.add_argument("-l", "--selector", metavar="LABELS", help="only pods with these labels; needs -n")
    parser.add_argument("--context", metavar="CONTEXT", help="kubectl's context; needs -n")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(options: argparse.Namespace) -> int:
    """Print one entry per container. Raises ``InputError``."""
    for flag in ("selector", "context"):
        if getattr(options, flag) is not None and not options.namespace:
            raise InputError(f"--{flag}: only together with -n NAMESPACE")
    note = ""
    if options.exporter:
        entries = discovering.of_exporter(options.exporter)
    elif options.namespace:
        entries = discovering.of_namespace(options.namespace, options.selector, options.context)
    elif options.filename:
        entries, note = discovering.of_files(options.filename)
    else:
        entries = discovering.of_host(Settings())
    answer(options.format, list(entries), discovering.text(entries))
    if note:
        print(f"kvpressure discover: {note}", file=sys.stderr)
    refused = [
        entry for entry in entries if entry.get("result") == "no_target" and entry.get("reason") != "no_endpoint"
    ]
    return 1 if refused else 2 if note else 0
