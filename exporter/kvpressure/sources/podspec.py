"""What a pod's JSON says: its engines, where their metrics are, how their containers are doing. Pure.

Everything in a pod was written by whoever may create pods, so none of it is trusted: the host of a target is always
``status.podIP``; the port is declared by the container or stands in its command line (a pod on the host's network
may name declared ports only, and none that belongs to the node); the path is checked. Wrong types count as missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from kvpressure import redaction
from kvpressure.args import EngineArgs
from kvpressure.commandline import parse, starts_server
from kvpressure.readings import ContainerReading, Termination
from kvpressure.sources.vllm.targets import DEFAULT_PATH, DEFAULT_PORT, MAX_PATH_CHARS, Target, TargetError

MAX_CONTAINERS: Final = 64  # of one pod that are looked at
MAX_ARGS: Final = 1024

PORT_ANNOTATIONS: Final = ("kvpressure.io/port", "prometheus.io/port")
PATH_ANNOTATIONS: Final = ("kvpressure.io/path", "prometheus.io/path")
SCHEME_ANNOTATIONS: Final = ("kvpressure.io/scheme", "prometheus.io/scheme")
SCRAPE_ANNOTATION: Final = "kvpressure.io/scrape"  # "false" leaves the pod alone
CONTAINER_ANNOTATION: Final = "kvpressure.io/container"  # the engine, where it cannot be told by its command

REFUSALS: Final = ("no_pod_ip", "port_not_declared", "port_of_the_node", "bad_path", "no_endpoint")
"""Why an engine has no target. ``no_endpoint`` is normal: a worker of an engine that is served elsewhere."""

_PORT_NAMES: Final = ("metrics", "http-metrics", "vllm", "http", "api", "openai", "serve", "server")
_NODE_PORTS: Final = frozenset({2379, 2380, 2381, 6443, 9100, 10248, 10249, 10250, 10255, 10256, 10257, 10259})
_PATH: Final = re.compile(r"/[A-Za-z0-9._~/-]*")
_CONTAINER_ID: Final = re.compile(r"[a-z0-9.-]+://([0-9a-f]{8,128})")
_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Engine:
    """A container that runs vLLM. ``target`` None = it has no page of its own, ``refusal`` says why."""

    container: str
    container_id: str  # hexadecimal, without the runtime's scheme; "" when not known
    reading: ContainerReading
    target: Target | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node. ``uids`` are the names under which the kernel may know it (a static pod has two);
    ``containers`` maps container ids to names.
    """

    namespace: str
    name: str
    uid: str
    phase: str = ""
    uids: frozenset[str] = frozenset()
    containers: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """``selected``: the user named these pods by a label selector, so that one engine may be assumed in each.
    ``verify_tls``: what to do with pods that serve https.
    """

    selected: bool = False
    verify_tls: bool = True


def read_pod(document: Mapping[str, Any], policy: Policy) -> Pod | None:
    """The pod in an API object; None when it has no identity."""
    metadata, spec, status = (_dict(document.get(part)) for part in ("metadata", "spec", "status"))
    namespace, name, uid = (_text(metadata.get(part)) for part in ("namespace", "name", "uid"))
    if not (namespace and name and uid):
        return None
    statuses = {_text(item.get("name")): item for item in _dicts(status.get("containerStatuses"))}
    everything = [*statuses.values(), *_dicts(status.get("initContainerStatuses"))]
    ids = {_hex(item.get("containerID")): _text(item.get("name")) for item in everything}
    ids.pop("", None)
    static = _text(_dict(metadata.get("annotations")).get("kubernetes.io/config.hash"))
    pod = _Raw(namespace, name, _dict(metadata.get("labels")), _dict(metadata.get("annotations")), spec, status)
    return Pod(namespace, name, uid, _text(status.get("phase")), frozenset({uid, static} - {""}), ids,
               tuple(_engine(pod, container, statuses.get(_text(container.get("name")), {}), policy)
                     for container in _engine_containers(pod, policy)))


@dataclass(frozen=True, slots=True)
class _Raw:
    namespace: str
    name: str
    labels: Mapping[str, Any]
    annotations: Mapping[str, Any]
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    def annotation(self, names: Iterable[str]) -> str:
        return next((text for name in names if (text := _text(self.annotations.get(name)).strip())), "")


# --- which containers ---------------------------------------------------------------------------------------

def _engine_containers(pod: _Raw, policy: Policy) -> list[Mapping[str, Any]]:
    if _text(pod.annotations.get(SCRAPE_ANNOTATION)).lower() == "false":
        return []
    containers = [c for c in _dicts(pod.spec.get("containers")) if _text(c.get("name"))][:MAX_CONTAINERS]
    named = _text(pod.annotations.get(CONTAINER_ANNOTATION))
    if named:
        return [c for c in containers if c["name"] == named]
    engines = [c for c in containers if _runs_vllm(c)]
    if engines or not policy.selected:
        return engines
    with_gpu = [c for c in containers if any("gpu" in resource for resource in _limits(c))]
    return with_gpu or (containers if len(containers) == 1 else [])


def _runs_vllm(container: Mapping[str, Any]) -> bool:
    if starts_server(_argv(container)):
        return True
    repository = _text(container.get("image")).split("@")[0].lower()
    image = re.sub(r":[^/]*$", "", repository)
    return "vllm" in image and "router" not in image and "operator" not in image


def _argv(container: Mapping[str, Any]) -> list[str]:
    parts = [*_list(container.get("command")), *_list(container.get("args"))]
    return [part for part in parts if isinstance(part, str)][:MAX_ARGS]


def _has_endpoint(pod: _Raw, argv: list[str], args: EngineArgs) -> bool:
    """Workers of an engine that spans pods serve nothing: headless ranks, Ray workers, LeaderWorkerSet workers."""
    if args.values.get("headless") == "True" or (args.integer("node_rank") or 0) > 0:
        return False
    if starts_server(argv):
        return True
    worker = (_text(pod.labels.get("ray.io/node-type")) == "worker"
              or _text(pod.labels.get("leaderworkerset.sigs.k8s.io/worker-index")) not in ("", "0"))
    ray_worker = "ray" in argv and "start" in argv and "--head" not in argv
    return not (worker or ray_worker)


# --- one engine ---------------------------------------------------------------------------------------------

def _engine(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any], policy: Policy) -> Engine:
    argv = _argv(container)
    environment = {_text(item.get("name")): item["value"] for item in _dicts(container.get("env"))
                   if isinstance(item.get("value"), str)}
    args = parse(argv, environment)
    reading = _reading(pod, container, status)
    target, refusal = None, None
    if not _has_endpoint(pod, argv, args):
        refusal = "no_endpoint"
    elif _text(pod.status.get("phase")) == "Running":
        target, refusal = _target(pod, container, args, policy)
    if target is not None:
        target = _with_command(target, argv, environment)
    return Engine(_text(container["name"]), _hex(status.get("containerID")), reading, target, refusal)


def _with_command(target: Target, argv: list[str], environment: Mapping[str, str]) -> Target:
    """Command line and the variables it needs, without what looks like a secret: they end up in recordings."""
    from dataclasses import replace

    used = {name for part in argv for name in _VARIABLE.findall(part)}
    env = {name: value for name, value in environment.items()
           if (name in used or name.startswith("VLLM_")) and not redaction.is_secret(name)}
    return replace(target, args=tuple(redaction.args(argv)), env=env)


def _target(pod: _Raw, container: Mapping[str, Any], args: EngineArgs,
            policy: Policy) -> tuple[Target | None, str | None]:
    try:
        host = str(ipaddress.ip_address(_text(pod.status.get("podIP"))))
    except ValueError:
        return None, "no_pod_ip"
    port, refusal = _port(pod, container, args)
    path = pod.annotation(PATH_ANNOTATIONS) or DEFAULT_PATH
    if port is None:
        return None, refusal
    if not _PATH.fullmatch(path) or ".." in path or len(path) > MAX_PATH_CHARS:
        return None, "bad_path"
    https = pod.annotation(SCHEME_ANNOTATIONS) == "https" or "ssl_keyfile" in args.explicit
    try:
        return Target(host, port, path, "https" if https else "http", namespace=pod.namespace, pod=pod.name,
                      container=_text(container["name"]), verify=policy.verify_tls or not https,
                      version=_version(_text(container.get("image")))), None
    except TargetError:
        return None, "bad_path"


def _version(image: str) -> str | None:
    """Version of vLLM out of the tag of an image that is named after it; its log tells better."""
    found = re.search(r"vllm[\w.-]*:v?(\d{1,3}\.\d{1,3}\.\d{1,3}(?:[.+-]?(?:rc|post|dev)\d+)?)(?=[+@_-]|$)", image)
    return found[1] if found else None


def _port(pod: _Raw, container: Mapping[str, Any], args: EngineArgs) -> tuple[int | None, str | None]:
    """The annotated port if declared, the command line's, a declared one by name or number, else vLLM's default."""
    declared = [(port["containerPort"], _text(port.get("name"))) for port in _dicts(container.get("ports"))
                if isinstance(port.get("containerPort"), int) and 0 < port["containerPort"] < 65536
                and _text(port.get("protocol")) in ("", "TCP")]
    numbers = [number for number, _ in declared]
    on_host = pod.spec.get("hostNetwork") is True
    annotated = pod.annotation(PORT_ANNOTATIONS)
    by_name = {name: number for number, name in reversed(declared)}
    choices = [next((number for number in numbers if str(number) == annotated), None),
               args.port if args.port in numbers or not on_host else None,
               DEFAULT_PORT if DEFAULT_PORT in numbers else None,
               *(by_name.get(name) for name in _PORT_NAMES), *numbers[:1], None if on_host else DEFAULT_PORT]
    port = next((choice for choice in choices if choice is not None), None)
    if port is None:
        return None, "port_not_declared"
    return (None, "port_of_the_node") if on_host and port in _NODE_PORTS else (port, None)


def _reading(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerReading:
    limits = _limits(container)
    restarts, ready = status.get("restartCount"), status.get("ready")
    memory = quantity(limits.get("memory"))
    return ContainerReading(
        pod.namespace, pod.name, _text(container["name"]),
        restarts=restarts if isinstance(restarts, int) and not isinstance(restarts, bool) and restarts >= 0 else None,
        ready=ready if isinstance(ready, bool) else None, last_termination=_termination(pod, status),
        cpu_limit_cores=quantity(limits.get("cpu")), memory_limit_bytes=None if memory is None else int(memory),
    )


def _termination(pod: _Raw, status: Mapping[str, Any]) -> Termination | None:
    """How the container ended last: its present end, else the one before, else the pod's eviction."""
    for part in ("state", "lastState"):
        ended = _dict(_dict(status.get(part)).get("terminated"))
        if ended:
            code = ended.get("exitCode")
            return Termination(_text(ended.get("reason")) or None, code if isinstance(code, int) else None,
                               _time(ended.get("finishedAt")))
    reason = _text(pod.status.get("reason"))
    return Termination(reason) if _text(pod.status.get("phase")) == "Failed" and reason else None


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return _dict(_dict(container.get("resources")).get("limits"))


# --- values -------------------------------------------------------------------------------------------------

_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE](-?\d{1,2}))?")
_SCALE: Final = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
                 "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}


def quantity(value: object) -> float | None:
    """A Kubernetes quantity (``500m``, ``64Gi``, ``1e9``, 4) as a number; None when it is none or negative."""
    found = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if found is None:
        return None
    return float(found[1]) * (10.0 ** int(found[3]) if found[3] else _SCALE[found[2] or ""])


def _time(value: object) -> float | None:
    try:
        return datetime.fromisoformat(_text(value).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def _hex(value: object) -> str:
    found = _CONTAINER_ID.fullmatch(_text(value))
    return found[1] if found else ""


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
