"""``python -m lab.accuracy [--check] [--only NAME ...] [--verbose]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from lab.accuracy import ablation, data, report, rows, show, tables
from lab.accuracy.score import PARTS, score


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print a summary, write or check ``docs/reports/accuracy.md``. Exit 1 when the check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m lab.accuracy", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if docs/reports/accuracy.md is out of date"
    )
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
    parser.add_argument(
        "--ablate",
        action="store_true",
        help="first replay everything that is judged with inputs taken away, and keep the table",
    )
    parser.add_argument(
        "--untouched",
        action="store_true",
        help="score the untouched incidents and keep the result; refused when that was done",
    )
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one a core)")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    if options.ablate:
        found = ablation.ablate(ablation.names(), options.jobs)
        kept = {**ablation.made(), "rows": ablation.rows(found)}
        tables.ABLATION_FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        for answer in ablation.wrong(found):
            print(f"{answer.name}, {answer.taken} taken away: {answer.verdict}, wrong and confident")
    if options.untouched:
        if tables.UNTOUCHED_FILE.exists():
            parser.error(f"--untouched: scored already, see {tables.UNTOUCHED_FILE.name}; they are scored once")
        kept = tables.untouched(score((data.UNTOUCHED,), options.jobs).answers)
        tables.UNTOUCHED_FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
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
    if not options.check:
        rows.write(result)
    return report.publish(result, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
