"""``kvpressure top``: engines in a live table."""

from __future__ import annotations

import argparse
import io
import shutil
from itertools import chain

from rich.console import Console, Group

from kvpressure.errors import InputError
from kvpressure.printable import command
from kvpressure.publish.collector import fine
from kvpressure.settings.thresholds import Thresholds, load
from kvpressure.toolbox import fetch, following, inputs, live_screen
from kvpressure.toolbox.live_table import LiveTable

_EXAMPLES = """\
examples:
  kvpressure top                                  # the engines of the exporter on this machine
  kvpressure top --exporter node-1 --exporter node-2
  kvpressure top http://10.0.0.5:8000 http://10.0.0.6:8000
  kvpressure top --once                           # the table alone, also into a pipe

TTFT (time to first token) is the p95. Without a terminal, or with TERM=dumb, the table is printed once.

Exit status: 0 all healthy or idle, or q was pressed, 1 a problem, an unknown verdict or an exporter without an answer,
2 the input cannot be used, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("inputs", metavar="URL", nargs="*", help="servers ([NS/POD=]http://HOST:PORT[;args=...])")
    parser.add_argument(
        "--exporter", metavar="URL", action="append", help="address of a running exporter (repeatable; port 9846)"
    )
    parser.add_argument("--once", action="store_true", help="print the table and exit")
    inputs.add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Show the table. Raises ``InputError`` for unusable input."""
    thresholds = load(options.thresholds)
    if options.inputs and options.exporter:
        raise InputError("URL and --exporter cannot be combined; give one kind of input at a time")
    if options.once or not live_screen.is_possible():
        return _once(options, thresholds)
    live_screen.show(_looks(options, thresholds), LiveTable(thresholds))
    return 0


def _looks(options: argparse.Namespace, thresholds: Thresholds) -> live_screen.Looks:
    if not options.inputs:
        return _exporters(options)
    servers = following.servers(inputs.live_targets(options), options.gpu, thresholds, command(*options.inputs))
    return ([found] for found in servers)


def _exporters(options: argparse.Namespace) -> live_screen.Looks:
    """The given exporters, or the one on this machine, of which one has answered."""
    looks = following.exporters(options.exporter or [inputs.exporter_address(options)])
    try:
        return chain([next(looks)], looks)
    except fetch.NoExporterError as error:
        if options.exporter:
            raise
        raise InputError(f"no exporter on this machine; give URLs, or --exporter ({error.problem})") from error


def _once(options: argparse.Namespace, thresholds: Thresholds) -> int:
    """Print the table when the answers are certain."""
    looks = [inputs.watched(options, thresholds)] if options.inputs else next(_exporters(options))
    table = LiveTable(thresholds)
    table.update(looks)
    width = shutil.get_terminal_size().columns
    plain = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with plain.capture() as printed:
        plain.print(Group(*table.above(), table.table(width)))
    print(printed.get().rstrip())
    if any(found.interrupted for found in looks):
        raise KeyboardInterrupt
    all_well = all(fine(case.view.engine) for found in looks for case in found.cases)
    return 0 if all_well and not any(found.warnings for found in looks) else 1
