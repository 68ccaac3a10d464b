"""Run seeds one after the other, print what was seen, write the figures.

The last result of each seed is kept in ``build/soak.json``, so that seeds can be run apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.sources.kubernetes import node as kubernetes

import lab.soak
from lab.soak import Result, soak

STATE: Final = Path(__file__).parents[2] / "build" / "soak.json"
DOCUMENT: Final = STATE.with_suffix(".md")
TEST: Final = "tests/e2e/test_soak.py"


def write_figures(results: dict[int, Result]) -> None:
    """All figures, in ``build/soak.md``."""
    worst: dict[str, tuple[float, int]] = {}
    for result in results.values():
        for name, took in result.recovery.items():
            worst[name] = max(took, worst.get(name, (0.0, 0)))
    table = [
        "| seed | faults | minutes | pods passed by | looks | not judged | series of an engine | MiB | descriptors"
        " | threads | problems | test |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, result in results.items():
        grown = [f"{then:.0f} → {now:.0f}" for then, now in zip(result.before, result.after, strict=True)]
        cells = (seed, result.faults, f"{result.seconds / 60:.0f}", result.pods, result.looks, result.unjudged)
        cells = (*cells, result.series, *grown, len(result.problems), f"`{TEST}`")
        table.append(f"| {' | '.join(map(str, cells))} |")
    problems = [
        f"* Seed {seed}, not as it should be: {problem}."
        for seed, result in results.items()
        for problem in result.problems
    ]
    lines = [*table, *([""] if problems else []), *problems]
    slowest = [
        f"* {name}: {took:.1f} s, {ticks} ticks"
        for name, (took, ticks) in sorted(worst.items(), key=lambda one: one[1])
    ][::-1]
    text = "\n".join((*lines, "", "Longest time until everything was back, by fault:", "", *slowest, ""))
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> int:
    """Exit 1 when something was not as it has to be."""
    parser = argparse.ArgumentParser(description=(lab.soak.__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="for each seed")
    parser.add_argument("--seed", type=int, action="append", help="default: 1, 2 and 3")
    parser.add_argument("--only", action="append", help="only these faults; the figures are not written")
    parser.add_argument("--interval", default="1", help="seconds between two ticks and two readings of each source")
    parser.add_argument(
        "--figures", action="store_true", help="run nothing; write the figures of the runs that are kept"
    )
    options = parser.parse_args()
    kubernetes.TICK = options.interval
    bad = False
    for seed in () if options.figures else options.seed or (1, 2, 3):
        with tempfile.TemporaryDirectory() as directory:
            result = soak(seed, 60 * options.minutes, Path(directory), only=options.only)
        print(json.dumps({"seed": seed, **vars(result)}, indent=1), flush=True)
        bad = bad or bool(result.problems)
        if options.only is None:
            keep(seed, result)
    if options.only is None:
        write_figures(kept())
    return int(bad)


def keep(seed: int, result: Result) -> None:
    """Put the result of a seed beside those of others."""
    found = {**kept(), seed: result}
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps({str(each): vars(found[each]) for each in sorted(found)}, indent=1))


def kept() -> dict[int, Result]:
    """The results of earlier runs, by seed."""
    document = json.loads(STATE.read_text()) if STATE.exists() else {}
    results = {int(seed): Result(**found) for seed, found in document.items()}
    for result in results.values():
        result.recovery = {name: (took[0], int(took[1])) for name, took in result.recovery.items()}
    return results


if __name__ == "__main__":
    sys.exit(main())
