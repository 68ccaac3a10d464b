"""Replicas of one model behind a fair balancer, each a simulated engine with the exporter's pipeline on it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.alerts.fortnight import ARGS, ENGINE, LOAD, POD, START, capacity, rates
from benchmarks.autoscaling.policies import FORECAST_SECONDS, POLICIES, Autoscaler, Replica
from kvpressure.demo.node import CONTAINER, NAMESPACE, PodChange, PodSpec, SimulatedNode
from kvpressure.model.readings import Snapshot, SourceHealth
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import collect
from kvpressure.publish.exposition import encode
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape

STEP_SECONDS: Final = 15.0
START_SECONDS: Final = 180.0
TREND_SECONDS: Final = 600.0
PEAK_REPLICAS: Final = 2.5  # the busiest window of a service is what so many replicas can do
FIRST_REPLICAS: Final = 2
_SERIES: Final = re.compile(r"^kvpressure_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_VERDICT: Final = re.compile(r'verdict="(\w+)"')


@dataclass(frozen=True, slots=True)
class Case:
    """A load per step, and changes that happen to the first replica: (seconds, change)."""

    name: str
    per_second: tuple[float, ...]
    changes: tuple[tuple[float, PodChange], ...] = ()


@dataclass(slots=True)
class Outcome:
    """What came of one case under one policy."""

    case: str
    policy: str
    replicas: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    pressed_steps: int = 0
    preemptions: int = 0
    finished: int = 0
    changes: int = 0

    @property
    def replica_hours(self) -> float:
        """Replicas paid for, those that start included, in hours."""
        return sum(self.replicas) * STEP_SECONDS / 3600

    @property
    def pressed_minutes(self) -> float:
        """Minutes in which some replica had 5 or more requests waiting or pushed one out of its batch."""
        return self.pressed_steps * STEP_SECONDS / 60

    @property
    def waiting_share(self) -> float:
        """Share of the requests in the engines that wait instead of running."""
        total = sum(self.waiting) + sum(self.running)
        return sum(self.waiting) / total if total else 0.0


class Instance:
    """One replica."""

    def __init__(self, now: float, ready_at: float, seed: int) -> None:
        self.now = now
        self.ready_at = ready_at
        self.preemptions = 0
        self._rate = -1.0
        self._trend: deque[tuple[float, float]] = deque()
        self._node = SimulatedNode(
            [PodSpec(POD, ENGINE, replace(LOAD, requests_per_second=0.0))], lambda: self.now, seed
        )
        self._pipeline = Pipeline()
        self._scanner = Scanner()

    def apply(self, change: PodChange) -> None:
        """Let something happen to it now."""
        self._node.apply({POD: change}, self.now)

    def send(self, per_second: float) -> None:
        """Requests per second from now on."""
        if per_second != self._rate:
            self._rate = per_second
            self.apply(PodChange(load=replace(LOAD, requests_per_second=per_second)))

    def step(self, to: float) -> Replica:
        """Let time pass and scrape the exporter."""
        self.now = to
        node, gpu = self._node, self._node.pods[POD].gpu
        page = parse_scrape(
            node.metrics(POD),
            target=f"http://{POD}:8000/metrics",
            time=to,
            namespace=NAMESPACE,
            pod=POD,
            container=CONTAINER,
            gpus=(gpu.uuid,),
            args=ARGS,
            duration_seconds=0.01,
            scanner=self._scanner,
        )
        health = {name: SourceHealth(name, up=True, last_success=to) for name in ("engines", "nvidia", "podresources")}
        snapshot = Snapshot(
            time=to,
            gpus=node.gpus(),
            pages=(page,),
            containers=node.containers(),
            owners=node.owners(),
            logs=node.logs(),
            targets=(page.target,),
            health=health,
        )
        return self._read(encode(collect(self._pipeline.observe(snapshot)), openmetrics=False).decode())

    def _read(self, text: str) -> Replica:
        """What a Prometheus has of it after this scrape."""
        found: dict[str, float] = {}
        verdict = "unknown"
        for name, labels, value in _SERIES.findall(text):
            if name == "verdict" and float(value) == 1 and (named := _VERDICT.search(labels)):
                verdict = named[1]
            elif "quantile" not in labels and "reason" not in labels:
                found.setdefault(name, float(value))
        peak = found.get("kv_cache_used_ratio_max")
        if peak is not None:
            self._trend.append((self.now, peak))
        while self._trend and self._trend[0][0] < self.now - TREND_SECONDS:
            self._trend.popleft()
        waiting, mean = found.get("requests_waiting", 0.0), found.get("context_length_mean_tokens")
        pool = found.get("kv_cache_capacity_tokens")
        return Replica(
            waiting=waiting,
            kv_used=found.get("kv_cache_used_ratio"),
            kv_used_max=peak,
            forecast=predict(self._trend, self.now + FORECAST_SECONDS),
            queue_share=waiting * mean / pool if mean is not None and pool else None,
            verdict=verdict,
        )

    @property
    def engine(self) -> tuple[int, int, int, int]:
        """Running, waiting, preempted so far, finished so far."""
        engine = self._node.pods[POD].engine
        if engine is None:
            return 0, 0, 0, 0
        # Those that a hanging engine has not taken yet wait as well, whatever its metrics say.
        return (
            engine.running,
            engine.in_flight - engine.running,
            engine.books.preemptions,
            sum(engine.books.finished.values()),
        )


def predict(samples: Sequence[tuple[float, float]], at: float) -> float | None:
    """Prometheus' ``predict_linear``; None with fewer than two samples."""
    if len(samples) < 2:
        return None
    mean_t = sum(time for time, _ in samples) / len(samples)
    mean_v = sum(value for _, value in samples) / len(samples)
    spread = sum((time - mean_t) ** 2 for time, _ in samples)
    slope = sum((time - mean_t) * (value - mean_v) for time, value in samples) / spread
    return mean_v + slope * (at - mean_t)


def play(case: Case, policy: str, seed: int = 1) -> Outcome:
    """One case under one policy, from ``FIRST_REPLICAS`` warm replicas on."""
    outcome, autoscaler = Outcome(case.name, policy), Autoscaler()
    wanted: Callable[[Sequence[Replica]], float] = POLICIES[policy]
    serial = seed * 100
    instances = [Instance(START, START, serial + number) for number in range(FIRST_REPLICAS)]
    changes = list(case.changes)
    done = 0
    for step, per_second in enumerate(case.per_second):
        now = START + step * STEP_SECONDS
        while changes and START + changes[0][0] <= now:
            instances[0].apply(changes.pop(0)[1])
        ready = [one for one in instances if one.ready_at <= now]
        for one in ready:
            one.send(per_second / len(ready))
        readings = [one.step(now + STEP_SECONDS) for one in ready]
        pressed = False
        sums = [0, 0]
        for one in ready:
            running, waiting, preempted, _ = one.engine
            sums[0] += running
            sums[1] += waiting
            pressed |= waiting >= 5 or preempted > one.preemptions
            outcome.preemptions += preempted - one.preemptions
            one.preemptions = preempted
        outcome.pressed_steps += pressed
        outcome.running.append(sums[0])
        outcome.waiting.append(sums[1])
        outcome.ready.append(len(ready))
        outcome.replicas.append(len(instances))
        target = autoscaler.decide(now, len(instances), wanted(readings))
        outcome.changes += target != len(instances)
        while len(instances) < target:
            serial += 1
            instances.append(Instance(now + STEP_SECONDS, now + STEP_SECONDS + START_SECONDS, serial))
            instances[-1].now = now + STEP_SECONDS
        while len(instances) > target:  # the newest goes; what it works on is counted as finished elsewhere
            done += instances.pop().engine[3]
    outcome.finished = done + sum(one.engine[3] for one in instances)
    return outcome


def busiest(service: str, hours: float) -> tuple[float, ...]:
    """Requests per second, per step, of the stretch of the fortnight with the most requests, its windows
    joined by lines.
    """
    windows = rates(service)
    length = int(hours * 6)
    start = max(range(len(windows) - length), key=lambda at: sum(windows[at : at + length]))
    found = windows[start : start + length + 1]
    scale = PEAK_REPLICAS * capacity() / max(found)
    per_window = int(600 / STEP_SECONDS)
    return tuple(
        scale * (found[at] + (found[at + 1] - found[at]) * part / per_window)
        for at in range(length)
        for part in range(per_window)
    )


def steady(share: float, hours: float) -> tuple[float, ...]:
    """A constant load of ``share`` of what the first replicas can do together."""
    return (share * FIRST_REPLICAS * capacity(),) * int(hours * 3600 / STEP_SECONDS)


def ramp(hours: float) -> tuple[float, ...]:
    """From a third of one replica to ``PEAK_REPLICAS`` in ten minutes, then constant."""
    top, steps = PEAK_REPLICAS * capacity(), int(hours * 3600 / STEP_SECONDS)
    rise = int(600 / STEP_SECONDS)
    return tuple(capacity() / 3 + (top - capacity() / 3) * min(1.0, step / rise) for step in range(steps))


def cases(hours: float) -> tuple[Case, ...]:
    """Recorded traffic, a ramp, and two incidents that another replica does not help."""
    stalled = ((600.0, PodChange(stalled=True)), (2400.0, PodChange(restart=True, stalled=False)))
    starved = (
        (600.0, PodChange(restart=True, cpu_limit_cores=0.5, throttled=0.85, host_factor=60.0)),
        (2400.0, PodChange(restart=True, cpu_limit_cores=8.0, throttled=0.0, host_factor=1.0)),
    )
    return (
        Case("m-mid, its busiest hours", busiest("m-mid", hours)),
        Case("m-large, its busiest hours", busiest("m-large", hours)),
        Case("ramp of ten minutes", ramp(1.0)),
        Case("one of two replicas stalls", steady(0.35, 1.0), stalled),
        Case("one of two replicas starves for CPU", steady(0.35, 1.0), starved),
    )
