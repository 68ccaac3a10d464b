"""A pod from its JSON: its engines, the reasons for its other containers, and its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvpressure.model.arguments import OF_PROCESS
from kvpressure.model.readings import ContainerReading, Discovered
from kvpressure.sources.kubernetes.discovery import OF_WORKERS, ContainerRow, PodGroup
from kvpressure.sources.places import Place, Precedence
from kvpressure.sources.scrape.targets import Target

ENDED_PHASES: Final = ("Succeeded", "Failed")
Process = tuple[tuple[str, ...], int | None]  # arguments, and the port that they name
UID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}"
"""A pod's uid: a UUID, or the hash of a static pod's configuration."""


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """A container that runs an inference server. ``dialect``: its name, "" = unknown. ``targets``: its metrics
    endpoints, several where data-parallel ranks each serve one. Without one it is not scraped, because of ``refusal``;
    with one, ``refusal`` is why some are missing. ``guessed``: its port is not certain, and its network is its own.
    """

    container: str
    container_id: str  # hexadecimal, without the runtime's scheme; "" when unknown
    reading: ContainerReading
    targets: tuple[Target, ...] = ()
    refusal: str | None = None
    dialect: str = ""
    guessed: bool = False

    @property
    def target(self) -> Target | None:
        """Its first metrics endpoint; None without one."""
        return next(iter(self.targets), None)

    def with_process(self, processes: Mapping[str, Process]) -> EngineContainer:
        """With the arguments of its process, and its port, where one is seen and it is its only server: it runs them,
        whatever the manifest says. ``processes``: arguments and port by container id.
        """
        words, asked = processes.get(self.container_id, ((), None))
        if not words or self.target is None or len(self.targets) > 1:
            return self
        port = (self.guessed and asked) or self.target.port
        target = replace(self.target, port=port, args=words, args_source=OF_PROCESS, assumed=False)
        return replace(self, targets=(target,))


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node. ``uids``: those under which the node knows it (a static pod has two). ``containers``:
    names by container id. ``rows``: every container with a GPU or that looks like an inference server. ``group``: the
    pods with which it forms one engine. ``cut``: containers with a command line too long to be read fully.
    """

    namespace: str
    name: str
    uid: str
    phase: str = ""
    uids: frozenset[str] = frozenset()
    containers: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[EngineContainer, ...] = ()
    rows: tuple[ContainerRow, ...] = ()
    group: PodGroup | None = None
    cut: tuple[str, ...] = ()

    def precedence(self, owning: Collection[Place]) -> Precedence:
        """How good its claim to a place is; ``owning``: the pods that have a GPU."""
        if self.phase in ENDED_PHASES:
            return Precedence.ENDED
        if (self.namespace, self.name) in owning:
            return Precedence.HAS_GPU
        if self.phase != "Running":
            return Precedence.WAITS
        if any(any(row.gpus.values()) for row in self.rows):
            return Precedence.ASKS_GPU
        return Precedence.SERVES if self.engines else Precedence.RUNS

    def with_processes(self, processes: Mapping[str, Process]) -> Pod:
        """The pod with what the processes of its engines show, by container id."""
        engines = {one.container: one.with_process(processes) for one in self.engines}
        rows = (
            replace(row, target=engines[row.container].target) if row.container in engines else row for row in self.rows
        )
        return replace(self, engines=tuple(engines.values()), rows=tuple(rows)) if processes else self

    def without(self, unread: Mapping[str, tuple[str, str]]) -> Pod:
        """The pod with the reason in the rows of engines that have ``unread`` targets."""
        rows = {row.container: row for row in self.rows}
        for engine in self.engines:
            reasons = [unread[target.name] for target in engine.targets if target.name in unread]
            if reasons:
                left = next((target for target in engine.targets if target.name not in unread), None)
                row = rows[engine.container]
                rows[engine.container] = replace(
                    row, target=left, reason=row.reason or reasons[0][0], error=reasons[0][1]
                )
        return replace(self, rows=tuple(rows.values()))


def with_uids_of_their_own(pods: Sequence[Pod]) -> tuple[Pod, ...]:
    """The pods, each without the second uids that another pod has or claims as well."""
    claims = Counter(uid for pod in pods for uid in pod.uids)
    return tuple(
        replace(pod, uids=frozenset(uid for uid in pod.uids if uid == pod.uid or claims[uid] == 1)) for pod in pods
    )


def discovered(pods: Iterable[Pod]) -> tuple[Discovered, ...]:
    """The rows of these pods as readings."""
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
            (pod.group and pod.group.name) or pod.name,
            row.role,
            row.arguments,
        )
        for pod in pods
        for row in pod.rows
    )


def _explained(pod: Pod, row: ContainerRow) -> str:
    """Explanation of a container, with the group whose leader serves it."""
    named = pod.group is not None and pod.group.name and row.why in OF_WORKERS
    return f"{row.explanation} ({pod.group.name})" if pod.group and named else row.explanation


def leaders(pods: Iterable[Pod]) -> Mapping[tuple[str, str], tuple[str, str, str]]:
    """(namespace, pod) of each worker -> (namespace, pod, container) of the engine it works for.

    Labels alone are not enough: a pod with its own metrics is an engine of its own, and the leader must serve exactly
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
    """(namespace, pod) -> group, for each pod that has no metrics of its own and is not its group's leader: if the
    leader is on another node, the group's name is all that both nodes know.
    """
    return {
        (pod.namespace, pod.name): pod.group.name
        for pod in pods
        if pod.group is not None and not pod.group.leads and not any(engine.targets for engine in pod.engines)
    }
