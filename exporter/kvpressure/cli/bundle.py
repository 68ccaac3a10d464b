"""``kvpressure bundle``: write or check alert rules, Alertmanager example, dashboards, runbooks and reference pages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from kvpressure.bundle import values
from kvpressure.bundle.render import differences, render, write
from kvpressure.bundle.rules import PROFILES, Options
from kvpressure.errors import InputError, refused_file
from kvpressure.settings.thresholds import load

_EXAMPLES: Final = """\
examples:
  kvpressure bundle --out monitoring                             # alerts/, dashboards/ and docs/ below it
  kvpressure bundle --out monitoring --values site.yaml          # URLs, durations, exclusions, labels
  kvpressure bundle --out monitoring --values site.yaml --check  # in CI: does what is there match?

Exit status: 0 done, or nothing differs; 1 --check found a difference; 2 the input cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=".",
        help="directory in which to write alerts/, dashboards/ and docs/ (default: .)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 and name every file that is missing in DIR, differs, or is not part of the bundle",
    )
    parser.add_argument(
        "--thresholds", metavar="FILE", default=None, help="file with your own thresholds, in lines 'name: value'"
    )
    parser.add_argument(
        "--values",
        metavar="FILE",
        default=None,
        help="settings of your site: URLs, durations, exclusions, labels",
    )
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default=PROFILES[0],
        help="literal: apply the guides' thresholds without this project's extra conditions (default: default)",
    )


def run(args: argparse.Namespace) -> int:
    """Write or check. 0 = done or nothing to report, 1 = ``--check`` found something; raises ``InputError``."""
    directory = Path(args.out)
    try:
        files = render(Options(load(args.thresholds), values.load(args.values), args.profile))
    except ArithmeticError as error:  # thresholds that are allowed each, and make no rules together
        raise InputError(
            f"these thresholds give no valid rules ({error}); use values closer to the defaults in"
            " docs/reference/thresholds.md"
        ) from error
    try:
        if not args.check:
            written = write(files, directory)
            print(f"{len(files)} files, {len(written)} changed, in {directory}")
            return 0
        found = differences(files, directory)
    except OSError as error:
        where = f"--out: {error.filename or directory}"
        raise InputError(refused_file(where, error, "a directory that can be written")) from error
    for line in found:
        print(line)
    return 1 if found else 0
