"""One run: faults in random order, and what has to hold during and after each."""

from __future__ import annotations

import math
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tests.helpers.waiting import until
from tests.sources.kubernetes import node as kubernetes

from kvpressure.sources.kubernetes.api import BACKOFF_SECONDS
from lab.soak.faults import ENGINES_AMONG, OF_POD, PASSING_AT_ONCE, Fault, Faults
from lab.soak.node import INNOCENT, STOPPABLE, VICTIM, Lag, SoakNode

INTERVALS: Final = 2  # after what failed is tried again, by then everything has to be back
GONE_SECONDS: Final = 5.0  # after which a pod that is gone has no series
SHOWN_SECONDS: Final = 15.0
TAUGHT_SECONDS: Final = 60.0  # for so long after a fault of the API server its watch may wait before it connects again
WAIT_SECONDS: Final = 60.0  # for recovery, before it is given up
WATCH: Final = "watch of the API server, after a fault of it"
POLL_SECONDS: Final = 0.1
LAG_SECONDS: Final = 1.0  # from which on the machine is too busy to judge: engines of this process answer too late
MORE_MIB, MORE_DESCRIPTORS = 8.0, 12
MORE_THREADS: Final = 2 + PASSING_AT_ONCE // ENGINES_AMONG  # one stays for each engine that was read at once
RARE_EVERY: Final = 20  # rounds
TICKS: Final = re.compile(r"^kvpressure_ticks_total (\S+)$", re.M)
SERIES: Final = re.compile(r"^(kvpressure_\w+\{[^}]*\}) (\S+)$", re.M)
CONCLUSIONS: Final = re.compile(
    r"kvpressure_(finding|harm|cause_info|no_progress_seconds"
    r"|limit_recommended|requests_lost_ratio|verdict_confidence|verdict_reason)\b"
)  # absent where unknown, or where the verdict is another


@dataclass
class Result:
    """What a run saw. ``recovery``: the longest time after each fault, of those that were judged, in seconds and in
    ticks of the exporter; ``waited_for``: what was the last to come back then; ``problems``: what was not as it has to
    be.
    """

    seconds: float = 0.0
    faults: int = 0
    looks: int = 0
    unjudged: int = 0  # looks and recoveries while the machine was too busy
    pods: int = 0
    series: int = 0  # that each innocent engine has throughout, at least
    recovery: dict[str, tuple[float, int]] = field(default_factory=dict)
    waited_for: dict[str, str] = field(default_factory=dict)
    before: tuple[float, int, int] = (0.0, 0, 0)
    after: tuple[float, int, int] = (0.0, 0, 0)
    problems: list[str] = field(default_factory=list)


class Soak:
    """Faults one after the other on one node."""

    def __init__(self, node: SoakNode, seed: int) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.result = Result()
        self.lag = Lag()
        self.faults = Faults(node, self.random, lambda: until(self._in_order, 300))
        self._always: dict[str, frozenset[str]] = {}  # series of each innocent engine that are never lost
        self._taught = float("-inf")  # when the exporter was last taught to wait before it asks again

    def run(self, seconds: float, most: int = 10**9, only: list[str] | None = None) -> Result:
        """Rounds of all faults, each round in another order, until the time is over."""
        began = time.monotonic()
        until(self._in_order, 300)
        self._learn()
        self.result.before = self.node.resources()
        rounds = 0
        while time.monotonic() - began < seconds and self.result.faults < most:
            rare = rounds % RARE_EVERY == 1 or only is not None
            order = [name for name, fault in self.faults.all.items() if rare or not fault.rare]
            order = [name for name in order if only is None or name in only]
            self.random.shuffle(order)
            for name in order:
                if time.monotonic() - began > seconds or self.result.faults >= most:
                    break
                self._suffer(name, self.faults.all[name])
            rounds += 1
            if rounds == 1:
                self.result.before = self.node.resources()  # everything has been loaded once
        self.result.after = self.node.resources()
        self.result.seconds = time.monotonic() - began
        self.result.pods = self.faults.passed
        self.result.problems += self.faults.problems
        for what, limit, now, then in zip(
            ("MiB", "descriptors", "threads"),
            (MORE_MIB, MORE_DESCRIPTORS, MORE_THREADS),
            self.result.after,
            self.result.before,
            strict=True,
        ):
            self._expect(now <= then + limit, f"{then:.0f} {what} grew to {now:.0f}")
        return self.result

    def _learn(self) -> None:
        """Which series the innocent engines have on this node when everything is in order."""
        page = self.node.scrape()
        self._always = {
            pod: frozenset(series for series in _of(page, pod) if not CONCLUSIONS.match(series)) for pod in INNOCENT
        }
        self.result.series = min(map(len, self._always.values()))

    def _suffer(self, name: str, fault: Fault) -> None:
        with fault.happen():
            self._look(name, fault)
            time.sleep(self.random.uniform(1, 4) * float(kubernetes.TICK))
            self._wait_for(name, fault)
            self._look(name, fault)
        self.result.faults += 1
        if fault.late_seconds:
            self._taught = time.monotonic()
        self._recover(name, fault)

    def _wait_for(self, name: str, fault: Fault) -> None:
        """Until the fault shows, which it has to within two timeouts and two intervals."""
        if not fault.shows:
            return
        began, first = time.monotonic(), self._ticks()
        while not re.search(fault.shows, self.node.scrape()):
            if self._ticks() - first > (SHOWN_SECONDS + fault.late_seconds) / float(kubernetes.TICK):
                busy = self.lag.worst(began) > LAG_SECONDS
                self.result.unjudged += busy
                self._expect(busy, f"{name}: nothing shows it in time")
                return
            time.sleep(POLL_SECONDS)

    def _recover(self, name: str, fault: Fault) -> None:
        """Wait until everything is back. What comes from a watch that may be waiting has longer, nothing else has."""
        interval = float(kubernetes.TICK)
        limit = math.ceil(fault.retry_seconds / interval) + INTERVALS
        waiting = math.ceil(BACKOFF_SECONDS[1] / interval) + INTERVALS
        taught, began = self._is_taught(), time.monotonic()
        time.sleep(1.5 * interval)  # what the last tick showed says nothing
        first = self._ticks()
        if self._in_time(name, partial(self._in_order, of_watch=not taught), began, first, limit) and taught:
            self._in_time(WATCH, self._in_order, began, first, max(limit, waiting))

    def _in_time(self, name: str, in_order: Callable[[], bool], began: float, first: int, limit: int) -> bool:
        """Whether everything comes back at all. How long it takes is judged by the exporter's own ticks: without CPU
        it makes fewer.
        """
        last = ""
        while True:
            try:
                in_order()
                break
            except AssertionError as error:
                last = str(error)
            if self._ticks() - first > limit + WAIT_SECONDS / float(kubernetes.TICK):
                self._expect(False, f"after {name}: {last}")
                return False
            time.sleep(POLL_SECONDS)
        took, ticks = time.monotonic() - began, self._ticks() - first + 1
        if self.lag.worst(began) > LAG_SECONDS and ticks > limit:
            self.result.unjudged += 1
            return True
        self._expect(ticks <= limit, f"after {name}: {ticks} ticks until everything was back ({last})")
        waited = last or name != WATCH  # else it had nothing to do with the watch
        if waited and took > self.result.recovery.get(name, (-1.0, 0))[0]:
            self.result.recovery[name], self.result.waited_for[name] = (took, ticks), last
        return True

    def _is_taught(self) -> bool:
        """Whether the API server failed lately, so that its watch may be waiting before it connects again."""
        return time.monotonic() - self._taught < TAUGHT_SECONDS

    def _ticks(self) -> int:
        """Ticks that the exporter has made."""
        found = TICKS.search(self.node.scrape())
        assert found is not None
        return int(float(found[1]))

    def _look(self, name: str, fault: Fault) -> None:
        """What holds while a fault lasts: nothing of the innocent is lost, nothing stale is shown, health is true."""
        self.result.looks += 1
        began, page = time.monotonic(), self.node.scrape()
        if self.lag.worst(began) > LAG_SECONDS:
            self.result.unjudged += 1
        else:
            self._look_at_innocent(name, fault, page)
        down = set(re.findall(r"^kvpressure_engine_up(\{[^}]*\}) 0\.0$", page, re.M))
        stale = down & set(re.findall(r"^kvpressure_requests_running(\{[^}]*\}) ", page, re.M))
        self._expect(not stale, f"{name}: engines that are down have values: {sorted(stale)}")
        if not fault.hides_pods:
            shown = set(re.findall(r'pod="(passing-\d+)"', page))
            gone = {pod for pod, since in self.faults.gone.items() if time.monotonic() - since > GONE_SECONDS}
            self._expect(not shown & gone, f"{name}: pods that are gone have series: {sorted(shown & gone)}")
        self._expect(self.node.status_of("/-/healthy") == 200, f"{name}: not healthy")
        self._expect(self.node.status_of("/-/ready") == 200, f"{name}: not ready")

    def _look_at_innocent(self, name: str, fault: Fault, page: str) -> None:
        for pod, always in self._always.items():
            mine = _of(page, pod)
            up = [value for series, value in mine.items() if series.startswith("kvpressure_engine_up{")]
            self._expect(up == ["1.0"] or (fault.blind and not up), f"{name}: {pod} is not up: {up}")
            if fault.blind:
                continue
            allowed = [costs for costs in (fault.costs, OF_POD if self._is_taught() else None) if costs]
            lost = {series for series in always - set(mine) if not any(costs.match(series) for costs in allowed)}
            self._expect(not lost, f"{name}: {pod} lost {len(lost)} series, such as {min(lost, default='')}")

    def _in_order(self, of_watch: bool = True) -> bool:
        """Everything that the node has is shown, and nothing else. Without ``of_watch``, pods may not be known to be
        gone, and what only the API server says of those that are there may be missing.
        """
        page = self.node.scrape()
        expected = {*INNOCENT, VICTIM, STOPPABLE}
        up = set(re.findall(r'^kvpressure_engine_up\{[^}]*pod="([^"]+)"[^}]*\} 1\.0$', page, re.M))
        shown = set(re.findall(r'^kvpressure_engine_up\{[^}]*pod="([^"]+)"', page, re.M))
        gpus = re.findall(r"^kvpressure_gpu_up\{[^}]*\} 1\.0$", page, re.M)
        sources = re.findall(r'^kvpressure_source_up\{source="(\w+)"\} 0\.0$', page, re.M)
        if not of_watch:
            up, shown = up & expected, shown & expected
            sources = [source for source in sources if source != "pods"]
        assert up == shown == expected, f"up: {sorted(up)}, shown: {sorted(shown)}"
        assert len(gpus) == len(self.node.gpus), f"{len(gpus)} GPUs"
        assert not sources, f"sources that are down: {sources}"
        assert "\nkvpressure_recorder_up 1.0\n" in page, "the flight recorder is down"
        for pod, always in self._always.items():
            lost = {series for series in always - set(_of(page, pod)) if of_watch or not OF_POD.match(series)}
            assert not lost, f"{pod} has not {len(lost)} of its series, such as {min(lost)}"
        return True

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.result.problems) < 100:
            self.result.problems.append(otherwise)
            print(f"not as it has to be: {otherwise}", file=sys.stderr, flush=True)  # a run may take an hour


def _of(page: str, pod: str) -> dict[str, str]:
    """The series of a pod with their values."""
    return {series: value for series, value in SERIES.findall(page) if f'pod="{pod}"' in series}


def soak(seed: int, seconds: float, where: Path, most: int = 10**9, only: list[str] | None = None) -> Result:
    """One run on a node of its own below ``where``."""
    with SoakNode(where) as node:
        try:
            node.populate()
            node.start()
            return Soak(node, seed).run(seconds, most, only)
        finally:
            node.victim.mode = "ok"
            node.stoppable.go_on()
