"""What each way of scaling asks for, and what Kubernetes' autoscaler makes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MIN_REPLICAS: Final = 1
MAX_REPLICAS: Final = 8
TOLERANCE: Final = 0.1  # --horizontal-pod-autoscaler-tolerance
DOWN_WINDOW_SECONDS: Final = 300.0  # behavior.scaleDown.stabilizationWindowSeconds
UP_PODS: Final = 4  # behavior.scaleUp.policies, per 15 s: the larger of the two
UP_PERCENT: Final = 100
FORECAST_SECONDS: Final = 180.0  # a new replica takes that long to start
TARGET_SHARE: Final = 0.7
TARGET_WAITING: Final = 5.0
NOT_HELPED: Final = ("stalled", "host_bound")
"""Verdicts that another replica does not help: a restart does, or CPU."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What Prometheus knows of one ready replica; ``None`` = the series is absent. Shares are 0-1 of its KV cache."""

    waiting: float
    kv_used: float | None
    kv_used_max: float | None
    forecast: float | None  # kv_used_max in FORECAST_SECONDS, by the trend of the last minutes
    queue_share: float | None  # what the waiting requests will hold, at the mean length of those that run
    verdict: str


Policy = Callable[[Sequence[Replica]], float]
"""Replicas wanted, before rounding."""


def by_waiting(replicas: Sequence[Replica]) -> float:
    """``sum(vllm:num_requests_waiting)`` with an average of ``TARGET_WAITING``."""
    return sum(one.waiting for one in replicas) / TARGET_WAITING


def by_kv_usage(replicas: Sequence[Replica]) -> float:
    """``sum(vllm:kv_cache_usage_perc)`` with an average of ``TARGET_SHARE``."""
    return sum(one.kv_used or 0.0 for one in replicas) / TARGET_SHARE


def by_kvpressure(replicas: Sequence[Replica]) -> float:
    """``kvpressure:required_replicas:sum`` of ``deploy/autoscaling``: required KV cache, as far as replicas help."""
    return sum(required_share(one) for one in replicas) / TARGET_SHARE


def required_share(one: Replica) -> float:
    """KV cache the replica's load requires: held now or soon, and by the queue. A replica that scaling does not help,
    or whose figures are absent, asks for itself and no more.
    """
    if one.verdict in NOT_HELPED or one.kv_used_max is None:
        return TARGET_SHARE
    return max(one.kv_used_max, min(1.0, one.forecast or 0.0)) + (one.queue_share or 0.0)


POLICIES: Final[Mapping[str, Policy]] = {
    "requests waiting": by_waiting,
    "KV cache usage": by_kv_usage,
    "kvpressure": by_kvpressure,
}


class Autoscaler:
    """The HorizontalPodAutoscaler's algorithm for one external metric with an AverageValue."""

    def __init__(self) -> None:
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, now: float, current: int, wanted: float) -> int:
        """Replicas from now on, of ``current`` that run or start."""
        desired = current if abs(wanted / current - 1) <= TOLERANCE else math.ceil(wanted - 1e-9)
        desired = min(MAX_REPLICAS, max(MIN_REPLICAS, desired))
        self._wanted.append((now, desired))
        while self._wanted[0][0] < now - DOWN_WINDOW_SECONDS:
            self._wanted.popleft()
        if desired > current:
            return min(desired, current + max(UP_PODS, current * UP_PERCENT // 100))
        return min(current, max(wanted for _, wanted in self._wanted))
