"""Merges what several sources read of the same thing into one snapshot. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from kvpressure.model.readings import ContainerReading, GpuOwner

_FIELDS: Final = tuple(item.name for item in fields(ContainerReading))


def join_containers(readings: Iterable[ContainerReading]) -> tuple[ContainerReading, ...]:
    """One reading per container: pod status and cgroup each know some fields. The first known value wins."""
    groups: dict[tuple[str, str, str], list[ContainerReading]] = defaultdict(list)
    for reading in readings:
        groups[reading.namespace, reading.pod, reading.container].append(reading)
    return tuple(group[0] if len(group) == 1 else _merged(group) for group in groups.values())


def _merged(group: list[ContainerReading]) -> ContainerReading:
    known = {name: [value for one in group if (value := getattr(one, name)) is not None] for name in _FIELDS}
    return ContainerReading(**{name: values[0] for name, values in known.items() if values})


def join_owners(owners: Iterable[GpuOwner]) -> tuple[GpuOwner, ...]:
    """Each container that holds a GPU once. A GPU of several pods is shared for all. An owner without a container's
    name is dropped when its pod has one with a name.
    """
    found: dict[tuple[str, str, str, str], bool] = {}
    groups: dict[tuple[str, str], str] = {}
    pods: dict[str, set[tuple[str, str]]] = defaultdict(set)
    named: set[tuple[str, str, str]] = set()
    for owner in owners:
        key = (owner.uuid, owner.namespace, owner.pod, owner.container)
        found[key] = found.get(key, False) or owner.shared
        pods[owner.uuid].add((owner.namespace, owner.pod))
        if owner.group:
            groups[owner.namespace, owner.pod] = owner.group
        if owner.container:
            named.add((owner.uuid, owner.namespace, owner.pod))
    shared = {uuid for (uuid, *_), is_shared in found.items() if is_shared} | {u for u, p in pods.items() if len(p) > 1}
    return tuple(
        GpuOwner(uuid, namespace, pod, container, uuid in shared, groups.get((namespace, pod), ""))
        for uuid, namespace, pod, container in found
        if container or (uuid, namespace, pod) not in named
    )
