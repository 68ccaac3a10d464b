"""A pod as its JSON describes it: its engines, the rows that explain its containers, and the pods it works with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvpressure.model.readings import ContainerReading, Discovered
from kvpressure.sources.kubernetes.discovery import OF_WORKERS, ContainerRow, PodGroup
from kvpressure.sources.scrape.targets import Target


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """A container that runs an inference server. ``dialect`` is its engine's name, "" = unknown. ``target`` None = it
    has no page of its own, ``refusal`` says why. ``ranks`` are further pages of the same container, where each
    data-parallel rank serves one; with a target, ``refusal`` says why some are missing.
    """

    container: str
    container_id: str  # hexadecimal, without the runtime's scheme; "" when unknown
    reading: ContainerReading
    target: Target | None = None
    refusal: str | None = None
    ranks: tuple[Target, ...] = ()
    dialect: str = ""

    @property
    def targets(self) -> tuple[Target, ...]:
        """All of its pages."""
        return () if self.target is None else (self.target, *self.ranks)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node. ``uids`` are the names under which the kernel may know it (a static pod has two);
    ``containers`` maps container ids to names. ``others`` are the containers with an engine's image that would be
    engines if their command did not name another program. ``rows`` explain every container with a GPU or that looks
    like an inference server. ``group``: the pods that it forms one engine with, None = none. ``cut``: the containers
    whose command line is too long to be read as a whole.
    """

    namespace: str
    name: str
    uid: str
    phase: str = ""
    uids: frozenset[str] = frozenset()
    containers: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[EngineContainer, ...] = ()
    others: tuple[str, ...] = ()
    rows: tuple[ContainerRow, ...] = ()
    group: PodGroup | None = None
    cut: tuple[str, ...] = ()


def discovered(pods: Iterable[Pod]) -> tuple[Discovered, ...]:
    """The rows of these pods as a reading."""
    return tuple(
        Discovered(
            pod.namespace,
            pod.name,
            row.container,
            row.result,
            row.why,
            row.sign,
            _explained(pod, row),
            "" if row.target is None else row.target.name,
            row.complete if row.sign else None,
            row.gpus,
        )
        for pod in pods
        for row in pod.rows
    )


def _explained(pod: Pod, row: ContainerRow) -> str:
    """What became of a container, with the group where another pod of it serves."""
    return f"{row.explanation} ({pod.group.name})" if pod.group and row.why in OF_WORKERS else row.explanation


def leaders(pods: Iterable[Pod]) -> Mapping[tuple[str, str], tuple[str, str, str]]:
    """Namespace and name of each worker pod, with namespace, pod and container of the engine that it works for.

    Labels alone join nothing: a pod with metrics of its own is an engine of its own, and the leader must serve exactly
    one.
    """
    known = list(pods)
    serving = {
        (pod.namespace, pod.group.name): [
            (pod.namespace, pod.name, engine.container) for engine in pod.engines if engine.targets
        ]
        for pod in known
        if pod.group is not None and pod.group.leads
    }
    return {
        (pod.namespace, pod.name): engines[0]
        for pod in known
        if pod.group is not None
        and not pod.group.leads
        and len(engines := serving.get((pod.namespace, pod.group.name), [])) == 1
        and not any(engine.targets for engine in pod.engines)
    }


def groups_of_workers(pods: Iterable[Pod]) -> Mapping[tuple[str, str], str]:
    """Namespace and name of each pod that serves no metrics of its own and is not the leader of its group, with
    the group: if the leader's engine is on another node, the group's name is all that both nodes know.
    """
    return {
        (pod.namespace, pod.name): pod.group.name
        for pod in pods
        if pod.group is not None and not pod.group.leads and not any(engine.targets for engine in pod.engines)
    }
