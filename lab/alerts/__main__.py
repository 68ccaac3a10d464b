"""``python -m lab.alerts [--keep-fortnight]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from lab.alerts import cold, recorded, report, stored
from lab.alerts.fortnight import fortnight


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a summary, write ``docs/reports/alert-proof.md``. Exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m lab.alerts", description=__doc__)
    parser.add_argument(
        "--keep-fortnight",
        action="store_true",
        help="take the fortnight of the last run; play only the recordings (1 CPU minute)",
    )
    parser.add_argument(
        "--service", choices=("m-mid", "m-large"), default="m-mid", help="whose request rates (default: m-mid)"
    )
    options = parser.parse_args(argv)
    if not options.keep_fortnight:
        began = time.perf_counter()
        days = fortnight(options.service)
        stored.save(stored.summary(options.service, days, time.perf_counter() - began))
    result = report.Result(stored.load(), recorded.incidents(), recorded.quiet(), cold.outcomes())
    report.write(result)
    missed = result.missed()
    for line in (*report.bars(result), *(f"missed: {name}" for name in missed)):
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
