"""Which pods of this node answer, start or are down, and how long starts take here.

What a pod did before this process started is told by its status, so that a restart of the exporter changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvpressure.advice.action import start_failure
from kvpressure.model.log_events import EVENTS, OUT_OF_MEMORY
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import OOM_EXIT_CODE, ContainerReading, Run, Snapshot
from kvpressure.model.reasons import HTTP_5XX, REFUSED, RESET, TIMEOUT, in_words
from kvpressure.model.state import REMOVED, UNREADY, VANISHED, ContainerState, EngineState, OutOfMemory, PodState
from kvpressure.pipeline.engines import FORGET_SECONDS, ContainerTrack
from kvpressure.settings.thresholds import Thresholds

REFUSALS: Final = (REFUSED, RESET, TIMEOUT, HTTP_5XX)
"""Of a program that was reached, or whose host said that nothing listens; other errors say nothing about it."""
FAILED: Final = "Failed"
ENDED: Final = (FAILED, "Succeeded")
_PREPARING: Final = ("ContainerCreating", "PodInitializing")  # why a container usually does not run yet
_KILLED: Final = "OOMKilled"
MAX_STARTS: Final = 5  # kept of a pool
MAX_POOLS: Final = 256  # whose starts are kept

Name = tuple[str, str]  # namespace, pod


class _PodTrack:
    """A pod between ticks. ``answered``: in its present run; ``ever``: in any run, as far as known; ``awaited``: it was
    seen in this run before it answered. ``answers_since``: the first answer of this run, None = it was not seen.
    ``read_t``: when its containers were last read; ``served_t``: when it last had requests, or had finished some
    lately; ``busy``: it has some now.
    """

    def __init__(self, uid: str | None, now: float) -> None:
        self.uid = uid
        self.first_seen = self.seen_t = now
        self.pool = EnginePool()
        self.containers: Sequence[ContainerReading] = ()
        self.answered = self.ever = self.awaited = False
        self.answers_since: float | None = None
        self.read_t = self.served_t = float("-inf")
        self.busy = False

    @property
    def runs(self) -> list[Run]:
        """The present runs of its containers that serve; none = unknown."""
        return [one.run for one in self.containers if one.run is not None]

    @property
    def restarts(self) -> int:
        """Of all its containers."""
        return sum(one.restarts or 0 for one in self.containers)

    @property
    def stopped(self) -> str:
        """Why one of its containers does not run, "" = all do, or unknown."""
        return next((run.stopped for run in self.runs if run.stopped), "")

    @property
    def ended(self) -> bool:
        """Whether it is no longer meant to serve."""
        return any(run.ended for run in self.runs)

    def ready(self, since: float) -> bool | None:
        """Whether all its readiness probes succeed; None = one has not yet in its present run, unknown, or nobody read
        it ``since`` then.
        """
        if self.read_t < since:
            return None
        said = [one.ready if one.run is not None and one.run.answered is not None else None for one in self.containers]
        return all(said) if said and None not in said else None

    @property
    def is_assumed(self) -> bool:
        """Whether nothing but an image or a text has ever said that it serves."""
        return not self.ever and any(run.assumed for run in self.runs)

    def take(self, now: float, containers: Sequence[ContainerReading]) -> None:
        """Take the state of its containers; where one was restarted, it begins anew."""
        before, self.containers, self.read_t = self.restarts, containers, now
        if before < self.restarts:
            self.answered, self.awaited, self.answers_since = False, False, None
        self.pool = next((one.pool for one in containers if one.pool), self.pool)
        ready = [run.answered for run in self.runs if run.answered is not None]
        if len(ready) == len(containers) and not self.answered:
            self.answered, self.ever, self.answers_since = True, True, max(ready)

    def answer(self, now: float) -> bool:
        """Note that it answers now; return whether this was seen to be the first answer of its run."""
        first = self.awaited and not self.answered
        self.answers_since = now if first else self.answers_since
        self.answered = self.ever = True
        return first

    def starting_since(self) -> float | None:
        """Since when it starts for the first time; None = it does not. In-place restarts are failures."""
        if not self.runs or self.restarts or self.answered or self.ended or self.stopped not in ("", *_PREPARING):
            return None
        return min([self.first_seen, *(run.since for run in self.runs if run.since is not None)])


class Pods:
    """The pods of this node that serve."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._pods: dict[Name, _PodTrack] = {}
        self._gone: dict[Name, tuple[float, PodState]] = {}
        self._starts: dict[Name, deque[float]] = {}  # seconds, by namespace and pool

    def observe(self, snapshot: Snapshot, engines: Sequence[EngineState]) -> tuple[PodState, ...]:
        """Take the engines of this tick; return the pods now."""
        now, served, over = snapshot.time, _by_pod(engines), set[Name]()
        for name, readings in _containers_by_pod(snapshot).items():
            ended = readings[0].run.ended if readings[0].run else ""
            if ended in ENDED:
                over.add(name)
                self._leave(now, name, missed=ended == FAILED)
            else:
                self._pod(snapshot, name).take(now, readings)
        for name in served.keys() - over:
            self._pod(snapshot, name)
        self._drop(snapshot)
        states = [self._state(now, name, pod, served.get(name, ())) for name, pod in self._pods.items()]
        return *states, *(state for _, state in self._gone.values())

    def usual_start(self, namespace: str, pool: str) -> float | None:
        """The longest of the last starts of a pool here, in seconds; None = none was seen."""
        return max(self._starts.get((namespace, pool), ()), default=None)

    def _pod(self, snapshot: Snapshot, name: Name) -> _PodTrack:
        uid = (snapshot.pods or {}).get(name)
        pod = self._pods.get(name)
        if pod is None or (uid is not None and pod.uid not in (None, uid)):
            self._leave(snapshot.time, name)
            pod = self._pods[name] = _PodTrack(uid, snapshot.time)
        pod.uid, pod.seen_t = uid or pod.uid, snapshot.time
        return pod

    def _drop(self, snapshot: Snapshot) -> None:
        """Forget pods that are gone; without a list of pods, those of which nothing has been read for a while."""
        now, there = snapshot.time, snapshot.pods
        for name, pod in list(self._pods.items()):
            listed = None if there is None or pod.uid is None else name in there
            if listed is False or (listed is None and abs(now - pod.seen_t) > FORGET_SECONDS):
                self._leave(now, name)
        self._gone = {name: row for name, row in self._gone.items() if 0 <= now - row[0] <= FORGET_SECONDS}

    def _leave(self, now: float, name: Name, missed: bool = True) -> None:
        pod = self._pods.pop(name, None)
        if pod is not None and missed and (reason := _why_gone(pod, now)):
            self._gone[name] = now, PodState(*name, pod.pool, reason=reason)

    def _state(self, now: float, name: Name, pod: _PodTrack, engines: Sequence[EngineState]) -> PodState:
        pod.pool = next((engine.pool for engine in engines if engine.pool.name), pod.pool)
        ready = pod.ready(now - self._thresholds["stale_page_seconds"])
        answers, since = _answers(pod, ready, engines), pod.starting_since()
        if answers:
            self._gone.pop(name, None)
            if pod.answer(now) and since is not None:
                self._keep_start(name[0], pod.pool.name, now - since)
            pod.served_t = now if any(map(_serves, engines)) else pod.served_t
            pod.busy = any((engine.signals.load.in_flight or 0) > 0 for engine in engines)
        starting = not answers and since is not None and now - since < self._allowed(name[0], pod.pool.name)
        pod.awaited = pod.awaited or (
            (starting or pod.restarts > 0) and (answers is False or pod.stopped in _PREPARING)
        )
        return PodState(
            *name,
            pod.pool,
            None if starting else answers,
            starting,
            self.usual_start(name[0], pod.pool.name),
            pod.answers_since if answers else None,
            _reason(pod, engines) if answers is False and not starting else "",
            pod.ever,
        )

    def _keep_start(self, namespace: str, pool: str, seconds: float) -> None:
        starts = self._starts.pop((namespace, pool), None) or deque(maxlen=MAX_STARTS)
        starts.append(max(0.0, seconds))
        self._starts[namespace, pool] = starts  # the newest last
        for old in list(self._starts)[:-MAX_POOLS]:
            del self._starts[old]

    def _allowed(self, namespace: str, pool: str) -> float:
        """How long a start may take, in seconds."""
        usual, t = self.usual_start(namespace, pool), self._thresholds
        if usual is None:
            return t["start_seconds"]
        return max(t["start_least_seconds"], t["latency_multiplied_ratio"] * usual)


class EnginesAround:
    """The engines and pods of a tick, for what stands around them."""

    def __init__(self, engines: Sequence[EngineState], pods: Sequence[PodState], thresholds: Thresholds) -> None:
        self._engines = _by_pod(engines)
        self._ever = {(pod.namespace, pod.pod) for pod in pods if pod.ever}
        self._limit = thresholds["container_limit_ratio"]

    def completed(self, now: float, state: ContainerState, track: ContainerTrack) -> ContainerState | None:
        """The container with what its engine tells: model and pool, and whether memory that ran out cost requests. None
        of one that may be no engine, until it answers.
        """
        if state.reading.run is not None and state.reading.run.assumed and track.pod not in self._ever:
            return None
        own = [one for one in self._engines.get(track.pod, ()) if one.container == state.reading.container]
        served = track.pod in self._ever and not any(engine.up for engine in own)
        return replace(
            state,
            model_name=next((engine.key.model_name for engine in own), ""),
            pool=track.pool,
            out_of_memory=(*self._ended(now, state), *_logged(now, track, served)),
        )

    def _ended(self, now: float, state: ContainerState) -> Iterator[OutOfMemory]:
        ended, used = state.reading.last_termination, state.memory_used_ratio
        if ended is not None and ended.finished_at is not None:
            if ended.reason == _KILLED:
                yield OutOfMemory("host", ended.finished_at, True)
            elif ended.exit_code == OOM_EXIT_CODE:
                yield OutOfMemory("sigkill", ended.finished_at, True)
        if used is not None and used >= self._limit:
            yield OutOfMemory("host_limit", now, False)


def _logged(now: float, track: ContainerTrack, lost: bool) -> Iterator[OutOfMemory]:
    for event, what in OUT_OF_MEMORY.items():
        if (time := track.last_event(event, now)) is not None:
            yield OutOfMemory(what, time, lost)


def _by_pod(engines: Iterable[EngineState]) -> dict[Name, list[EngineState]]:
    found: dict[Name, list[EngineState]] = {}
    for engine in engines:
        found.setdefault((engine.key.namespace, engine.key.pod), []).append(engine)
    return found


def _containers_by_pod(snapshot: Snapshot) -> dict[Name, list[ContainerReading]]:
    """The containers that serve."""
    found: dict[Name, list[ContainerReading]] = {}
    for reading in snapshot.containers:
        if reading.run is not None:
            found.setdefault((reading.namespace, reading.pod), []).append(reading)
    return found


def _answers(pod: _PodTrack, ready: bool | None, engines: Sequence[EngineState]) -> bool | None:
    """Whether every engine of the pod answers, and not us alone; ``None`` = not known, or it is not meant to."""
    if any(not engine.up and engine.error in REFUSALS for engine in engines):
        answers = None if ready else False  # else only we do not reach it
    elif any(engine.up for engine in engines):
        answers = ready is not False or any(_serves(engine) is not False for engine in engines if engine.up)
    else:
        answers = None
    if answers or not pod.runs:
        return answers
    return None if pod.ended or pod.is_assumed else False if pod.stopped else answers


def _serves(engine: EngineState) -> bool | None:
    """Whether it has requests, or had some lately; ``None`` = unknown, or it does not answer."""
    in_flight = engine.signals.load.in_flight
    if in_flight or engine.signals.requests.requests_finished_per_second:
        return True
    return None if in_flight is None else False


def _why_gone(pod: _PodTrack, now: float) -> str:
    """What it means that a pod is gone: it served until then and nothing else counts the replicas of its workload, or
    it had no request; "" = what counts them tells more.
    """
    if 0 <= now - pod.served_t <= FORGET_SECONDS and any(not run.counted for run in pod.runs):
        return VANISHED
    return REMOVED if pod.ever and not pod.busy else ""


def _reason(pod: _PodTrack, engines: Sequence[EngineState]) -> str:
    """Why a pod is down, in words: what its log says, else how its container ended, else what its host answered, else
    its readiness probe.
    """
    if logged := next(filter(None, map(start_failure, engines)), ""):
        return EVENTS[logged]
    killed = any(one.last_termination and one.last_termination.reason == _KILLED for one in pod.containers)
    refused = next((in_words(engine.error) for engine in engines if engine.error in REFUSALS), "")
    if killed and not pod.answered:
        return _KILLED
    return pod.stopped or refused or UNREADY
