"""The workload of a pod, through kubectl: the object that people edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvpressure import redaction
from kvpressure.errors import InputError, shown
from kvpressure.parsed import mapping, mappings, text
from kvpressure.toolbox.kubectl import Kubectl, KubectlError

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


def of_pod(kubectl: Kubectl, namespace: str, pod: str) -> str:
    """``deployment/chat``: the outermost controller of a pod, as far as the objects may be read; "" = none is known."""
    kind, name, workload = "pod", pod, ""
    for _ in range(_DEPTH):
        try:
            metadata = mapping(kubectl.object(kind, name, namespace).get("metadata"))
        except KubectlError:
            break
        owners = mappings(metadata.get("ownerReferences"))
        owner = next((one for one in owners if one.get("controller") is True), None)
        if owner is None or owner.get("kind") == "Node":
            break
        kind, name = _resource(owner), text(owner.get("name"))
        workload = f"{text(owner.get('kind')).lower()}/{name}"
    return workload


def _resource(owner: Mapping[str, Any]) -> str:
    """``replicaset.v1.apps``, by which kubectl finds kinds of any group."""
    kind = str(owner.get("kind")).lower()
    group, slash, version = str(owner.get("apiVersion") or "").partition("/")
    return f"{kind}.{version}.{group}" if slash else kind
