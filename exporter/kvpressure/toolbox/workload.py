"""The workload of a pod, through kubectl: the object that a patch has to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvpressure import redaction
from kvpressure.engines.registry import titles
from kvpressure.errors import InputError, shown
from kvpressure.parsed import items, mapping
from kvpressure.toolbox import manifests
from kvpressure.toolbox.kubectl import Kubectl, KubectlError
from kvpressure.toolbox.manifests import ServerContainer

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9.]*/[a-z0-9][a-z0-9.-]*")
_DEPTH: Final = 4  # pod, ReplicaSet, Deployment, and what made that


def of_name(kubectl: Kubectl, namespace: str, name: str) -> Mapping[str, Any]:
    """The object ``KIND/NAME``. Raises ``InputError``."""
    if _NAME.fullmatch(name) is None:
        raise InputError(f"--workload: {shown(name)} is not allowed; allowed: KIND/NAME, e.g. deploy/chat")
    kind, _, rest = name.partition("/")
    try:
        return kubectl.object(kind, rest, namespace)
    except KubectlError as error:
        raise InputError(f"--workload: {redaction.value(name)}: {error}") from error


def selector_of(workload: Mapping[str, Any], name: str) -> str:
    """Labels of its pods as a kubectl selector. Raises ``InputError`` without expressible ones."""
    labels = mapping(mapping(mapping(workload.get("spec")).get("selector")).get("matchLabels"))
    if not labels:
        raise InputError(f"--workload: {name}: the workload has no label selector; give -l LABELS")
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def server_of(workload: Mapping[str, Any], container: str, wanted: str | None = None) -> ServerContainer:
    """The vLLM container of a workload: ``wanted`` (``--container``), else the one called ``container``, else the
    only one. Raises ``InputError`` for none or several.
    """
    found = manifests.servers_of(workload)
    title = f"{workload.get('kind')} {mapping(workload.get('metadata')).get('name')}"
    if not found:
        raise InputError(
            f"{title}: no container of the workload runs {titles()}; give --manifest FILE of the engine's workload"
        )
    named = [server for server in found if server.container == container]
    return manifests.choose(named or found if wanted is None else found, wanted, title)


def of_pod(kubectl: Kubectl, namespace: str, pod: str, container: str, wanted: str | None = None) -> ServerContainer:
    """The server in the outermost owner of ``pod`` that has a pod template; ``wanted`` as in ``server_of``. Raises
    ``InputError``.
    """
    try:
        document = kubectl.object("pod", pod, namespace)
        best: Mapping[str, Any] = document
        for _ in range(_DEPTH):
            owner = next(
                (
                    mapping(one)
                    for one in items(mapping(document.get("metadata")).get("ownerReferences"))
                    if mapping(one).get("controller") is True
                ),
                None,
            )
            if owner is None:
                break
            try:
                document = kubectl.object(_resource(owner), str(owner.get("name")), namespace)
            except KubectlError:
                if best.get("kind") in ("Deployment", "StatefulSet", "DaemonSet"):
                    break  # its own maker is a resource that may not be read; the patch says who it is
                raise
            if manifests.servers_of(document):
                best = document
    except KubectlError as error:
        raise InputError(f"could not read the workload of pod {pod}: {error}; give --manifest FILE instead") from error
    return server_of(best, container, wanted)


def _resource(owner: Mapping[str, Any]) -> str:
    """``replicaset.v1.apps``, by which kubectl finds kinds of any group."""
    kind = str(owner.get("kind")).lower()
    group, slash, version = str(owner.get("apiVersion") or "").partition("/")
    return f"{kind}.{version}.{group}" if slash else kind
