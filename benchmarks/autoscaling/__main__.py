"""Play every case under every policy and write ``docs/autoscaling.md``: ``python -m benchmarks.autoscaling``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.autoscaling.cluster import PEAK_REPLICAS, START_SECONDS, STEP_SECONDS, Case, Outcome, cases, play
from benchmarks.autoscaling.policies import (
    DOWN_WINDOW_SECONDS,
    MAX_REPLICAS,
    MIN_REPLICAS,
    POLICIES,
    TARGET_SHARE,
    TARGET_WAITING,
)

ROOT: Final = Path(__file__).resolve().parents[2]
TEMPLATE: Final = Path(__file__).with_name("autoscaling.md")
_BARS: Final = " ▁▂▃▄▅▆▇█"
_COLUMNS: Final = 60


def main() -> int:
    """Write the report; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="of each recorded service (default 1)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "autoscaling.md")
    args = parser.parse_args()
    played = cases(args.hours)
    jobs = [(case, policy) for case in played for policy in POLICIES]
    with ProcessPoolExecutor(args.workers) as pool:
        outcomes = list(pool.map(_play, jobs))
    args.out.write_text(report(played, outcomes, args.hours), encoding="utf-8")
    print(f"autoscaling: wrote {args.out}")
    return 0


def _play(job: tuple[Case, str]) -> Outcome:
    outcome = play(*job)
    print(f"autoscaling: {outcome.case}, {outcome.policy}: {outcome.replica_hours:.1f} replica hours", file=sys.stderr)
    return outcome


def report(played: Sequence[Case], outcomes: Sequence[Outcome], hours: float) -> str:
    """The page: its text, and the figures of this run."""
    return TEMPLATE.read_text(encoding="utf-8").format(
        hours=f"{hours:g}",
        peak=f"{PEAK_REPLICAS:g}",
        start=f"{START_SECONDS:g}",
        step=f"{STEP_SECONDS:g}",
        down=f"{DOWN_WINDOW_SECONDS:g}",
        least=MIN_REPLICAS,
        most=MAX_REPLICAS,
        share=f"{TARGET_SHARE:.0%}".replace("%", " %"),
        waiting=f"{TARGET_WAITING:g}",
        figures="\n".join(
            _figures(case, [one for one in outcomes if one.case == case.name]) for case in played
        ).rstrip(),
    )


def _figures(case: Case, outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f"| {one.policy} | {one.replica_hours:.1f} | {max(one.replicas)} | {one.changes} | {one.pressed_minutes:.0f} | "
        f"{one.waiting_share * 100:.1f} % | {one.preemptions} | {one.finished} |\n"
        for one in outcomes
    )
    width = max(len(one.policy) for one in outcomes)
    lines = [f"{'load':{width}} {_bars(case.per_second, max(case.per_second))}"]
    lines += [f"{one.policy:{width}} {_bars(one.replicas, MAX_REPLICAS)}" for one in outcomes]
    drawn = "\n".join(lines)
    return (
        f"### {case.name[0].upper()}{case.name[1:]}\n\n| scale on | replica hours | most replicas | changes | minutes"
        " under pressure | requests waiting | preemptions | finished"
        f" |\n|---|---|---|---|---|---|---|---|\n{rows}\n```text\n{drawn}\n```\n"
    )


def _bars(values: Sequence[float], most: float) -> str:
    """The values in ``_COLUMNS`` columns, each as high as its mean."""
    edges = [round(len(values) * column / _COLUMNS) for column in range(_COLUMNS + 1)]
    parts = [values[first : max(end, first + 1)] for first, end in itertools.pairwise(edges)]
    return "".join(_BARS[round(sum(part) / len(part) / most * (len(_BARS) - 1))] for part in parts)


if __name__ == "__main__":
    sys.exit(main())
