"""``make demo``: an incident on a simulated node, seen by the real exporter, Prometheus and Alertmanager."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Final

from kvpressure.cli import Parser
from kvpressure.errors import InputError
from kvpressure.toolbox.option_values import number, whole_number
from lab.demo.scenario import SCENARIOS

_LEAST_SECONDS: Final = 60.0  # less leaves no time to fill a cache and to empty the windows again
_MOST_SECONDS: Final = 86_400.0
_ENVIRONMENT_STATUS: Final = 3
_LEAST_SPEED: Final = 0.01
_MOST_SPEED: Final = 20.0  # beyond, a second of simulated time is too short for a scrape


_EXAMPLES: Final = """\
examples:
  make demo                                            # three minutes of KV pressure, with alerts if Prometheus is there
  make demo ARGS="--scenario stall --for 300 --speed 4"
  make demo ARGS="--port 9400 --no-prometheus"         # then open http://127.0.0.1:9400/

Exit status: 0 all expected verdicts and alerts were seen, 1 some were missing, 2 wrong usage, 3 Prometheus did not start, 4 the machine was too slow for --speed.
"""  # noqa: E501


def parser() -> Parser:
    """The options of the demo."""
    parser = Parser("demo", "Run a simulated node.")
    named = "\n".join(f"  {name:<16}{scenario.title}" for name, scenario in SCENARIOS.items())
    parser.epilog = f"scenarios:\n{named}\n\n{_EXAMPLES}"
    parser.add_argument(
        "--scenario",
        choices=tuple(SCENARIOS),
        default="kv_pressure",
        help="incident to simulate (default: kv_pressure)",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=number(_LEAST_SECONDS, _MOST_SECONDS),
        default=180.0,
        metavar="SECONDS",
        help=f"simulated time, {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} (default: 180)",
    )
    parser.add_argument(
        "--speed",
        type=number(_LEAST_SPEED, _MOST_SPEED),
        default=1.0,
        metavar="N",
        help=f"simulated seconds per real second, {_LEAST_SPEED:g} to {_MOST_SPEED:g} (default: 1)",
    )
    parser.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=0,
        metavar="PORT",
        help="port of the exporter on 127.0.0.1 (default: any free one)",
    )
    parser.add_argument(
        "--no-prometheus",
        dest="prometheus",
        action="store_false",
        help="verdicts only, without Prometheus and Alertmanager even if they are installed",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo. 0 = everything promised was seen, 1 = something was missing, 3 = Prometheus does not
    start, 4 = something was missing on a machine that was too slow. Raises ``InputError``.
    """
    from kvpressure.publish.web.server import ListenError
    from lab.demo.prometheus_stack import StackError
    from lab.demo.runner import DemoOptions
    from lab.demo.runner import run as play

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        return play(DemoOptions(SCENARIOS[args.scenario], args.seconds, args.speed, args.prometheus, args.port))
    except ListenError as error:
        raise InputError(f"--port: {error}; allowed: a free port") from error
    except StackError as error:
        print(
            f"demo: {error}; give --no-prometheus to run the demo without Prometheus and Alertmanager",
            file=sys.stderr,
        )
        return _ENVIRONMENT_STATUS


def main() -> int:
    """Run the demo; a mistake in the options is one line and 2."""
    try:
        return run(parser().parse_args())
    except InputError as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
