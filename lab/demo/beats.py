"""Whether a run kept time. Compressed time does not wait: what a busy machine evaluates late, the story shows late,
or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TOLERATED_SHARE: Final = 0.05  # of the beats: a quiet machine misses none, and a run that missed half had false alerts
_GROUP: Final = re.compile(r"prometheus_rule_group_iterations(_missed)?_total\{(.*)\} (\S+)")


@dataclass(frozen=True, slots=True)
class Beats:
    """How often something was due in a run, and how often it was missed."""

    what: str
    due: float
    missed: float

    @property
    def share(self) -> float:
        """Share of the beats that were missed; 0 when none was due."""
        return self.missed / self.due if self.due else 0.0

    def __str__(self) -> str:
        """Both counts."""
        return f"{self.missed:.0f} of {self.due:.0f} {self.what} missed"


def counted(what: str, due: float, came: float) -> Beats:
    """The beats of something of which so many came; more than were due is none missed."""
    return Beats(what, due, max(0.0, due - came))


def rule_evaluations(metrics: str) -> Beats:
    """The rule group that missed the largest share of its evaluations, from Prometheus' own ``/metrics``."""
    due: dict[str, float] = {}
    missed: dict[str, float] = {}
    for line in metrics.splitlines():
        if found := _GROUP.fullmatch(line):
            (missed if found[1] else due)[found[2]] = float(found[3])
    groups = [Beats("rule evaluations", due[group], missed.get(group, 0.0)) for group in due]
    return max(groups, key=lambda beats: beats.share, default=Beats("rule evaluations", 0, 0))


def late(beats: Iterable[Beats]) -> list[Beats]:
    """Those that missed more than ``TOLERATED_SHARE``: nothing that such a run shows, or does not show, counts."""
    return [one for one in beats if one.share > TOLERATED_SHARE]
