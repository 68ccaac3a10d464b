"""``python -m benchmarks.accuracy [--check] [--only NAME ...] [--verbose]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.accuracy import report, show
from benchmarks.accuracy.score import PARTS, score


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print a summary, write or check ``docs/accuracy.md``. Exit 1 when the check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if docs/accuracy.md is out of date")
    parser.add_argument(
        "--only",
        metavar="NAME",
        default="",
        help=f"a part ({', '.join(PARTS)}) or a piece of a recording's name; writes nothing",
    )
    parser.add_argument("--verbose", action="store_true", help="show every item that is not right")
    parser.add_argument(
        "--scored-only",
        action="store_true",
        help="with --verbose: the items that nothing is tuned on; look, but do not tune on them",
    )
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one a core)")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    parts = (options.only,) if options.only in PARTS else PARTS
    result = score(parts, options.jobs, "" if options.only in PARTS else options.only)
    if not result.ticks:
        parser.error(f"--only {options.only}: no recording has that in its name")
    if options.verbose:
        print("\n".join(show.wrong_items(result, scored_only=options.scored_only)), end="\n\n")
    print("\n".join(show.summary(result)))
    print(f"{result.ticks} ticks in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    if options.only:
        return 0
    return report.publish(result, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
