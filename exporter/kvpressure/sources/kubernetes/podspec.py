"""Reads a pod's JSON: its engines, their metrics endpoints, the state of their containers. Pure.

Whoever may create pods wrote it, so nothing in it is trusted: a target's host is always ``status.podIP``; its port is
declared by the container or in its command line (on the host's network only declared ports, and none of the node's
own); its path is checked. Wrong types count as missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from typing import Any, Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import CUT, Command, Host, bounded
from kvpressure.engines.registry import default, dialects, public_environment
from kvpressure.model import ceilings
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.readings import ALERT_REACHES, ContainerReading, Termination
from kvpressure.sources.kubernetes import endpoint
from kvpressure.sources.kubernetes.discovery import (
    NAMED,
    OF_ARGUMENTS,
    OF_COMMAND,
    OF_IMAGE,
    OF_SELECTOR,
    ContainerRow,
    PodGroup,
    group_of,
    named_after,
    reason_of,
)
from kvpressure.sources.kubernetes.pod import UID, EngineContainer, Pod
from kvpressure.sources.scrape.targets import MAX_PATH_CHARS, Target, TargetError

MAX_CONTAINERS: Final = 64  # of one pod
MAX_COMMAND_CHARACTERS: Final = 16384  # of the command lines of one pod, and of the variables of each container
"""Command line and script of one pod, characters. Beyond: cut; limits then count as unknown.
Shown as: `source_errors_total{source="pods",reason="command_cut"}`.
"""
MAX_KEPT_CHARACTERS: Final = 8 * 1024 * 1024  # of parsed command lines of all pods, cached
MAX_RANKS: Final = 64  # of one container, each on its own port; a node has at most 16 GPUs

PORT_ANNOTATIONS: Final = tuple(prefix + "port" for prefix in endpoint.PREFIXES)
SCRAPE_ANNOTATION: Final = "kvpressure.io/scrape"  # "false" leaves the pod alone
ALERTS_KEY: Final = "kvpressure.io/alerts"  # annotation or label: "off" or "ticket", how far its alerts may go
CONTAINER_ANNOTATION: Final = "kvpressure.io/container"  # names the engine, where its command does not

SAME_ADDRESS: Final = "same_address"
OTHER_PROGRAM: Final = "other_program"
TOO_MANY_RANKS: Final = "too_many_ranks"
CONTAINER_MISSING: Final = "annotated_container_missing"
REFUSALS: Final = (
    "no_pod_ip",
    *endpoint.REFUSALS,
    "bad_path",
    CONTAINER_MISSING,
    SAME_ADDRESS,
    "ranks_not_known",
    TOO_MANY_RANKS,
    OTHER_PROGRAM,
    "no_endpoint",
)
"""Why an engine has no target, or not all of them. ``no_endpoint`` is normal: a worker of an engine that is served
elsewhere. ``same_address``: another engine has the address. ``ranks_not_known``: each data-parallel rank has its own
port, and their number is not visible. ``too_many_ranks``: it is above ``MAX_RANKS``. ``other_program``: see
``Pod.others``. ``annotated_container_missing``: ``kvpressure.io/container`` names no container of the pod.
"""

_PATH: Final = re.compile(r"/[A-Za-z0-9._~/-]*")
_CONTAINER_ID: Final = re.compile(r"[a-z0-9.-]+://([0-9a-f]{8,128})")
_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Policy:
    """``selected``: a label selector of the user names these pods, so one engine may be assumed in each.
    ``verify_tls``: check the certificates of https endpoints. ``template``: the pod does not run, so addresses are
    meaningless and every engine counts.
    """

    selected: bool = False
    verify_tls: bool = True
    template: bool = False


class _CommandLine:
    """Command line of one container; each dialect parses it once, on demand."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], entry_point: bool, characters: int) -> None:
        self.argv = bounded(argv, characters)
        used = {name for part in self.argv for name in _VARIABLE.findall(part)}
        named = {name: value for name, value in env.items() if name in used or name.startswith(_environment_names())}
        self.env = _bounded_env(named)
        self.cut = len(self.env) < len(named) or any(CUT in part for part in self.argv)
        self.characters = sum(map(len, self.argv)) + sum(len(name) + len(value) for name, value in self.env.items())
        self._entry_point = entry_point
        self._likely = [(one, one.names_server(argv)) for one in dialects() if one.may_start(argv, env)]
        self._named = {one.name: named for one, named in self._likely}
        self._read: dict[str, Command] = {}

    def read(self, one: EngineDialect) -> Command:
        """The command line as this engine parses it."""
        if one.name not in self._read:
            named = self._named.get(one.name, False)
            self._read[one.name] = one.read_command(self.argv, self.env, self._entry_point, named)
        return self._read[one.name]

    @cached_property
    def starts(self) -> EngineDialect | None:
        """The engine whose server it certainly starts, or None."""
        return next((one for one, _ in self._likely if self.read(one).starts_server), None)

    @cached_property
    def shown(self) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """Arguments and variables that may be recorded."""
        engine = self.starts or default()
        return engine.public_words(self.read(engine).args) if self.argv else (), public_environment(self.env)


@cache
def _names_of(engines: tuple[EngineDialect, ...]) -> tuple[str, ...]:
    return tuple(beginning for one in engines for beginning in one.environment)


def _environment_names() -> tuple[str, ...]:
    return _names_of(dialects())


def _bounded_env(env: Mapping[str, str]) -> Mapping[str, str]:
    left, kept = MAX_COMMAND_CHARACTERS, {}
    for name, value in env.items():
        if len(name) + len(value) <= left:
            left -= len(name) + len(value)
            kept[name] = value
    return kept


class CommandLines:
    """Cache of parsed command lines by pod, because most changes of a pod are of its status. Not thread-safe."""

    def __init__(self, most_characters: int = MAX_KEPT_CHARACTERS) -> None:
        self._pods: dict[str, tuple[int, list[_CommandLine]]] = {}  # by uid, the last used last
        self._left = most_characters

    def of(
        self, uid: str, containers: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> list[_CommandLine]:
        """The command line of each container. ``fields``: the pod's metadata, to which variables may refer."""
        given = [(tuple(_argv(c)), _environment(c, fields or {}), not _list(c.get("command"))) for c in containers]
        mark = hash(tuple((argv, tuple(env.items()), entry_point) for argv, env, entry_point in given))
        before = self._pods.pop(uid, None)
        if before is not None and before[0] == mark:
            self._pods[uid] = before
            return before[1]
        self._release(before)
        lines, left = [], MAX_COMMAND_CHARACTERS
        for argv, env, entry_point in given:
            lines.append(_CommandLine(argv, env, entry_point, left))
            left = max(0, left - sum(map(len, lines[-1].argv)))
        self._pods[uid] = (mark, lines)
        self._left -= _weight(lines)
        while self._left < 0:
            self._release(self._pods.pop(next(iter(self._pods))))
        return lines

    def forget(self, uid: str) -> None:
        """Remove a pod."""
        self._release(self._pods.pop(uid, None))

    def keep(self, uids: Iterable[str]) -> None:
        """Remove all other pods."""
        for uid in self._pods.keys() - set(uids):
            self.forget(uid)

    def _release(self, pod: tuple[int, list[_CommandLine]] | None) -> None:
        self._left += 0 if pod is None else _weight(pod[1])


def _weight(lines: list[_CommandLine]) -> int:
    return 500 + sum(500 + 2 * line.characters for line in lines)  # read and shown


def bare_pod(document: Mapping[str, Any]) -> Pod | None:
    """Identity and phase alone of the pod of an API object; None without an identity."""
    metadata, status = (_dict(document.get(part)) for part in ("metadata", "status"))
    namespace, name, uid = (_text(metadata.get(part)) for part in ("namespace", "name", "uid"))
    return Pod(namespace, name, uid, _text(status.get("phase"))) if namespace and name and uid else None


def read_pod(document: Mapping[str, Any], policy: Policy, command_lines: CommandLines | None = None) -> Pod | None:
    """The pod of an API object; None without an identity. ``command_lines``: cache."""
    bare = bare_pod(document)
    if bare is None:
        return None
    namespace, name, uid = bare.namespace, bare.name, bare.uid
    metadata, spec, status = (_dict(document.get(part)) for part in ("metadata", "spec", "status"))
    everything = [*_dicts(status.get("containerStatuses")), *_dicts(status.get("initContainerStatuses"))]
    statuses = {_text(item.get("name")): item for item in reversed(everything)}
    ids = {_hex(item.get("containerID")): _text(item.get("name")) for item in everything}
    ids.pop("", None)
    pod = _Raw(namespace, name, uid, _dict(metadata.get("labels")), _dict(metadata.get("annotations")), spec, status)
    everyone = _found(pod, uid, metadata, command_lines or CommandLines())
    found, others = _engine_containers(pod, policy, everyone)
    annotated = _annotated(pod, found)
    engines = [
        _engine(pod, one, statuses.get(_text(one.container.get("name")), {}), policy, one is annotated) for one in found
    ]
    group = group_of(namespace, pod.labels)
    kept = tuple(engines if policy.template else _apart(_serving(group, engines)))
    return Pod(
        namespace,
        name,
        uid,
        _text(status.get("phase")),
        frozenset({uid, _static_uid(pod, ids)} - {""}),
        ids,
        kept,
        tuple(_text(one.container.get("name")) for one in others),
        tuple(_rows(pod, everyone, dict(zip(map(id, found), kept, strict=True)))),
        group,
        tuple(_text(one.container["name"]) for one in everyone if one.line.cut),
    )


def _static_uid(pod: _Raw, ids: Mapping[str, str]) -> str:
    """The uid under which the node knows a static pod, "" for any other pod.

    Anyone may write the annotations. What nobody else can have is a mirror annotation and running containers: the
    kubelet deletes a mirror pod that it did not make. The owner reference to the node is no proof, as such a pod runs.
    """
    mirror = pod.annotation(["kubernetes.io/config.mirror"])
    written = pod.annotation(["kubernetes.io/config.hash"])
    return mirror if ids and mirror == written and re.fullmatch(UID, mirror) else ""


def _serving(group: PodGroup | None, engines: list[EngineContainer]) -> list[EngineContainer]:
    """The pod's engines; that of a group's leader gets the group, whose other pods may have GPUs of it."""
    if group is None or not group.leads or len(engines) != 1 or not engines[0].targets:
        return engines
    first, *ranks = (replace(target, group=group.name) for target in engines[0].targets)
    return [replace(engines[0], target=first, ranks=tuple(ranks))]


@dataclass(frozen=True, slots=True)
class _Raw:
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, Any]
    annotations: Mapping[str, Any]
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    def annotation(self, names: Iterable[str]) -> str:
        return next((text for name in names if (text := _text(self.annotations.get(name)).strip())), "")


# --- which containers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A container and its command line."""

    container: Mapping[str, Any]
    line: _CommandLine

    @property
    def engine(self) -> EngineDialect | None:
        """The engine named by the command line, else by the image; None without one."""
        return self.line.starts or self.of_image

    @property
    def of_image(self) -> EngineDialect | None:
        """The engine that the image is named after; None without one."""
        name = self.image
        return next((one for one in dialects() if one.of_image(name)), None)

    @property
    def image(self) -> str:
        """The image in lower case, without digest."""
        path, name, tag = _image(self.container)
        return f"{path}{name}:{tag}".lower()

    @property
    def host(self) -> Host | None:
        """The program around the engine that publishes its metrics; None without one."""
        return self.dialect.host(self.image, self.line.argv, self.line.env, self.args)

    @property
    def dialect(self) -> EngineDialect:
        """The engine, else the default one."""
        return self.engine or default()

    @property
    def args(self) -> EngineArgs:
        """Its parsed arguments."""
        return self.line.read(self.dialect).args

    @property
    def ports(self) -> list[tuple[int, str]]:
        """(number, name) of the declared TCP ports."""
        return [
            (port["containerPort"], _text(port.get("name")))
            for port in _dicts(self.container.get("ports"))
            if isinstance(port.get("containerPort"), int)
            and 0 < port["containerPort"] < 65536
            and _text(port.get("protocol")) in ("", "TCP")
        ]


def _found(pod: _Raw, uid: str, metadata: Mapping[str, Any], command_lines: CommandLines) -> list[_Candidate]:
    if _opted_out(pod):
        return []
    containers = _containers(pod)[:MAX_CONTAINERS]
    lines = command_lines.of(uid, containers, metadata)
    return [_Candidate(container, line) for container, line in zip(containers, lines, strict=True)]


def _opted_out(pod: _Raw) -> bool:
    return _text(pod.annotations.get(SCRAPE_ANNOTATION)).lower() == "false"


def _engine_containers(
    pod: _Raw, policy: Policy, containers: list[_Candidate]
) -> tuple[list[_Candidate], list[_Candidate]]:
    """The engines, and the containers of an engine's image that run another program."""
    named = _named(pod)
    if named:
        return [c for c in containers if c.container["name"] == named], []
    # Sidecars and clients are named after an engine too, so a command that starts a server takes precedence.
    certain = [c for c in containers if _starts_engine(c)]
    if certain:
        return certain, []
    images = [c for c in containers if c.of_image is not None]
    likely = [c for c in images if not c.line.read(c.dialect).other_program]
    engines = [c for c in likely if (policy.template or _has_gpu(c.container)) and _may_serve(pod, c)]
    if not engines and policy.selected:
        engines = [c for c in containers if _has_gpu(c.container)] or (containers if len(containers) == 1 else [])
    return engines, [c for c in _with_gpu(images) if c not in likely and c not in engines]


ENDING: Final = ("Never", "OnFailure")
"""Restart policies of pods whose work ends, such as a Job's."""


def _may_serve(pod: _Raw, found: _Candidate) -> bool:
    """Whether a container recognised by its image alone may be a server: it is always restarted, keeps the image's
    program, has a port or a probe, or belongs to a group (whose workers have neither). A script has none of these.
    """
    probes = (_dict(found.container.get(name)) for name in ("readinessProbe", "livenessProbe", "startupProbe"))
    return (
        _text(pod.spec.get("restartPolicy")) not in ENDING
        or not _list(found.container.get("command"))
        or bool(found.ports)
        or any(probe.keys() & {"httpGet", "tcpSocket", "grpc"} for probe in probes)
        or "port" in found.args.explicit
        or bool(pod.annotation(PORT_ANNOTATIONS))
        or group_of(pod.namespace, pod.labels) is not None
        or "ray" in found.line.argv
    )


def _named(pod: _Raw) -> str:
    return endpoint.annotation(pod.annotations, CONTAINER_ANNOTATION)


def _sign(pod: _Raw, found: _Candidate) -> str:
    """The sign by which an engine was recognised."""
    if _named(pod):
        return NAMED
    if found.line.starts is not None:
        return OF_COMMAND
    if _starts_engine(found):
        return OF_ARGUMENTS
    return OF_IMAGE if found.of_image is not None else OF_SELECTOR


def _rows(pod: _Raw, containers: list[_Candidate], engines: Mapping[int, EngineContainer]) -> Iterable[ContainerRow]:
    """A row for every container with a GPU or that looks like an inference server."""
    named = _named(pod)
    if _opted_out(pod):
        for container in _containers(pod)[:MAX_CONTAINERS]:
            if _has_gpu(container):
                yield ContainerRow(_text(container["name"]), "opted_out", gpus=_gpus(container))
        return
    if named and not any(c.container["name"] == named for c in containers):
        yield ContainerRow(named[:253], CONTAINER_MISSING)
    worker = (group := group_of(pod.namespace, pod.labels)) is not None and not group.leads
    for found in containers:
        name, gpus = _text(found.container["name"]), _gpus(found.container)
        engine = engines.get(id(found))
        if engine is not None:
            args = found.args
            port_unknown = "port" in args.explicit and args.port is None
            complete = args.complete and not port_unknown and None not in args.values.values()
            yield ContainerRow(
                name, engine.refusal or "", _sign(pod, found), engine.target, complete, gpus, len(engine.ranks)
            )
            continue
        image = _text(found.container.get("image")).lower()
        named_engine, other = found.engine is not None, named_after(image)
        if not (_has_gpu(found.container) or named_engine or other):
            continue
        runs_other = found.line.read(found.dialect).other_program
        reason = reason_of(bool(named), named_engine, runs_other, _has_gpu(found.container), worker, other)
        if reason == "other_container" and not engines:
            reason = "not_serving"  # nothing else in the pod serves
        yield ContainerRow(name, reason, gpus=gpus)


def _containers(pod: _Raw) -> list[Mapping[str, Any]]:
    """Long-running containers of a pod: containers, and restarted init containers (native sidecars)."""
    sidecars = [c for c in _dicts(pod.spec.get("initContainers")) if c.get("restartPolicy") == "Always"]
    return [c for c in (*_dicts(pod.spec.get("containers")), *sidecars) if _text(c.get("name"))]


def _starts_engine(found: _Candidate) -> bool:
    """Whether the container certainly starts an engine's server: by name, or by its arguments for the image's entry
    point.
    """
    if found.line.starts is not None:
        return True
    if _list(found.container.get("command")) or found.of_image is None:
        return False
    return found.of_image.takes_words(found.line.argv, found.args)


def _image(container: Mapping[str, Any]) -> tuple[str, str, str]:
    """Path (with its slash), name and tag of the image."""
    path, slash, last = _text(container.get("image")).partition("@")[0].rpartition("/")
    name, _, tag = last.partition(":")
    return path + slash, name, tag


def _with_gpu(containers: list[_Candidate]) -> list[_Candidate]:
    """The containers with a GPU; all if none has one."""
    return [c for c in containers if _has_gpu(c.container)] or containers


def _has_gpu(container: Mapping[str, Any]) -> bool:
    return any(_gpus(container).values())


def _gpus(container: Mapping[str, Any]) -> Mapping[str, int]:
    """GPUs that a container requests, by resource. Each claim counts as one, because its number of devices is not in
    the pod.
    """
    asked = {
        name: int(quantity(value) or 0)
        for name, value in list(_limits(container).items())[:64]
        if isinstance(name, str) and ("gpu" in name or "/mig-" in name)
    }
    claims = len(_list(_dict(container.get("resources")).get("claims")))
    return {**asked, "claims": claims} if claims else asked


def _argv(container: Mapping[str, Any]) -> list[str]:
    parts = [*_list(container.get("command")), *_list(container.get("args"))]
    return [part for part in parts if isinstance(part, str)]


def _has_endpoint(pod: _Raw, found: _Candidate) -> bool:
    """Whether a container serves metrics; workers of an engine that spans pods (headless ranks, Ray, LeaderWorkerSet)
    do not.
    """
    argv = found.line.argv
    if _named(pod) or endpoint.annotation(pod.annotations, endpoint.EXPLICIT + "port"):
        return True
    serves = found.dialect.endpoints(found.args).serves
    if serves is False:
        return False
    if serves and (found.line.starts is not None or ((host := found.host) is not None and host.every_pod)):
        return True
    worker = _text(pod.labels.get("ray.io/node-type")) == "worker" or _text(
        pod.labels.get("leaderworkerset.sigs.k8s.io/worker-index")
    ) not in ("", "0")
    ray_worker = "ray" in argv and "start" in argv and "--head" not in argv
    return not (worker or ray_worker)


# --- one engine ---------------------------------------------------------------------------------------------


def _environment(container: Mapping[str, Any], metadata: Mapping[str, Any]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for item in _dicts(container.get("env")):
        value = item.get("value") if "value" in item else _field(item, metadata)
        if isinstance(value, str):
            found[_text(item.get("name"))] = value
    return found


_FIELD: Final = re.compile(r"metadata\.(name|namespace|uid|(labels|annotations)\['([^']{1,317})'\])")


def _field(variable: Mapping[str, Any], metadata: Mapping[str, Any]) -> object:
    """Value of a variable from the pod's own metadata (downward API); None when it comes from elsewhere."""
    path = _text(_dict(_dict(variable.get("valueFrom")).get("fieldRef")).get("fieldPath"))
    found = _FIELD.fullmatch(path)
    if found is None:
        return None
    return _dict(metadata.get(found[2])).get(found[3]) if found[2] else metadata.get(found[1])


def _annotated(pod: _Raw, engines: list[_Candidate]) -> _Candidate | None:
    """The engine that the pod's only port annotation is about, of possibly several."""
    if len(engines) == 1:
        return engines[0]
    explicit = bool(endpoint.annotation(pod.annotations, endpoint.EXPLICIT + "port"))
    port = pod.annotation(PORT_ANNOTATIONS)
    declaring = [one for one in engines if any(str(number) == port for number, _ in one.ports)]
    listening = [one for one in declaring if str(one.args.port or one.dialect.default_port) == port]
    return next(iter(listening or declaring or (engines if explicit else [])), None)


def _apart(engines: list[EngineContainer]) -> list[EngineContainer]:
    """The same engines, each endpoint with only one of them."""
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


def _engine(
    pod: _Raw, found: _Candidate, status: Mapping[str, Any], policy: Policy, annotated: bool
) -> EngineContainer:
    args = found.args
    target, refusal = None, None
    ranks: tuple[Target, ...] = ()
    if not _has_endpoint(pod, found):
        refusal = "no_endpoint"
    elif _text(pod.status.get("phase")) == "Running":
        target, refusal = _target(pod, found, args, policy, annotated)
    if target is not None:
        words, env = found.line.shown
        target = replace(target, args=words, env=env)
        ranks, refusal = _ranks(pod, found, target)
    return EngineContainer(
        _text(found.container["name"]),
        _hex(status.get("containerID")),
        _reading(pod, found.container, status),
        target,
        refusal,
        ranks,
        found.engine.name if found.engine is not None else "",
    )


def _ranks(pod: _Raw, found: _Candidate, first: Target) -> tuple[tuple[Target, ...], str | None]:
    """The endpoints after the first, and why some are missing."""
    endpoints = found.dialect.endpoints(found.args)
    if not endpoints.port_each:
        return (), None if endpoints.metrics or found.host is not None else endpoint.METRICS_OFF
    count = endpoints.ranks
    if count is None:
        return (), "ranks_not_known"
    ports = [first.port + rank for rank in range(1, min(count, MAX_RANKS)) if first.port + rank < 65536]
    refusal = TOO_MANY_RANKS if count > MAX_RANKS else None
    if pod.spec.get("hostNetwork") is not True:
        return tuple(replace(first, port=port) for port in ports), refusal
    declared = {number for number, _ in found.ports} - endpoint.NODE_PORTS
    refusal = refusal if declared.issuperset(ports) else "port_not_declared"
    return tuple(replace(first, port=port) for port in ports if port in declared), refusal


def _target(
    pod: _Raw, found: _Candidate, args: EngineArgs, policy: Policy, annotated: bool
) -> tuple[Target | None, str | None]:
    try:
        address = str(ipaddress.ip_address(_text(pod.status.get("podIP"))))
    except ValueError:
        return None, "no_pod_ip"
    annotations = pod.annotations if annotated and not found.dialect.endpoints(args).port_each else _without_ports(pod)
    port, refusal = endpoint.port(_server(pod, found, args, policy), annotations)
    if port is None:
        return None, refusal
    host = found.host
    path = endpoint.path(pod.annotations, port, (host.path if host is not None else "") or found.dialect.default_path)
    if not _PATH.fullmatch(path) or ".." in path or len(path) > MAX_PATH_CHARS:
        return None, "bad_path"
    https = endpoint.scheme(pod.annotations, port) == "https" or "ssl_keyfile" in args.explicit
    try:
        return Target(
            address,
            port,
            path,
            "https" if https else "http",
            namespace=pod.namespace,
            pod=pod.name,
            container=_text(found.container["name"]),
            verify=policy.verify_tls or not https,
            version=None if found.of_image is None else found.of_image.image_version(*_image(found.container)[1:]),
            dialect=found.engine.name if found.engine is not None else "",
            uid=pod.uid,
        ), None
    except TargetError:
        return None, "bad_path"


def _without_ports(pod: _Raw) -> Mapping[str, Any]:
    return {name: value for name, value in pod.annotations.items() if name not in PORT_ANNOTATIONS}


def _server(pod: _Raw, found: _Candidate, args: EngineArgs, policy: Policy) -> endpoint.ServerPort:
    """What the pod shows about the server's port."""
    host = found.host
    return endpoint.ServerPort(
        found.ports,
        host.port if host is not None and host.asked else args.port,
        "port" in args.explicit and args.port is None and not policy.template,
        found.dialect.default_port if host is None else _port_of(host, found),
        found.dialect.port_names,
        pod.spec.get("hostNetwork") is True,
        "uds" in args.explicit and not policy.template,
    )


def _port_of(host: Host, found: _Candidate) -> int | None:
    named = (number for number, name in found.ports if name == host.port_name)
    return next(named, None) if host.port is None and host.port_name else host.port


def _reading(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerReading:
    limits = _limits(container)
    ready = status.get("ready")
    memory = quantity(limits.get("memory"))
    return ContainerReading(
        pod.namespace,
        pod.name,
        _text(container["name"]),
        restarts=ceilings.whole(status.get("restartCount"), ceilings.COUNT),
        ready=ready if isinstance(ready, bool) else None,
        last_termination=_termination(pod, status),
        cpu_limit_cores=quantity(limits.get("cpu")),
        memory_limit_bytes=None if memory is None else int(memory),
        alerts=_alerts(pod),
    )


def _alerts(pod: _Raw) -> str | None:
    """Highest alert level by the pod's annotation or label; None without a valid one."""
    text = pod.annotation((ALERTS_KEY,)) or _text(pod.labels.get(ALERTS_KEY)).strip()
    return text if text in ALERT_REACHES else None


def _termination(pod: _Raw, status: Mapping[str, Any]) -> Termination | None:
    """The container's last termination: the current one, else the previous, else the pod's eviction."""
    for part in ("state", "lastState"):
        ended = _dict(_dict(status.get(part)).get("terminated"))
        if ended:
            return Termination(
                _text(ended.get("reason")) or None,
                ceilings.whole(ended.get("exitCode"), ceilings.IDENTIFIER, -ceilings.IDENTIFIER),
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
    """A Kubernetes quantity (``500m``, ``64Gi``, ``1e9``, 4) as a number; None when invalid or negative."""
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
