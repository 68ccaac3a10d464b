"""``python -m tests.fuzz``: every subject in turn until each has enough cases, or the time is over.

What has been done is kept in ``build/fuzz.json``: a further run goes on from there. Exit 1 when a case failed; it is
then in ``tests/fixtures/fuzz``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.fuzz.run import SUBJECTS, Count, keep, run

STATE: Final = Path(__file__).parents[2] / "build" / "fuzz.json"
SLICE_SECONDS: Final = 1.0
NODE_SHARE: Final = 10  # a whole snapshot counts as so many cases of a parser


def main() -> int:
    """Run, keep count, say how far each subject has come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000, help="cases of each parser; of whole snapshots a tenth")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=sorted(SUBJECTS), help="only these subjects")
    parser.add_argument("--anew", action="store_true", help="forget what earlier runs with this seed did")
    options = parser.parse_args()
    state = {} if options.anew else load_state(options.seed)
    fuzz(state, options)
    for name, count in state.items():
        print(f"{name}: {count.cases:,} cases, {count.seconds / 60:.1f} minutes, {sum(count.failed.values())} failed")
    return 1 if any(count.failed for count in state.values()) else 0


def fuzz(state: dict[str, Count], options: argparse.Namespace) -> None:
    """Give every subject that has not enough cases a slice in turn."""
    end = time.monotonic() + 60 * options.minutes
    names = options.only or list(SUBJECTS)
    while time.monotonic() < end:
        left = {name: wanted(name, options.cases) - state.setdefault(name, Count()).cases for name in names}
        if not any(number > 0 for number in left.values()):
            return
        for name in (name for name, number in left.items() if number > 0):
            subject, count = SUBJECTS[name], state[name]
            seconds = SLICE_SECONDS * (3 if name == "node" else 1)
            done = run(subject, options.seed, count.cases, left[name], seconds, lambda case, s=subject: keep(s, case))
            count.cases += done.cases
            count.seconds += done.seconds
            for place, number in done.failed.items():
                count.failed[place] = count.failed.get(place, 0) + number
                print(f"{name}: {place}: {number}", flush=True)
            save_state(options.seed, state)
            if time.monotonic() > end:
                break


def wanted(name: str, cases: int) -> int:
    """How many cases of a subject are enough."""
    return cases // NODE_SHARE if name == "node" else cases


def load_state(seed: int) -> dict[str, Count]:
    """What earlier runs with this seed did."""
    document: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    found = document.get(str(seed), {})
    return {name: Count(**found[name]) for name in SUBJECTS if name in found}


def save_state(seed: int, state: dict[str, Count]) -> None:
    """Keep count."""
    document = json.loads(STATE.read_text()) if STATE.exists() else {}
    document[str(seed)] = {name: vars(count) for name, count in state.items()}
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
