"""``python -m tests.fuzz``: every subject in turn until the time is over. Exit 1 when a case failed; it is then in
``tests/fixtures/fuzz``.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Final

from tests.fuzz.run import SUBJECTS, Count, keep, run

SLICE_SECONDS: Final = 1.0


def main() -> int:
    """Run, keep what fails, say how many cases of each subject there were."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many minutes")
    parser.add_argument("--seed", type=int, default=1, help="others draw other cases")
    parser.add_argument("--only", action="append", choices=sorted(SUBJECTS), help="only these subjects")
    options = parser.parse_args()
    counts = {name: Count() for name in options.only or SUBJECTS}
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        for name, count in counts.items():
            run(SUBJECTS[name], options.seed, count, seconds=SLICE_SECONDS, keep=partial(keep, SUBJECTS[name]))
    for name, count in counts.items():
        print(f"{name}: {count.cases:,} cases, failed: {count.failed or 'none'}")
    return 1 if any(count.failed for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
