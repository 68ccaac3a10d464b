"""The pool of an engine: the engines of one workload that do the same job. Its identity alone; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvpressure.model.frozen import frozen

LABEL: Final = "label"
ARGS: Final = "args"
NAME: Final = "name"
OWNER: Final = "owner"

KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""The two sides of a pair of pools, and the role of each in the exchange of KV blocks."""

OTHER_SIDE: Final = {"prefill": "decode", "decode": "prefill"}
SIDES: Final[Mapping[str | None, str]] = {kv_role: side for side, kv_role in KV_ROLES.items()}
_WORD: Final = re.compile(r"[^a-z0-9]+")
_REPLICA: Final = re.compile(r"(.+?)(-[a-z0-9]{8,10}-[a-z0-9]{5}|-[0-9]+)?")


@frozen
class Workload:
    """What the owner and the labels of a pod say. ``name``: of the workload that people deploy, "" = unknown.
    ``role``: by a label, "" = none says it. ``mixed``: its pods may have several roles. ``revision``: of the template
    that the pod was made from, "" = unknown. ``deployment``: the object whose controller made all roles, "" = none
    names itself. ``counted``: kube-state-metrics counts its replicas.
    """

    name: str = ""
    role: str = ""
    mixed: bool = False
    revision: str = ""
    deployment: str = ""
    counted: bool = False


@frozen
class EnginePool:
    """``name``: of the workload, with the role where its pods may have several. ``role``: prefill, decode or both; "" =
    none, or unknown. ``source``: what gave the role (label, args or name), else what gave the name (owner or name).
    ``revision``: as in ``Workload``. ``pair``: what prefill and decode of one deployment have in common, "" = neither.
    """

    name: str = ""
    role: str = ""
    source: str = NAME
    revision: str = ""
    pair: str = ""


def pool_of(pod: str, workload: Workload, kv_role: str | None) -> EnginePool:
    """The pool of a pod's engine. ``kv_role``: by its arguments, as in ``Features``; kv_both is no role, because both
    sides of most pairs say it. A label and arguments that contradict each other leave the role unknown.
    """
    words = {LABEL: workload.role, ARGS: SIDES.get(kv_role, ""), NAME: _named(pod)}
    owner = OWNER if workload.name not in ("", pod) else NAME
    source = next((source for source, role in words.items() if role), owner)
    role = "" if {words[LABEL], words[ARGS]} == set(KV_ROLES) else words.get(source, "")
    source = source if role else owner
    name = workload.name or _replicated(pod)
    name = f"{name}-{role}" if workload.mixed and role in KV_ROLES else name
    pair = (workload.deployment or _without(role, name)) if role in KV_ROLES else ""
    return EnginePool(name, role, source, workload.revision, pair)


def are_pair(here: EnginePool, there: EnginePool) -> bool:
    """Whether they are the two sides of one deployment."""
    return OTHER_SIDE.get(here.role) == there.role and here.pair == there.pair


def _without(role: str, name: str) -> str:
    """The name of a pool without the words that stand for its role: ``qwen-p`` is prefill's ``qwen``."""
    others = (word for word in name.split("-") if not word.startswith(role) and not role.startswith(word))
    return "-".join(others).replace(role, "")


def _replicated(pod: str) -> str:
    """The workload that a pod's name tells, by the endings that Deployments and StatefulSets give."""
    match = _REPLICA.fullmatch(pod)
    return match[1] if match else pod


def _named(pod: str) -> str:
    """The role that is a word of a pod's name; "" if none is, or both are."""
    words = [role for role in KV_ROLES if role in _WORD.split(pod)]
    return words[0] if len(words) == 1 else ""
