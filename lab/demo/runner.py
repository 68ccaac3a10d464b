"""Runs a scenario next to the real exporter: servers, monitor, web page and, where installed, Prometheus."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.printable import visible
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.routes import Site
from kvpressure.publish.web.server import Server
from kvpressure.runtime.monitor import Monitor
from kvpressure.runtime.signal_flag import SignalFlag
from kvpressure.settings.kinds import ListenAddress
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import Reading, Source
from kvpressure.sources.catalog import CollectorSettings, SourceSpec, registry
from kvpressure.sources.scrape.source import EngineSource
from kvpressure.sources.scrape.targets import Target
from lab.demo import alerting
from lab.demo.beats import Beats, counted, late
from lab.demo.clock import DemoClock
from lab.demo.narration import Story
from lab.demo.node import CONTAINER, NAMESPACE, SimulatedNode
from lab.demo.prometheus_stack import Interrupted, Stack, installed
from lab.demo.scenario import Scenario, ScenarioPlayer
from lab.demo.server import PodServer
from lab.demo.source import NODE, DemoNodeSource

STATUS_SECONDS: Final = 15.0  # simulated seconds between two status lines without a terminal
_SCRAPE_TIMEOUT: Final = 3.0
_TOO_SLOW: Final = 4
_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``seconds`` are simulated; ``speed`` = simulated seconds per real one. ``port`` 0 = any free one."""

    scenario: Scenario
    seconds: float = 180.0
    speed: float = 1.0
    prometheus: bool = True
    port: int = 0


class _PageSource:
    """The real vLLM source, its pages stamped with the demo's time; it follows the pods' command lines."""

    name = "engines"

    def __init__(self, node: SimulatedNode, servers: dict[str, PodServer], clock: DemoClock, interval: float) -> None:
        self._node = node
        self._servers = servers
        self._clock = clock
        vllm = CollectorSettings(True, interval, _SCRAPE_TIMEOUT)
        self._settings = Settings(
            collectors={self.name: vllm}, engine_timeout_seconds=_SCRAPE_TIMEOUT, engine_pace="fixed"
        )
        self._source = EngineSource(self._settings)

    def read(self) -> Reading:
        """The pages that came."""
        self._settings.shared.targets = self._targets()  # as the discovery of pods leaves them
        reading = self._source.read()
        return replace(
            reading, pages=tuple(replace(page, time=self._clock.at(page.time)) for page in reading.pages or ())
        )

    def close(self) -> None:
        """Hang up."""
        self._source.close()

    def _targets(self) -> tuple[Target, ...]:
        return tuple(
            Target(
                "127.0.0.1",
                self._servers[name].port,
                namespace=NAMESPACE,
                pod=name,
                container=CONTAINER,
                gpus=(pod.gpu.uuid,),
                args=pod.args,
            )
            for name, pod in self._node.pods.items()
        )


class _Screen:
    """Lines for people; on a terminal the status stays below them, elsewhere it is printed now and then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live = sys.stdout.isatty()
        self._status = ""

    def tell(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            self._erase()
            print(text, flush=True)

    def status(self, text: str, due: bool) -> None:
        """Print the current state; ``due`` = print a line even without a terminal."""
        if self._live:
            with self._lock:
                self._erase()
                self._status = text[:100]
                print(visible(self._status), end="\r", flush=True)
        elif due:
            self.tell(text)

    def _erase(self) -> None:
        if self._status:
            print(" " * len(self._status), end="\r", flush=True)
            self._status = ""


def run(options: DemoOptions) -> int:
    """Run to the end or a signal. 0 = everything promised was seen, 1 = something was missing, 4 = the same, on a
    machine too slow for ``speed``, 130 = interrupted.

    Raises ``StackError`` when Prometheus or Alertmanager is installed and does not start, ``ListenError`` when the port
    is taken.
    """
    screen = _Screen()
    programs = installed() if options.prometheus else None
    screen.tell(f"demo: {options.scenario.name}: {options.scenario.title}")
    with contextlib.ExitStack() as stops, _signals() as stopping:
        try:
            demo = _Demo(options, screen, programs, stops, stopping)
        except Interrupted:
            return _INTERRUPTED
        finished = demo.play(stopping)
        return demo.summary(finished)


@contextlib.contextmanager
def _signals() -> Iterator[SignalFlag]:
    """A flag that SIGINT, SIGTERM and SIGHUP set; the former handlers come back at the end."""
    stopping = SignalFlag()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    stopping.follow(numbers)
    try:
        yield stopping
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Demo:
    """Everything that runs, started in order; ``stops`` ends it in the opposite order."""

    def __init__(
        self,
        options: DemoOptions,
        screen: _Screen,
        programs: tuple[str, str] | None,
        stops: contextlib.ExitStack,
        stopping: SignalFlag,
    ) -> None:
        self._options = options
        self._screen = screen
        self._clock = DemoClock(options.speed)
        self._story = Story(options.scenario, self._clock.elapsed, screen.tell)
        self._node = SimulatedNode(options.scenario.pods, self._clock)
        self._script = ScenarioPlayer(options.scenario, self._node, self._clock.start, options.seconds)
        servers = {name: PodServer(self._node, name) for name in self._node.pods}
        for server in servers.values():
            server.start()
            stops.callback(server.stop)
        self._monitor = Monitor(self._sources(servers), Pipeline(), 1 / options.speed, wall=self._clock)
        self._monitor.add_listener(lambda _, state: self._story.observe(state))
        around = ViewContext()
        site = Site(
            lambda: self._monitor.state,
            why_unhealthy=self._monitor.why_unhealthy,
            why_not_ready=self._monitor.why_not_ready,
            node_name="demo",
            around=around,
        )
        web = Server([ListenAddress("127.0.0.1", options.port)], site)
        exporter = str(web.start()[0])
        stops.callback(web.stop)
        self._announce(servers, exporter)
        self._stack = self._start_stack(programs, exporter, servers, stops, stopping)
        self._clock.begin()
        self._monitor.start()
        stops.callback(self._monitor.stop)

    def play(self, stopping: SignalFlag) -> bool:
        """Let the scenario happen. True when it came to its end, False when a signal ended it."""
        next_status = STATUS_SECONDS
        while (elapsed := self._clock.elapsed()) < self._options.seconds and not stopping.is_set():
            for phase in self._script.advance(self._clock()):
                self._story.phase(phase)
            due = elapsed >= next_status
            next_status += STATUS_SECONDS if due else 0
            self._screen.status(f"[{elapsed:4.0f} s] {self._story.status()}", due)
            time.sleep(0.1)
        return not stopping.is_set()

    def summary(self, finished: bool) -> int:
        """Tell how it went; returns the exit status."""
        tell = self._screen.tell
        self._story.end()
        tell("")
        tell("what was seen:")
        behind = late(self._beats())
        active = self._stack.active_alerts() if self._stack is not None else None
        for line in self._story.summary(active):
            tell(f"  {line}")
        if behind:
            speed = self._options.speed
            tell(f"this machine is too slow for --speed {speed:g}: {', '.join(map(str, behind))}")
            tell(f"verdicts and alerts may be late, missing or wrong; try --speed {speed / 2:g}")
        if not finished:
            tell("interrupted")
            return _INTERRUPTED
        missing = self._story.missing(active)
        for line in missing:
            tell(f"MISSING: {line}")
        if not missing:
            tell("all expected verdicts and alerts were seen")
        if missing and behind:
            return _TOO_SLOW
        return 1 if missing else 0

    def _beats(self) -> list[Beats]:
        """What was due by now: ticks of the exporter, and what Prometheus does."""
        ticks = counted("ticks", self._clock.elapsed(), self._monitor.state.ticks)
        return [ticks, *(self._stack.beats() if self._stack is not None else ())]

    def _sources(self, servers: dict[str, PodServer]) -> dict[str, tuple[SourceSpec, Source]]:
        """The node and the pages, read as often in simulated time as the exporter reads in real time."""
        speed = self._options.speed
        specs = registry()
        pages = _PageSource(self._node, servers, self._clock, specs["engines"].interval_seconds / speed)
        sources: dict[str, tuple[SourceSpec, Source]] = {}
        for source, spec in ((DemoNodeSource(self._node), NODE), (pages, specs["engines"])):
            sources[source.name] = (replace(spec, interval_seconds=spec.interval_seconds / speed), source)
        return sources

    def _start_stack(
        self,
        programs: tuple[str, str] | None,
        exporter: str,
        servers: dict[str, PodServer],
        stops: contextlib.ExitStack,
        stopping: SignalFlag,
    ) -> Stack | None:
        options, tell = self._options, self._screen.tell
        if programs is None:
            why = (
                "as asked"
                if not options.prometheus
                else ("not installed (Debian: apt install prometheus prometheus-alertmanager)")
            )
            tell(f"  Prometheus    {why}: verdicts only, no alerts")
            return None
        folder = Path(stops.enter_context(tempfile.TemporaryDirectory(prefix="kvpressure-demo-")))
        by = alerting.factor(options.seconds, options.speed)
        stack = Stack(
            programs,
            folder,
            exporter,
            by,
            alerting.scrape_seconds(options.speed),
            self._story.notify,
            stopping,
            [f"127.0.0.1:{server.port}" for server in servers.values()],
        )
        stops.callback(stack.stop)
        tell(f"  Prometheus    {stack.prometheus.url}/")
        tell(f"  Alertmanager  {stack.alertmanager.url}/api/v2/alerts")
        tell(f"  waiting times of rules and routes are {1 / by:.0f} times shorter than in production")
        return stack

    def _announce(self, servers: dict[str, PodServer], exporter: str) -> None:
        options, tell = self._options, self._screen.tell
        tell(
            f"  {options.seconds:.0f} s of simulated time, {options.speed:g} of them a second; everything is on"
            " loopback"
        )
        for name, server in servers.items():
            tell(f"  {name:<13} {server.url}/metrics")
        tell(f"  exporter      http://{exporter}/  and /metrics, /api/v1/diagnosis")
