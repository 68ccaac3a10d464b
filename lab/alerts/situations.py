"""Situations of a cluster, played through the real exporter and the delivered rules: who is woken, when, and by what?

``python -m lab.alerts.situations FILE_OR_FOLDER... [--texts]``. A situation (YAML) says what servers, pods and GPUs do
and what the alerts have to do: ``expect`` page, ticket or nothing. Exit 1 when a bar is missed or a rule fails.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import GpuOwner, NodeCondition, Scrape
from kvpressure.model.reasons import UNREACHABLE
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.runtime.monitor import Monitor
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import Reading, Source, SourceError
from kvpressure.sources.catalog import registry
from kvpressure.sources.kubernetes.api import KubeApi
from kvpressure.sources.kubernetes.podresources import of_engines, running
from kvpressure.sources.kubernetes.pods import PodsSource
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.alerts.cluster import EPOCH, Cluster, UnplayableError, at
from lab.alerts.engine import EVALUATION_SECONDS, EngineError, Fired, fired
from lab.alerts.series import RULES, SCRAPE_SECONDS, Series, Target, also_wanted, labelled, samples

TICK_SECONDS: Final = 5.0
_TICKS_A_SCRAPE: Final = int(SCRAPE_SECONDS / TICK_SECONDS)
PAGED: Final = 0.95  # of the situations that must page
DELAY_MINUTES: Final = 5.0  # median, from the onset
_UNREACHABLE: Final = "api_unreachable"
_STOPPED: Final = ("down", "gone")
_UNSCRAPED: Final = (*_STOPPED, "scrape_lost")
_IDENTITY: Final = ("namespace", "pod", "container", "gpus", "args", "env", "version", "dialect")
_COUNTER: Final[Target] = (
    ("job", "kube-state-metrics"),
    ("instance", "10.1.0.1:8080"),
    ("namespace", "monitoring"),
    ("pod", "kube-state-metrics-0"),
    ("container", "kube-state-metrics"),
)


class _Pods(PodsSource):
    """The real source; what its watch brings is said by ``show``."""

    def __init__(self, settings: Settings, api: KubeApi) -> None:
        super().__init__(settings, api)
        for view in self._views:
            view.watcher.start = view.watcher.wait = lambda: None  # what it would bring is shown to it
        self._shown: list[dict[str, Any]] | None = None

    def show(self, pods: list[dict[str, Any]] | None) -> None:
        """The pods of the node; ``None`` = the API server does not answer."""
        (view,) = self._views
        view.watcher.error = _UNREACHABLE if pods is None else None
        if pods is not None and pods != self._shown:
            self._shown = pods
            view._replace(iter(pods))


@dataclass
class _Fed:
    """A source that reads the cluster."""

    name: str
    read: Callable[[], Reading]

    def close(self) -> None:
        """Nothing is held."""


class Exporter:
    """One process of the exporter: real sources as far as the cluster can feed them, real monitor and pipeline."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster, self._node, self._since = cluster, node, cluster.minute
        self._read_logs = cluster.minute
        self._cut_off = False
        self._blind = False
        self._settings = Settings(node_name=node)
        self._pods = _Pods(self._settings, KubeApi("http://api.invalid"))
        self._scanners: dict[str, Scanner] = {}
        fed = {
            "node": self._conditions,
            "nvidia": self._gpus,
            "podresources": self._owners,
            "cgroup": self._memory,
            "logs": self._logs,
            "engines": self._scrapes,
        }
        sources: list[Source] = [self._pods]
        sources += [_Fed(name, read) for name, read in fed.items()]
        self._monitor = Monitor(
            {source.name: (registry()[source.name], source) for source in sources},
            Pipeline(),
            TICK_SECONDS,
            clock=lambda: EPOCH + 60 * cluster.minute,
            wall=lambda: EPOCH + 60 * cluster.minute,
        )
        self._monitor.add_listener(self._settings.shared.observe)

    def tick(self, state: str) -> State:
        """Read everything once and publish."""
        self._blind, self._cut_off = state == "blind_api", state == "cut_off"
        self._pods.show(None if self._blind else [pod.document() for pod in self._cluster.on(self._node)])
        for worker in self._monitor.workers.values():
            worker.read_once()
        return self._monitor.tick()

    def published(self, state: State) -> Iterator[tuple[str, str]]:
        """The series of a scrape as Prometheus stores them, in promtool's time."""
        target = _target(self._node)
        yield labelled("process_start_time_seconds", target), f"{60 * self._since:g}"
        for name, value in samples(state, target):
            metric = name.partition("{")[0]
            yield name, f"{float(value) - EPOCH:g}" if metric.endswith("_timestamp_seconds") else value

    def _conditions(self) -> Reading:
        if self._blind:
            raise SourceError(_UNREACHABLE)
        return Reading(node_conditions=(NodeCondition("Ready", True),))

    def _gpus(self) -> Reading:
        found = tuple(self._cluster.gpus(self._node, self._since))
        return Reading(gpus=found, expected_gpus={"nvidia": len(found)})

    def _owners(self) -> Reading:
        claims = [
            GpuOwner(self._cluster.uuid(self._node, index), pod.namespace, pod.name, pod.container)
            for pod in self._cluster.on(self._node)
            for index in pod.spec.get("gpus") or ()
        ]
        pods = self._settings.shared.pods or ()
        return Reading(owners=tuple(of_engines(running(claims, pods), pods)))

    def _memory(self) -> Reading:
        found = [pod.memory() for pod in self._cluster.on(self._node)]
        return Reading(containers=tuple(reading for reading in found if reading is not None))

    def _logs(self) -> Reading:
        since, self._read_logs = self._read_logs, self._cluster.minute
        return Reading(
            logs=tuple(
                log_line(pod.namespace, pod.name, pod.container, one["line"])
                for pod in self._cluster.on(self._node)
                for one in pod.spec.get("log") or ()
                if since < one["at"] <= self._cluster.minute
            )
        )

    def _scrapes(self) -> Reading:
        targets = self._settings.shared.targets
        servers = {pod.address: pod for pod in self._cluster.pods}
        pages: list[Scrape] = []
        errors: dict[str, int] = {}
        for target in targets:
            text, error = (None, UNREACHABLE) if self._cut_off else servers[target.host].scrape()
            if error is not None:
                errors[error] = errors.get(error, 0) + 1
            page = parse_scrape(
                text,
                target=target.name,
                time=EPOCH + 60 * self._cluster.minute,
                error=error,
                scanner=self._scanners.setdefault(target.name, Scanner()),
                **{name: getattr(target, name) for name in _IDENTITY},
            )
            pages.append(replace(page, group=target.group, pool=target.pool))
        return Reading(pages=tuple(pages), targets=tuple(target.name for target in targets), errors=errors)


def _target(node: str) -> Target:
    """Labels of an exporter's target, as its PodMonitor makes them."""
    return (
        ("job", "kvpressure/kvpressure"),
        ("instance", f"{node}/kvpressure/kvpressure"),
        ("node", node),
        ("namespace", "kvpressure"),
        ("pod", f"kvpressure-{node}"),
        ("container", "kvpressure"),
        ("endpoint", "metrics"),
    )


def scrapes(situation: Mapping[str, Any], read: frozenset[str]) -> Series:
    """What Prometheus scrapes from the situation's cluster, as far as a rule may ``read`` it."""
    cluster, series = Cluster(situation), Series()
    phases = {one["node"]: one["phases"] for one in situation.get("exporters") or ()}
    exporters: dict[str, Exporter] = {}
    entries: dict[str, Mapping[str, Any]] = {}
    for number in range(int(60 * situation["length"] / TICK_SECONDS) + 1):
        cluster.advance(number * TICK_SECONDS / 60, TICK_SECONDS)
        scraped: dict[str, str] = {}
        states: dict[str, str] = {}
        for node in cluster.nodes:
            entry = at(phases.get(node) or (), cluster.minute)
            states[node] = state = entry.get("state", "up")
            if state in _STOPPED or (state == "restarted" and entry is not entries.get(node)):
                exporters.pop(node, None)
            entries[node] = entry
            if state not in _STOPPED:
                exporter = exporters.get(node) or exporters.setdefault(node, Exporter(cluster, node))
                published = exporter.tick(state)
                if state not in _UNSCRAPED and number % _TICKS_A_SCRAPE == 0:
                    scraped.update(exporter.published(published))
            if state != "gone":
                scraped[labelled("up", _target(node))] = str(int(state not in _UNSCRAPED))
        if number % _TICKS_A_SCRAPE == 0:
            if cluster.counted:
                scraped[labelled("up", _COUNTER)] = "1"
                scraped.update((labelled(name, _COUNTER), f"{value:g}") for name, value in cluster.samples(states))
            series.add_samples({name: value for name, value in scraped.items() if name.partition("{")[0] in read})
    return series


def level(labels: Mapping[str, str]) -> str:
    """page, ticket or info: whom an alert with these labels reaches."""
    severity = labels.get("severity", "none")
    if "documented_level" in labels or severity not in ("critical", "warning"):
        return "info"
    return "page" if severity == "critical" else "ticket"


class Outcome:
    """What fired in a situation, and how that compares with what was expected. Times are minutes."""

    def __init__(self, situation: Mapping[str, Any], found: Sequence[Fired]) -> None:
        self.name, self.expect = str(situation["id"]), str(situation["expect"])
        self._allowed = (self.expect, *(situation.get("allowed") or ()))
        self._onset = 60.0 * situation["onset"]
        self._subject: Mapping[str, str] = situation.get("subject") or {}
        self._pods = {str(pod["name"]) for pod in situation["pods"] if self._is_subject(pod)}
        self._found = {which: [one for one in found if level(one.labels) == which] for which in ("page", "ticket")}

    def _is_subject(self, pod: Mapping[str, Any]) -> bool:
        return str(pod["model"]) == self._subject.get("model") or str(pod["workload"]) == self._subject.get("pool")

    @property
    def delay(self) -> float | None:
        """From the onset until the first alert of the expected level that names the subject; ``None`` = missed."""
        times = [
            one.at
            for one in self._found.get(self.expect, ())
            if one.at >= self._onset and self._names_subject(one.labels)
        ]
        return (min(times) - self._onset) / 60 if times else None

    @property
    def missed(self) -> bool:
        """Whether an expected page or ticket did not come."""
        return self.expect != "nothing" and self.delay is None

    def false(self, which: str) -> list[Fired]:
        """Alerts of this level that are wrong: not expected and not allowed, or a page before anybody is harmed."""
        if which not in self._allowed and not (which == "ticket" and self.expect == "page"):
            return self._found[which]
        return [one for one in self._found[which] if one.at < self._onset] if which == self.expect == "page" else []

    def first(self, which: str) -> list[Fired]:
        """The first moment of each alert of this level."""
        found: dict[tuple[tuple[str, str], ...], Fired] = {}
        for one in self._found[which]:
            found.setdefault(tuple(sorted(one.labels.items())), one)
        return list(found.values())

    def notifications(self) -> int:
        """Number of notifications that pages make: one for a pool from when it has an alert until it has none."""
        moments = {
            (one.labels.get("cluster"), one.labels.get("namespace"), pool, one.at)
            for one in self._found["page"]
            for pool in (one.labels.get("pool") or one.labels.get("model_name"),)
        }
        return sum((*group, moment - EVALUATION_SECONDS) not in moments for *group, moment in moments)

    def _names_subject(self, labels: Mapping[str, str]) -> bool:
        wanted = self._subject
        if "namespace" in wanted and labels.get("namespace", wanted["namespace"]) != wanted["namespace"]:
            return False
        pool = labels.get("pool") or labels.get("workload")
        named = {"model": labels.get("model_name"), "pool": pool}
        told = wanted.keys() & named.keys()
        return labels.get("pod") in self._pods or not told or any(named[key] == wanted[key] for key in told)

    def line(self) -> str:
        """The outcome on one line."""
        wrong = ["MISSED"] if self.missed else []
        wrong += [f"FALSE {which.upper()}" for which in ("page", "ticket") if self.false(which)]
        if self.expect == "page" and not all(self._names_subject(one.labels) for one in self._found["page"]):
            wrong.append("page names others")
        verdict = ", ".join(wrong) or "ok"
        delay = "" if self.delay is None else f" after {self.delay:g} min"
        told = "; ".join(f"{which}s: {self._told(which)}" for which in ("page", "ticket"))
        return f"{self.name}: {self.expect}{delay}: {verdict}; {told}; notifications {self.notifications()}"

    def _told(self, which: str) -> str:
        times: dict[str, float] = {}
        for one in self._found[which]:
            times.setdefault(one.labels["alertname"], one.at / 60)
        return ", ".join(f"{name} at {minute:g}" for name, minute in times.items()) or "-"

    def texts(self) -> Iterator[str]:
        """Summary and description of each page."""
        for one in self.first("page"):
            yield f"{self.name}, {one.labels['alertname']} at {one.at / 60:g} min"
            yield from (f"  {name}: {one.annotations.get(name, '')}" for name in ("summary", "description"))


def bars(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, bool]]:
    """What is measured, and whether it is good enough."""
    must = [one for one in outcomes if one.expect == "page"]
    delays = [one.delay for one in must if one.delay is not None]
    share = len(delays) / len(must) if must else 1.0
    yield f"paged {len(delays)} of {len(must)} ({share:.0%}, at least {PAGED:.0%})", share >= PAGED
    delay = statistics.median(delays) if delays else 0.0
    yield f"median delay {delay:g} min (at most {DELAY_MINUTES:g})", delay <= DELAY_MINUTES
    pages = [one.name for one in outcomes if one.false("page")]
    yield f"false pages in {len(pages)} of {len(outcomes)} (none)", not pages
    calm = [one for one in outcomes if one.expect == "nothing"]
    tickets = [one.name for one in calm if one.false("ticket")]
    yield f"false tickets in {len(tickets)} of {len(calm)} in which nothing is expected (none)", not tickets
    wanted = [one for one in outcomes if one.expect == "ticket"]
    yield f"tickets in {sum(not one.missed for one in wanted)} of {len(wanted)} (no bar)", True


def play(path: Path, rules: Path = RULES) -> Outcome:
    """Play a file. Raises ``UnplayableError`` and ``EngineError``."""
    try:
        situation = yaml.safe_load(path.read_text(encoding="utf-8"))
        read = frozenset(re.findall(r"\w+", rules.read_text(encoding="utf-8")))
        return Outcome(situation, fired(scrapes(situation, read), rules))
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UnplayableError(f"{path}: {type(error).__name__}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print a line a situation and the summary."""
    parser = argparse.ArgumentParser(prog="python -m lab.alerts.situations", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="YAML files, or folders with them")
    parser.add_argument("--rules", type=Path, default=RULES, help="rule file (default: the delivered one)")
    parser.add_argument("--texts", action="store_true", help="also summary and description of each page")
    options = parser.parse_args(argv)
    also_wanted(options.rules)
    outcomes: list[Outcome] = []
    broken = False
    for path in (file for one in options.paths for file in (sorted(one.glob("*.yaml")) if one.is_dir() else [one])):
        try:
            outcomes.append(play(path, options.rules))
        except (UnplayableError, EngineError) as error:
            broken = True
            print(f"{path.stem}: cannot be played: {error}", flush=True)
            continue
        print("\n".join([outcomes[-1].line(), *(outcomes[-1].texts() if options.texts else ())]), flush=True)
    results = list(bars(outcomes))
    for text, good in results:
        print(text if good else f"{text}: bar missed")
    return int(broken or not all(good for _, good in results))


if __name__ == "__main__":
    sys.exit(main())
