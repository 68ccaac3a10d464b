"""Run seeds one after the other, print what was seen, write the figures."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.sources.kubernetes import node as kubernetes

import benchmarks.soak
from benchmarks.soak import Result, soak

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
SECTION: Final = re.compile(r"(<!-- soak: written by make soak -->\n).*?(<!-- end of soak -->)", re.DOTALL)


def write_figures(results: dict[int, Result]) -> None:
    """The section in docs/reliability.md."""
    worst: dict[str, float] = {}
    for result in results.values():
        for name, took in result.recovery.items():
            worst[name] = max(took, worst.get(name, 0.0))
    lines = [
        f"Seed {seed}: {result.faults} faults in {result.seconds / 60:.0f} minutes, {result.pods} pods passed by,"
        f" {result.looks} looks during faults ({result.series} series or more of each engine without a fault),"
        f" {result.unjudged} looks and recoveries not judged because the machine was too busy;"
        f" {result.before[0]:.0f} MiB, {result.before[1]} descriptors, {result.before[2]} threads after"
        f" the first round, {result.after[0]:.0f} MiB, {result.after[1]}, {result.after[2]} in the end;"
        f" {len(result.problems)} problems."
        for seed, result in results.items()
    ]
    lines += [
        f"Seed {seed}, not as it should be: {problem}."
        for seed, result in results.items()
        for problem in result.problems
    ]
    lines = [f"* {line}" for line in lines]
    slowest = [f"* {name}: {took:.1f} s" for name, took in sorted(worst.items(), key=lambda one: -one[1])]
    text = "\n".join((*lines, "", "Longest time until everything was back, by fault:", "", *slowest, ""))
    DOCUMENT.write_text(SECTION.sub(lambda found: found[1] + text + found[2], DOCUMENT.read_text()))


def main() -> int:
    """Exit 1 when something was not as it has to be."""
    parser = argparse.ArgumentParser(description=(benchmarks.soak.__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="for each seed")
    parser.add_argument("--seed", type=int, action="append", help="default: 1, 2 and 3")
    parser.add_argument("--only", action="append", help="only these faults; the figures are not written")
    parser.add_argument("--interval", default="1", help="seconds between two ticks and two readings of each source")
    options = parser.parse_args()
    kubernetes.TICK = options.interval
    results = {}
    for seed in options.seed or (1, 2, 3):
        with tempfile.TemporaryDirectory() as directory:
            results[seed] = soak(seed, 60 * options.minutes, Path(directory), only=options.only)
        print(json.dumps({"seed": seed, **vars(results[seed])}, indent=1), flush=True)
    if options.only is None:
        write_figures(results)
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
