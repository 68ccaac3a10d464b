"""A simulated node as a source: shows the exporter at work without a GPU or a cluster.

``DemoNodeSource`` returns what a node's driver, kubelet, cgroups and log files would contain; ``DemoSource`` has its
own node with a repeated incident, and scrapes the engines too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from kvpressure.model.readings import Scrape
from kvpressure.model.reasons import REFUSED
from kvpressure.sources.base import Reading
from kvpressure.sources.catalog import SourceSpec
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.demo.node import CONTAINER, NAMESPACE, SimulatedNode
from lab.demo.scenario import SCENARIOS, Scenario, ScenarioPlayer

NODE: Final = SourceSpec("demo", "a simulated node", factory=lambda _: None, hold_seconds=3.0)
"""How the monitor reads the simulated node."""
CYCLE_SECONDS: Final = 900.0  # one run of the scenario, then the next begins


class DemoNodeSource:
    """Everything but the engines' metrics, which are scraped."""

    name = "demo"

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def read(self) -> Reading:
        """The node now."""
        node = self._node
        return Reading(gpus=node.gpus(), owners=node.owners(), containers=node.containers(), logs=node.logs())

    def close(self) -> None:
        """Does nothing; no resource is held."""


class DemoSettings(Protocol):
    """Settings of the simulated node."""

    @property
    def keep_exposition(self) -> bool:
        """Whether to keep the raw text, for a recorder."""
        ...


class DemoSource:
    """Has its own node; the incident is repeated, on a new node, every ``cycle_seconds``."""

    name = "demo"

    def __init__(
        self,
        settings: DemoSettings | None,
        *,
        clock: Callable[[], float] = time.time,
        scenario: Scenario = SCENARIOS["kv_pressure"],
        cycle_seconds: float = CYCLE_SECONDS,
    ) -> None:
        self._keep_text = settings is not None and settings.keep_exposition
        self._clock = clock
        self._scenario = scenario
        self._cycle = cycle_seconds
        self._scanners = {pod.name: Scanner() for pod in scenario.pods}
        self._begin(clock())

    def read(self) -> Reading:
        """The node now, with its engines' metrics."""
        now = self._clock()
        if now >= self._start + self._cycle:
            self._begin(now)
        self._script.advance(now)
        pages = tuple(self._page(name, now) for name in self._node.pods)
        return replace(DemoNodeSource(self._node).read(), pages=pages, targets=tuple(page.target for page in pages))

    def close(self) -> None:
        """Does nothing; no resource is held."""

    def _begin(self, now: float) -> None:
        self._start = now
        self._node = SimulatedNode(self._scenario.pods, self._clock)
        self._script = ScenarioPlayer(self._scenario, self._node, now, self._cycle)

    def _page(self, name: str, now: float) -> Scrape:
        text = self._node.metrics(name)
        pod = self._node.pods[name]
        return parse_scrape(
            text,
            target=f"demo://{name}",
            time=now,
            namespace=NAMESPACE,
            pod=name,
            container=CONTAINER,
            gpus=(pod.gpu.uuid,),
            args=pod.args,
            error=REFUSED if text is None else None,
            duration_seconds=0.0,
            scanner=self._scanners[name],
            keep_text=self._keep_text,
        )
