"""The guides' triage through kubectl: pods, restarts, logs of the running and previous container, events, and every
engine's metrics through the API server's proxy.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from kvpressure import redaction
from kvpressure.advice.triage import Mark, Told, gravest
from kvpressure.engines.registry import public_line, recognise, titles
from kvpressure.errors import InputError
from kvpressure.model.log_events import ALLOCATION_EVENTS, FACT_EVENTS
from kvpressure.model.readings import OOM_EXIT_CODE, LogLine, Scrape, Snapshot
from kvpressure.model.reasons import HTTP_404, REFUSED, UNAUTHORIZED, UNREACHABLE
from kvpressure.parsed import json_of, mapping, moment, text
from kvpressure.printable import command
from kvpressure.settings.thresholds import Thresholds
from kvpressure.sources.kubernetes.pod import EngineContainer, Pod
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import following, workload
from kvpressure.toolbox import live_pages as live
from kvpressure.toolbox.history import FoundEngines
from kvpressure.toolbox.kubectl import Kubectl, KubectlError
from kvpressure.toolbox.live_pages import Around
from kvpressure.toolbox.terminal import waiting
from kvpressure.toolbox.triage import PodFacts

MAX_PODS: Final = 32
INTERVAL_SECONDS: Final = 2.0
LOG_SINCE: Final = "2h"  # as the guide does
LOG_TAIL: Final = 20_000
LOG_HEAD_BYTES: Final = 400_000  # start-up lines
_CALLS_AT_ONCE: Final = 8
_HARD: Final = ALLOCATION_EVENTS | {"host_oom", "engine_dead", "start_failed"}
_PERIODIC: Final = frozenset({"stats", "iteration", "sleep"})
_SHOWN: Final = 8
_STAMP: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?Z ")
_AMPLIFYING: Final = re.compile(
    r"Evict|OOM|InsufficientMemory|MemoryPressure|FailedScheduling|BackOff|Killing|Unhealthy|Preempt|NodeNotReady|FailedMount"
)


@dataclass(frozen=True, slots=True)
class _Member:
    """One engine of the cluster."""

    pod: Pod
    engine: EngineContainer
    node: str

    @property
    def key(self) -> tuple[str, str]:
        return self.pod.namespace, self.pod.name


def open_cluster(options: argparse.Namespace, thresholds: Thresholds, to_the_end: bool) -> FoundEngines:
    """All steps for the matching pods. Raises ``InputError`` without any, or when the cluster does not answer."""
    kubectl = Kubectl(options.context)
    if options.workload:
        options.selector = workload.selector_of(
            workload.of_name(kubectl, options.namespace, options.workload), options.workload
        )
    some = ("--workload", options.workload) if options.workload else ("-l", options.selector or "")
    again = command("-n", options.namespace, *(some if some[1] else ()))
    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        members = _members(kubectl, options)
        waiting(f"reading logs and events of {len(members)} engines, and their metrics for {options.seconds:.0f} s")
        events = pool.submit(_events, kubectl, options.namespace)
        logs = list(pool.map(lambda member: _read_logs(kubectl, member, thresholds["log_window_seconds"]), members))
        around = Around(
            tuple(member.engine.reading for member in members),
            tuple(line for log in logs for line in log.lines),
            {},
            options.gpu,
        )
        feed = _EnginePages(kubectl, members, pool)
        looks = following.engines_of(feed.watch(options.seconds, around), thresholds, again)
        found = following.answered(looks, options.seconds, thresholds, to_the_end=to_the_end)
        found_events = events.result()
    facts = {
        member.key: _facts(member, log, found_events, feed.errors.get(member.key, ""))
        for member, log in zip(members, logs, strict=True)
    }
    return replace(found, facts=facts)


# --- pods -------------------------------------------------------------------------------------------------


def _members(kubectl: Kubectl, options: argparse.Namespace) -> list[_Member]:
    where = redaction.value(f"-n {options.namespace}" + (f" -l {options.selector}" if options.selector else ""))
    try:
        documents = kubectl.objects("pods", options.namespace, *(["-l", options.selector] if options.selector else []))
    except KubectlError as error:
        raise InputError(f"{where}: {error}") from error
    documents = [item for item in documents if options.pod in (None, mapping(item.get("metadata")).get("name"))]
    policy = Policy(selected=bool(options.selector))
    found = [(pod, item) for item in documents if (pod := read_pod(item, policy)) is not None]
    members = [
        _Member(pod, _with_args(engine, options.args), text(mapping(item.get("spec")).get("nodeName")))
        for pod, item in found
        for engine in pod.engines
        if engine.refusal != "no_endpoint"
    ]
    if not members:
        raise InputError(
            f"{where}: no pod runs {titles()} (pods found: {len(documents)}); give a namespace or labels of engine pods"
            " (kubectl get pods --show-labels)"
        )
    if len(members) > MAX_PODS:
        raise InputError(f"{where}: {len(members)} engines; allowed: up to {MAX_PODS}; choose pods with -l or --pod")
    return members


def _with_args(engine: EngineContainer, more: Sequence[str]) -> EngineContainer:
    """The engine with the command line's arguments, if its pod shows none."""
    if not more or engine.target is None or engine.target.args:
        return engine
    return replace(engine, targets=tuple(replace(target, args=tuple(more)) for target in engine.targets))


# --- logs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Log:
    """Counted events of both containers, lines for the pipeline, and the alarming lines verbatim."""

    running: Mapping[str, int] | None
    previous: Mapping[str, int] | None
    lines: tuple[LogLine, ...]
    shown: tuple[str, ...]
    errors: tuple[str, ...]


def _read_logs(kubectl: Kubectl, member: _Member, news_seconds: float) -> _Log:
    place = (member.pod.namespace, member.pod.name, member.engine.container)
    errors: list[str] = []

    def read(*more: str) -> list[str] | None:
        try:
            return kubectl.logs(*place, "--timestamps", *more)
        except KubectlError as error:
            errors.append(str(error))
            return None

    running = read(f"--since={LOG_SINCE}", f"--tail={LOG_TAIL}")
    head = read(f"--limit-bytes={LOG_HEAD_BYTES}") if running is not None else None
    previous = read("--previous", f"--tail={LOG_TAIL}") if member.engine.reading.restarts else None
    since = live.CLOCK.now() - news_seconds
    dialect = member.engine.dialect
    lines = tuple(_for_pipeline(place, dialect, head or [], running or [], since))
    counted, shown = _count(running, dialect)
    counted_before, shown_before = _count(previous, dialect)
    return _Log(
        counted, counted_before, lines, (*shown, *(f"previous: {text}" for text in shown_before)), tuple(errors)
    )


def _stamped(line: str) -> tuple[float | None, str]:
    found = _STAMP.match(line)
    return (None, line) if found is None else (moment(found[1]), line[found.end() :])


def _for_pipeline(
    place: tuple[str, str, str], dialect: str, head: Sequence[str], recent: Sequence[str], since: float
) -> Iterator[LogLine]:
    """Start-up facts of any age, and other events since ``since``, as a running exporter would have them."""
    for line in head:
        found = recognise(_stamped(line)[1], dialect)
        if found is not None and found[1].event in FACT_EVENTS:
            yield LogLine(*place, *found)
    for line in recent:
        t, text = _stamped(line)
        if t is None or t < since:
            continue
        found = recognise(text, dialect)
        if found is not None and found[1].event not in FACT_EVENTS:
            yield LogLine(*place, *found)


def _count(lines: Sequence[str] | None, dialect: str) -> tuple[dict[str, int] | None, list[str]]:
    """(events by name, newest alarming lines)."""
    if lines is None:
        return None, []
    counts: dict[str, int] = {}
    shown: list[str] = []
    for line in lines:
        found = recognise(_stamped(line)[1], dialect)
        if found is not None:
            text, event = found
            counts[event.event] = counts.get(event.event, 0) + 1
            if event.event in _HARD or event.event == "preemption":
                shown.append(text)
    return counts, [public_line(text)[:160] for text in shown[-3:]]


# --- events -----------------------------------------------------------------------------------------------


def _events(kubectl: Kubectl, namespace: str) -> list[tuple[str, str, str]] | None:
    """(kind, object, sentence) of events that make trouble worse, oldest first; None when events may not be read."""
    try:
        documents = kubectl.objects("events", namespace)
    except KubectlError:
        return None
    found = []
    for item in documents:
        reason, message = str(item.get("reason") or ""), str(item.get("message") or "")
        if not _AMPLIFYING.search(reason):
            continue
        about = mapping(item.get("involvedObject"))
        when = str(item.get("lastTimestamp") or item.get("eventTime") or "")
        kind, name = str(about.get("kind") or ""), str(about.get("name") or "")
        times = item.get("count")
        more = f" ({times}x)" if isinstance(times, int) and times > 1 else ""
        found.append(
            (when, kind, name, f"{when} {reason} {kind.lower()}/{name}: {' '.join(message.split())[:140]}{more}")
        )
    return [(kind, name, text) for _, kind, name, text in sorted(found)]


def _facts(member: _Member, log: _Log, events: list[tuple[str, str, str]] | None, page_error: str) -> PodFacts:
    container, target = member.engine.reading, member.engine.target
    ended = container.last_termination
    killed = ended is not None and (ended.reason == "OOMKilled" or ended.exit_code == OOM_EXIT_CODE)
    where = f"Port {target.port} of the pod." if target else "The pod declares no metrics port."
    refused = f"{member.engine.refusal}".replace("_", " ") if member.engine.refusal else ""
    steps: dict[int, Told] = {
        1: ("unknown" if member.pod.phase == "Running" else "bad", (_place(member),)),
        2: ("unknown" if not container.restarts else "bad" if killed else "look", ()),  # however long ago
        4: _told(log),
        7: ("unknown", tuple(filter(None, (where, page_error or refused)))),
    }
    if events is not None:
        here = {("Node", member.node), ("Pod", member.pod.name)}
        steps[6] = _amplified([text for kind, name, text in events if (kind, name) in here])
    counts = [counted for counted in (log.running, log.previous) if counted is not None]
    return PodFacts(steps, dict(sum(map(Counter, counts), Counter())) if counts else None)


def _place(member: _Member) -> str:
    return f"Phase {member.pod.phase or 'unknown'}{f' on node {member.node}' if member.node else ''}."


def _told(log: _Log) -> Told:
    """What the logs of both containers say."""
    sentences, marks = list(log.errors), set[Mark]()
    for title, counts in (("Running container, last two hours", log.running), ("Previous container", log.previous)):
        if counts is not None:
            found = {name: count for name, count in counts.items() if name not in FACT_EVENTS | _PERIODIC}
            marks.add("bad" if _HARD & found.keys() else "look" if found else "fine")
            said = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(found.items()))
            sentences.append(f"{title}: {said or 'no failed allocation'}.")
    return gravest(*marks), (*sentences, *log.shown)


def _amplified(events: Sequence[str]) -> Told:
    if not events:
        return "fine", ("No memory pressure, eviction, scheduling delay or restart.",)
    worse = f"{len(events)} events that make memory pressure worse (not its cause):"
    return "look", (worse, *events[-_SHOWN:])


# --- pages ------------------------------------------------------------------------------------------------


class _EnginePages:
    """Metrics of all engines, fetched concurrently each tick. ``errors``: why a pod's last fetch failed."""

    def __init__(self, kubectl: Kubectl, members: Sequence[_Member], pool: ThreadPoolExecutor) -> None:
        self._kubectl = kubectl
        self._members = members
        self._pool = pool
        self._scanners = [Scanner() for _ in members]
        self.errors: dict[tuple[str, str], str] = {}

    def watch(self, seconds: float, around: Around) -> Iterator[Snapshot]:
        """A snapshot every two seconds; engines without an endpoint are reported as unreachable."""
        around = replace(around, versions=self._versions())
        return live.ticks(self._pages, seconds, INTERVAL_SECONDS, around)

    def _pages(self) -> tuple[Scrape, ...]:
        return tuple(self._pool.map(self._page, self._members, self._scanners))

    def _versions(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for member in self._members:
            if member.engine.target is not None:
                with suppress(KubectlError):
                    version = mapping(json_of(self._get(member, member.engine.target, "/version"))).get("version")
                    found |= {_name(member): version} if isinstance(version, str) else {}
        return found

    def _get(self, member: _Member, target: Target, path: str) -> str:
        return self._kubectl.page(member.pod.namespace, member.pod.name, target.port, path, target.scheme)

    def _page(self, member: _Member, scanner: Scanner) -> Scrape:
        target, text, error = member.engine.target, None, None
        if target is None:
            error = UNREACHABLE
        else:
            self.errors.pop(member.key, None)
            try:
                text = self._get(member, target, target.path)
            except KubectlError as failure:
                error = _reason(str(failure))
                self.errors[member.key] = str(failure)
        page = parse_scrape(
            text,
            target=_name(member),
            time=0.0,
            namespace=member.pod.namespace,
            pod=member.pod.name,
            container=member.engine.container,
            args=target.args if target else (),
            env=target.env if target else {},
            error=error,
            scanner=scanner,
        )
        return replace(page, pool=target.pool) if target else page


def _name(member: _Member) -> str:
    port = f":{member.engine.target.port}{member.engine.target.path}" if member.engine.target else ""
    return f"pod/{member.pod.name}{port} through the API server"


_REASONS: Final = {"refused": REFUSED, "forbidden": UNAUTHORIZED, "notfound": HTTP_404, "not found": HTTP_404}


def _reason(text: str) -> str:
    return next((reason for word, reason in _REASONS.items() if word in text.lower()), UNREACHABLE)
