"""What a pod's JSON says: its engines, where their metrics are, how their containers are doing. Pure.

Everything in a pod was written by whoever may create pods, so none of it is trusted: the host of a target is always
``status.podIP``; the port is declared by the container or stands in its command line (a pod on the host's network
may name declared ports only, and none that belongs to the node); the path is checked. Wrong types count as missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from kvpressure import redaction
from kvpressure.args import EngineArgs
from kvpressure.commandline import parse, runs_something_else, starts_server
from kvpressure.readings import ContainerReading, Termination
from kvpressure.sources.vllm.targets import DEFAULT_PATH, DEFAULT_PORT, MAX_PATH_CHARS, Target, TargetError

MAX_CONTAINERS: Final = 64  # of one pod that are looked at
MAX_ARGS: Final = 1024
MAX_RANKS: Final = 64  # of one container that are scraped each on a port of its own; a node has 16 GPUs at most

PORT_ANNOTATIONS: Final = ("kvpressure.io/port", "prometheus.io/port")
PATH_ANNOTATIONS: Final = ("kvpressure.io/path", "prometheus.io/path")
SCHEME_ANNOTATIONS: Final = ("kvpressure.io/scheme", "prometheus.io/scheme")
SCRAPE_ANNOTATION: Final = "kvpressure.io/scrape"  # "false" leaves the pod alone
CONTAINER_ANNOTATION: Final = "kvpressure.io/container"  # the engine, where it cannot be told by its command

SAME_ADDRESS: Final = "same_address"
OTHER_PROGRAM: Final = "other_program"
REFUSALS: Final = (
    "no_pod_ip",
    "port_not_declared",
    "port_of_the_node",
    "bad_path",
    SAME_ADDRESS,
    "ranks_not_known",
    OTHER_PROGRAM,
    "no_endpoint",
)
"""Why an engine has no target, or not all of its targets. ``no_endpoint`` is normal: a worker of an engine that is served
elsewhere. ``same_address``: another engine has that page already. ``ranks_not_known``: each data-parallel rank has a port
of its own, and how many there are is not visible. ``other_program``: a container that is no engine for its program alone, see
``Pod.others``."""

_PORT_NAMES: Final = ("metrics", "http-metrics", "vllm", "http", "api", "openai", "serve", "server")
_NODE_PORTS: Final = frozenset({2379, 2380, 2381, 6443, 9100, 10248, 10249, 10250, 10255, 10256, 10257, 10259})
_PATH: Final = re.compile(r"/[A-Za-z0-9._~/-]*")
_CONTAINER_ID: Final = re.compile(r"[a-z0-9.-]+://([0-9a-f]{8,128})")
_OF_VLLM: Final = frozenset(
    {
        "model",
        "served_model_name",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "kv_cache_dtype",
        "enforce_eager",
    }
)
_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Engine:
    """A container that runs vLLM. ``target`` None = it has no page of its own, ``refusal`` says why. ``ranks`` are further
    pages of the same container, where each data-parallel rank serves one; with a target, ``refusal`` says why some are missing.
    """

    container: str
    container_id: str  # hexadecimal, without the runtime's scheme; "" when not known
    reading: ContainerReading
    target: Target | None = None
    refusal: str | None = None
    ranks: tuple[Target, ...] = ()

    @property
    def targets(self) -> tuple[Target, ...]:
        """All of its pages."""
        return () if self.target is None else (self.target, *self.ranks)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node. ``uids`` are the names under which the kernel may know it (a static pod has two);
    ``containers`` maps container ids to names. ``others`` are the containers with an image of vLLM that would be engines if
    their command did not name another program.
    """

    namespace: str
    name: str
    uid: str
    phase: str = ""
    uids: frozenset[str] = frozenset()
    containers: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[Engine, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """``selected``: the user named these pods by a label selector, so that one engine may be assumed in each.
    ``verify_tls``: what to do with pods that serve https. ``template``: the pod does not run, so that addresses mean nothing
    and every engine counts.
    """

    selected: bool = False
    verify_tls: bool = True
    template: bool = False


def read_pod(document: Mapping[str, Any], policy: Policy) -> Pod | None:
    """The pod in an API object; None when it has no identity."""
    metadata, spec, status = (_dict(document.get(part)) for part in ("metadata", "spec", "status"))
    namespace, name, uid = (_text(metadata.get(part)) for part in ("namespace", "name", "uid"))
    if not (namespace and name and uid):
        return None
    everything = [*_dicts(status.get("containerStatuses")), *_dicts(status.get("initContainerStatuses"))]
    statuses = {_text(item.get("name")): item for item in reversed(everything)}
    ids = {_hex(item.get("containerID")): _text(item.get("name")) for item in everything}
    ids.pop("", None)
    static = _text(_dict(metadata.get("annotations")).get("kubernetes.io/config.hash"))
    pod = _Raw(namespace, name, _dict(metadata.get("labels")), _dict(metadata.get("annotations")), spec, status)
    chosen, others = _engine_containers(pod, policy)
    found = [_Found(container, _argv(container), _environment(container)) for container in chosen]
    annotated = _annotated(pod, found)
    engines = [
        _engine(pod, one, statuses.get(_text(one.container.get("name")), {}), policy, one is annotated) for one in found
    ]
    return Pod(
        namespace,
        name,
        uid,
        _text(status.get("phase")),
        frozenset({uid, static} - {""}),
        ids,
        tuple(engines if policy.template else _apart(engines)),
        tuple(_text(container.get("name")) for container in others),
    )


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


def _engine_containers(pod: _Raw, policy: Policy) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The containers that are engines, and those of vLLM's image that only their program keeps from being taken for one."""
    if _text(pod.annotations.get(SCRAPE_ANNOTATION)).lower() == "false":
        return [], []
    containers = _containers(pod)[:MAX_CONTAINERS]
    named = _text(pod.annotations.get(CONTAINER_ANNOTATION))
    if named:
        return [c for c in containers if c["name"] == named], []
    # Sidecars and clients are called after vLLM too: what starts a server goes before what is only named after it.
    certain = [c for c in containers if _starts_engine(c)]
    if certain:
        return certain, []
    images = [c for c in containers if _of_vllm(c)]
    likely = [c for c in images if not _runs_something_else(c)]
    engines = _with_gpu(likely)
    if not engines and policy.selected:
        engines = [c for c in containers if _has_gpu(c)] or (containers if len(containers) == 1 else [])
    return engines, [c for c in _with_gpu(images) if c not in likely and c not in engines]


def _containers(pod: _Raw) -> list[Mapping[str, Any]]:
    """What keeps running in a pod: containers, and init containers that Kubernetes restarts (native sidecars)."""
    sidecars = [c for c in _dicts(pod.spec.get("initContainers")) if c.get("restartPolicy") == "Always"]
    return [c for c in (*_dicts(pod.spec.get("containers")), *sidecars) if _text(c.get("name"))]


def _starts_engine(container: Mapping[str, Any]) -> bool:
    """Whether vLLM's server is started for certain: by name, or by arguments of it for the entry point of its image."""
    argv = _argv(container)
    if starts_server(argv):
        return True
    if not argv or _list(container.get("command")) or not _of_vllm(container):
        return False
    named = _OF_VLLM if argv[0].startswith("-") else _OF_VLLM - {"model"}  # any word may look like a model
    return bool(named & parse(argv).explicit)


def _runs_something_else(container: Mapping[str, Any]) -> bool:
    return runs_something_else(_argv(container), entry_point=not _list(container.get("command")))


def _of_vllm(container: Mapping[str, Any]) -> bool:
    repository = _text(container.get("image")).split("@")[0].lower()
    image = re.sub(r":[^/]*$", "", repository)
    return "vllm" in image and "router" not in image and "operator" not in image


def _with_gpu(containers: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with a GPU, where any has one."""
    return [c for c in containers if _has_gpu(c)] or containers


def _has_gpu(container: Mapping[str, Any]) -> bool:
    claims = _list(_dict(container.get("resources")).get("claims"))
    return bool(claims) or any("gpu" in name or "/mig-" in name for name in map(str, _limits(container)))


def _argv(container: Mapping[str, Any]) -> list[str]:
    parts = [*_list(container.get("command")), *_list(container.get("args"))]
    return [part for part in parts if isinstance(part, str)][:MAX_ARGS]


def _has_endpoint(pod: _Raw, argv: list[str], args: EngineArgs) -> bool:
    """Workers of an engine that spans pods serve nothing: headless ranks, Ray workers, LeaderWorkerSet workers."""
    if args.values.get("headless") == "True" or ((args.integer("node_rank") or 0) > 0 and not _port_each(args)):
        return False
    if starts_server(argv):
        return True
    worker = _text(pod.labels.get("ray.io/node-type")) == "worker" or _text(
        pod.labels.get("leaderworkerset.sigs.k8s.io/worker-index")
    ) not in ("", "0")
    ray_worker = "ray" in argv and "start" in argv and "--head" not in argv
    return not (worker or ray_worker)


# --- one engine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A container that is taken for an engine. ``env`` are its literal variables."""

    container: Mapping[str, Any]
    argv: list[str]
    env: Mapping[str, str]

    @property
    def args(self) -> EngineArgs:
        return parse(self.argv, self.env)

    @property
    def ports(self) -> list[tuple[int, str]]:
        """Number and name of the TCP ports it declares."""
        return [
            (port["containerPort"], _text(port.get("name")))
            for port in _dicts(self.container.get("ports"))
            if isinstance(port.get("containerPort"), int)
            and 0 < port["containerPort"] < 65536
            and _text(port.get("protocol")) in ("", "TCP")
        ]


def _environment(container: Mapping[str, Any]) -> Mapping[str, str]:
    return {
        _text(item.get("name")): item["value"]
        for item in _dicts(container.get("env"))
        if isinstance(item.get("value"), str)
    }


def _annotated(pod: _Raw, engines: list[_Found]) -> _Found | None:
    """The engine that the pod's port annotation is about: there is one annotation and perhaps several engines."""
    if len(engines) == 1:
        return engines[0]
    port = pod.annotation(PORT_ANNOTATIONS)
    declaring = [one for one in engines if any(str(number) == port for number, _ in one.ports)]
    listening = [one for one in declaring if str(one.args.port or DEFAULT_PORT) == port]
    return next(iter(listening or declaring), None)


def _apart(engines: list[Engine]) -> list[Engine]:
    """The same engines, each page with one only: a page says nothing of who else was thought to serve it."""
    taken: set[str] = set()
    result = []
    for engine in engines:
        targets = tuple(target for target in engine.targets if target.name not in taken)
        if len(targets) < len(engine.targets):
            engine = replace(
                engine, target=next(iter(targets), None), ranks=targets[1:], refusal=engine.refusal or SAME_ADDRESS
            )
        taken |= {target.name for target in targets}
        result.append(engine)
    return result


def _engine(pod: _Raw, found: _Found, status: Mapping[str, Any], policy: Policy, annotated: bool) -> Engine:
    args = found.args
    target, refusal = None, None
    ranks: tuple[Target, ...] = ()
    if not _has_endpoint(pod, found.argv, args):
        refusal = "no_endpoint"
    elif _text(pod.status.get("phase")) == "Running":
        target, refusal = _target(pod, found, args, policy, annotated)
    if target is not None:
        target = _with_command(target, found)
        ranks, refusal = _ranks(pod, found, args, target)
    return Engine(
        _text(found.container["name"]),
        _hex(status.get("containerID")),
        _reading(pod, found.container, status),
        target,
        refusal,
        ranks,
    )


def _with_command(target: Target, found: _Found) -> Target:
    """Command line and the variables it needs, without what looks like a secret: they end up in recordings."""
    used = {name for part in found.argv for name in _VARIABLE.findall(part)}
    env = {
        name: value
        for name, value in found.env.items()
        if (name in used or name.startswith("VLLM_")) and not redaction.is_secret(name)
    }
    return replace(target, args=tuple(redaction.args(found.argv)), env=env)


def _port_each(args: EngineArgs) -> bool:
    """Whether every data-parallel rank of the node serves a page of its own, on consecutive ports."""
    return args.values.get("data_parallel_multi_port_external_lb") == "True"


def _ranks(pod: _Raw, found: _Found, args: EngineArgs, first: Target) -> tuple[tuple[Target, ...], str | None]:
    """The pages after the first, and why some are missing."""
    if not _port_each(args):
        return (), None
    count = args.integer("data_parallel_size_local")
    if count is None and not {"data_parallel_size_local", "nnodes", "data_parallel_start_rank"} & args.explicit:
        count = args.data_parallel_size  # all ranks are here
    if count is None:
        return (), "ranks_not_known"
    ports = [first.port + rank for rank in range(1, min(count, MAX_RANKS)) if first.port + rank < 65536]
    if pod.spec.get("hostNetwork") is not True:
        return tuple(replace(first, port=port) for port in ports), None
    declared = {number for number, _ in found.ports} - _NODE_PORTS
    refusal = None if declared.issuperset(ports) else "port_not_declared"
    return tuple(replace(first, port=port) for port in ports if port in declared), refusal


def _target(
    pod: _Raw, found: _Found, args: EngineArgs, policy: Policy, annotated: bool
) -> tuple[Target | None, str | None]:
    try:
        host = str(ipaddress.ip_address(_text(pod.status.get("podIP"))))
    except ValueError:
        return None, "no_pod_ip"
    port, refusal = _port(pod, found, args, annotated and not _port_each(args))
    path = pod.annotation(PATH_ANNOTATIONS) or DEFAULT_PATH
    if port is None:
        return None, refusal
    if not _PATH.fullmatch(path) or ".." in path or len(path) > MAX_PATH_CHARS:
        return None, "bad_path"
    https = pod.annotation(SCHEME_ANNOTATIONS) == "https" or "ssl_keyfile" in args.explicit
    try:
        return Target(
            host,
            port,
            path,
            "https" if https else "http",
            namespace=pod.namespace,
            pod=pod.name,
            container=_text(found.container["name"]),
            verify=policy.verify_tls or not https,
            version=_version(_text(found.container.get("image"))),
        ), None
    except TargetError:
        return None, "bad_path"


def _version(image: str) -> str | None:
    """Version of vLLM out of the tag of an image that is named after it; its log tells better."""
    found = re.search(r"vllm[\w.-]*:v?(\d{1,3}\.\d{1,3}\.\d{1,3}(?:[.+-]?(?:rc|post|dev)\d+)?)(?=[+@_-]|$)", image)
    return found[1] if found else None


def _port(pod: _Raw, found: _Found, args: EngineArgs, annotated_here: bool) -> tuple[int | None, str | None]:
    """The annotated port if declared, the command line's, a declared one by name or number, else vLLM's default."""
    declared = found.ports
    numbers = [number for number, _ in declared]
    on_host = pod.spec.get("hostNetwork") is True
    annotated = pod.annotation(PORT_ANNOTATIONS) if annotated_here else ""
    by_name = {name: number for number, name in reversed(declared)}
    choices = [
        next((number for number in numbers if str(number) == annotated), None),
        args.port if args.port in numbers or not on_host else None,
        DEFAULT_PORT if DEFAULT_PORT in numbers else None,
        *(by_name.get(name) for name in _PORT_NAMES),
        *numbers[:1],
        None if on_host else DEFAULT_PORT,
    ]
    port = next((choice for choice in choices if choice is not None), None)
    if port is None:
        return None, "port_not_declared"
    return (None, "port_of_the_node") if on_host and port in _NODE_PORTS else (port, None)


def _reading(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerReading:
    limits = _limits(container)
    restarts, ready = status.get("restartCount"), status.get("ready")
    memory = quantity(limits.get("memory"))
    return ContainerReading(
        pod.namespace,
        pod.name,
        _text(container["name"]),
        restarts=restarts if isinstance(restarts, int) and not isinstance(restarts, bool) and restarts >= 0 else None,
        ready=ready if isinstance(ready, bool) else None,
        last_termination=_termination(pod, status),
        cpu_limit_cores=quantity(limits.get("cpu")),
        memory_limit_bytes=None if memory is None else int(memory),
    )


def _termination(pod: _Raw, status: Mapping[str, Any]) -> Termination | None:
    """How the container ended last: its present end, else the one before, else the pod's eviction."""
    for part in ("state", "lastState"):
        ended = _dict(_dict(status.get(part)).get("terminated"))
        if ended:
            code = ended.get("exitCode")
            return Termination(
                _text(ended.get("reason")) or None,
                code if isinstance(code, int) else None,
                _time(ended.get("finishedAt")),
            )
    reason = _text(pod.status.get("reason"))
    return Termination(reason) if _text(pod.status.get("phase")) == "Failed" and reason else None


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return _dict(_dict(container.get("resources")).get("limits"))


# --- values -------------------------------------------------------------------------------------------------

_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE](-?\d{1,2}))?")
_SCALE: Final = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}


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
