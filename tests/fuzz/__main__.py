"""``python -m tests.fuzz``: every subject in turn until each has enough cases, or the time is over.

What has been done is kept in ``build/fuzz.json``: a further run goes on from there. The figures in
``build/fuzz.md`` are of all seeds; ``--figures`` writes nothing else. Exit 1 when a case failed; it is then in
``tests/fixtures/fuzz``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.fuzz.guided import fuzz_each
from tests.fuzz.run import SUBJECTS, Count, keep, kept, run

ROOT: Final = Path(__file__).parents[2]
STATE: Final = ROOT / "build" / "fuzz.json"
DOCUMENT: Final = STATE.with_suffix(".md")
TEST: Final = "tests/fuzz/test_fuzz.py::test_what_has_to_hold_holds_for_some_cases"
SLICE_SECONDS: Final = 1.0
GUIDED_MINUTES: Final = 60.0  # at most, for each subject
NODE_SHARE: Final = 10  # a whole snapshot counts as so many cases of a parser


def main() -> int:
    """Run, keep count, write figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000, help="cases of each parser; of whole snapshots a tenth")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=sorted(SUBJECTS), help="only these subjects")
    parser.add_argument("--anew", action="store_true", help="forget what earlier runs did")
    parser.add_argument("--figures", action="store_true", help="run nothing; write build/fuzz.md from what was done")
    parser.add_argument(
        "--guided", action="store_true", help="let coverage guide the cases, --minutes for each subject; counts nothing"
    )
    options = parser.parse_args()
    if options.guided:
        return 0 if fuzz_each(options.only or SUBJECTS, min(options.minutes, GUIDED_MINUTES)) else 1
    state = {} if options.anew else load_state(options.seed)
    if not options.figures:
        fuzz(state, options)
    write_figures(all_seeds())
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


def load_state(seed: int | str) -> dict[str, Count]:
    """What earlier runs with this seed did."""
    document: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    found = document.get(str(seed), {})
    return {name: Count(**found[name]) for name in SUBJECTS if name in found}


def all_seeds() -> dict[str, Count]:
    """What earlier runs did, with whatever seed."""
    found: dict[str, Count] = {}
    for seed in json.loads(STATE.read_text()) if STATE.exists() else {}:
        for name, count in load_state(seed).items():
            both = found.setdefault(name, Count())
            both.cases += count.cases
            both.seconds += count.seconds
            both.failed = {
                place: both.failed.get(place, 0) + count.failed.get(place, 0) for place in both.failed | count.failed
            }
    return found


def save_state(seed: int, state: dict[str, Count]) -> None:
    """Keep count."""
    document = json.loads(STATE.read_text()) if STATE.exists() else {}
    document[str(seed)] = {name: vars(count) for name, count in state.items()}
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(document, indent=1))


def write_figures(state: dict[str, Count], document: Path = DOCUMENT) -> None:
    """The table of all subjects."""
    by_subject: dict[str, int] = {}
    for path in kept():
        name = path.stem.rpartition("-")[0]
        by_subject[name] = by_subject.get(name, 0) + 1
    found = []
    for name, subject in SUBJECTS.items():
        count = state.get(name, Count())
        found.append(
            f"| {subject.about} | {subject.holds} | {count.cases:,} | {count.seconds / 60:.1f} |"
            f" {sum(count.failed.values())} | {by_subject.get(name, 0)} | `{TEST}` |"
        )
    total, minutes = sum(one.cases for one in state.values()), sum(one.seconds for one in state.values()) / 60
    text = (
        f"{total:,} cases in {minutes:.0f} minutes of CPU.\n\n| what is"
        " fuzzed | what holds for every case | cases | CPU minutes | failed | once failed, now a test | test"
        " |\n|---|---|---|---|---|---|---|\n" + "\n".join(found) + "\n"
    )
    document.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
