"""A simulated node as a source: ``--collector.demo`` shows the exporter at work without a GPU or a cluster.

``NodeSource`` reads what a node's driver, kubelet, cgroups and log files would say; ``DemoSource`` brings its own node, on
which an incident comes and goes, and reads the engines' pages too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvpressure.demo.node import CONTAINER, NAMESPACE, Node
from kvpressure.demo.scenario import SCENARIOS, Scenario, Script
from kvpressure.readings import EnginePage
from kvpressure.sources.base import Reading
from kvpressure.sources.vllm.exposition import Scanner, page_from_text
from kvpressure.sources.vllm.reasons import REFUSED

CYCLE_SECONDS: Final = 900.0  # one run of the scenario, then the next begins


class NodeSource:
    """Everything but the engines' pages, which have their own way of being read."""

    name = "demo"

    def __init__(self, node: Node) -> None:
        self._node = node

    def read(self) -> Reading:
        """The node now."""
        node = self._node
        return Reading(gpus=node.gpus(), owners=node.owners(), containers=node.containers(), logs=node.logs())

    def close(self) -> None:
        """Nothing is held."""


class DemoSource:
    """A node of its own; its incident is repeated, on a fresh node, every ``cycle_seconds``."""

    name = "demo"

    def __init__(
        self,
        settings: object,
        *,
        clock: Callable[[], float] = time.time,
        scenario: Scenario = SCENARIOS["kv_pressure"],
        cycle_seconds: float = CYCLE_SECONDS,
    ) -> None:
        del settings  # nothing about the simulated node can be set
        self._clock = clock
        self._scenario = scenario
        self._cycle = cycle_seconds
        self._scanners = {pod.name: Scanner() for pod in scenario.pods}
        self._begin(clock())

    def read(self) -> Reading:
        """The node now, with the pages of its engines."""
        now = self._clock()
        if now >= self._start + self._cycle:
            self._begin(now)
        self._script.advance(now)
        pages = tuple(self._page(name, now) for name in self._node.pods)
        return replace(NodeSource(self._node).read(), pages=pages, targets=tuple(page.target for page in pages))

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, now: float) -> None:
        self._start = now
        self._node = Node(self._scenario.pods, self._clock)
        self._script = Script(self._scenario, self._node, now, self._cycle)

    def _page(self, name: str, now: float) -> EnginePage:
        text = self._node.metrics(name)
        pod = self._node.pods[name]
        return page_from_text(
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
        )
