"""Reads a pod's JSON: its engines, their metrics endpoints, the state of their containers. Pure.

Whoever may create pods wrote it, so nothing in it is trusted: a target's host is always ``status.podIP``; its port is
declared by the container or in its command line (on the host's network only declared ports, and none of the node's
own); its path is checked. Wrong types count as missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import Command, Host
from kvpressure.engines.registry import default, dialects
from kvpressure.errors import InputError
from kvpressure.model import ceilings
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.pools import EnginePool, Workload, pool_of
from kvpressure.model.readings import ALERT_REACHES, ContainerReading, Run, Termination
from kvpressure.parsed import items, mapping, mappings, moment, quantity, text
from kvpressure.sources.kubernetes import endpoint
from kvpressure.sources.kubernetes.command_lines import CommandLine, CommandLines
from kvpressure.sources.kubernetes.device_ids import is_accelerator
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
    workload_of,
)
from kvpressure.sources.kubernetes.pod import ENDED_PHASES, UID, EngineContainer, Pod
from kvpressure.sources.kvevents.addresses import EventsEndpoint, endpoint_of
from kvpressure.sources.scrape.targets import Target

MAX_CONTAINERS: Final = 64  # of one pod
MAX_RANKS: Final = 64  # of one container, each on its own port; a node has at most 16 GPUs

PORT_ANNOTATIONS: Final = tuple(prefix + "port" for prefix in endpoint.PREFIXES)
ALERTS_KEY: Final = "kvpressure.io/alerts"  # annotation or label: "off" or "ticket", how far its alerts may go

SAME_ADDRESS: Final = "same_address"
REFUSALS: Final = (
    "no_pod_ip",
    *endpoint.REFUSALS,
    "bad_path",
    "annotated_container_missing",
    SAME_ADDRESS,
    "ranks_not_known",
    "too_many_ranks",
    "no_endpoint",
)
"""Why an engine has no target, or not all of them. ``no_endpoint`` is normal: a worker of an engine that is served
elsewhere. ``same_address``: another engine has the address. ``ranks_not_known``: each data-parallel rank has its own
port, and their number is not visible. ``too_many_ranks``: it is above ``MAX_RANKS``.
``annotated_container_missing``: ``kvpressure.io/container`` names no container of the pod.
"""

_PATH: Final = re.compile(r"/[A-Za-z0-9._~/-]*")
_CONTAINER_ID: Final = re.compile(r"[a-z0-9.-]+://([0-9a-f]{8,128})")


@dataclass(frozen=True, slots=True)
class Policy:
    """``selected``: a label selector of the user names these pods, so one engine may be assumed in each.
    ``verify_tls``: check the certificates of https endpoints. ``template``: the pod does not run, so addresses are
    meaningless and every engine counts.
    """

    selected: bool = False
    verify_tls: bool = True
    template: bool = False


def bare_pod(document: Mapping[str, Any]) -> Pod | None:
    """Identity and phase alone of the pod of an API object; None without an identity."""
    metadata, status = (mapping(document.get(part)) for part in ("metadata", "status"))
    namespace, name, uid = (text(metadata.get(part)) for part in ("namespace", "name", "uid"))
    return Pod(namespace, name, uid, text(status.get("phase"))) if namespace and name and uid else None


def read_pod(document: Mapping[str, Any], policy: Policy, command_lines: CommandLines | None = None) -> Pod | None:
    """The pod of an API object; None without an identity. ``command_lines``: cache."""
    bare = bare_pod(document)
    if bare is None:
        return None
    metadata, spec, status = (mapping(document.get(part)) for part in ("metadata", "spec", "status"))
    everything = [*mappings(status.get("containerStatuses")), *mappings(status.get("initContainerStatuses"))]
    statuses = {text(item.get("name")): item for item in reversed(everything)}
    ids = {_hex(item.get("containerID")): text(item.get("name")) for item in everything}
    ids.pop("", None)
    pod = _Raw(
        bare,
        mapping(metadata.get("labels")),
        mapping(metadata.get("annotations")),
        spec,
        status,
        workload_of(metadata),
        "deletionTimestamp" in metadata,
    )
    everyone = _found(pod, metadata, command_lines or CommandLines())
    nodes = (one.command.node for one in everyone if one.engine is not None or _has_gpu(one.container))
    node = next((node for node in nodes if node is not None), None)
    group = group_of(bare.name, (text(status.get("podIP")),), pod.labels, node)
    pod = replace(pod, group=group)
    found = _engine_containers(pod, policy, everyone)
    annotated = _annotated(pod, found)
    engines = [
        _engine(pod, one, statuses.get(text(one.container.get("name")), {}), policy, one is annotated) for one in found
    ]
    if group is not None and group.leads and len(engines) == 1:  # its other pods may have GPUs of the engine
        targets = tuple(replace(target, group=group.name) for target in engines[0].targets)
        engines = [replace(engines[0], targets=targets)]
    kept = tuple(engines if policy.template else _apart(engines))
    return replace(
        bare,
        uids=frozenset({bare.uid, _static_uid(pod, ids)} - {""}),
        containers=ids,
        engines=kept,
        rows=tuple(_rows(pod, everyone, dict(zip(map(id, found), kept, strict=True)))),
        group=group,
        cut=tuple(text(one.container["name"]) for one in everyone if one.line.cut),
    )


def _static_uid(pod: _Raw, ids: Mapping[str, str]) -> str:
    """The uid under which the node knows a static pod, "" for any other pod.

    Anyone may write the annotations. What nobody else can have is a mirror annotation and running containers: the
    kubelet deletes a mirror pod that it did not make. The owner reference to the node is no proof, as such a pod runs.
    """
    mirror = pod.annotation(["kubernetes.io/config.mirror"])
    written = pod.annotation(["kubernetes.io/config.hash"])
    return mirror if ids and mirror == written and re.fullmatch(UID, mirror) else ""


@dataclass(frozen=True, slots=True)
class _Raw:
    bare: Pod
    labels: Mapping[str, Any]
    annotations: Mapping[str, Any]
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    workload: Workload
    deleted: bool
    group: PodGroup | None = None

    def annotation(self, names: Iterable[str]) -> str:
        return next(filter(None, (endpoint.annotation(self.annotations, name) for name in names)), "")


# --- which containers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A container and its command line."""

    container: Mapping[str, Any]
    line: CommandLine

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
    def command(self) -> Command:
        """Its parsed command line."""
        return self.line.read(self.dialect)

    @property
    def args(self) -> EngineArgs:
        """Its parsed arguments."""
        return self.command.args

    @property
    def ports(self) -> list[tuple[int, str]]:
        """(number, name) of the declared TCP ports."""
        return [
            (port["containerPort"], text(port.get("name")))
            for port in mappings(self.container.get("ports"))
            if isinstance(port.get("containerPort"), int)
            and 0 < port["containerPort"] < 65536
            and text(port.get("protocol")) in ("", "TCP")
        ]


def _found(pod: _Raw, metadata: Mapping[str, Any], command_lines: CommandLines) -> list[_Candidate]:
    if _opted_out(pod):
        return []
    containers = _containers(pod)[:MAX_CONTAINERS]
    return list(map(_Candidate, containers, command_lines.of(pod.bare.uid, containers, metadata)))


def _opted_out(pod: _Raw) -> bool:
    """Whether it is left alone."""
    return text(pod.annotations.get("kvpressure.io/scrape")).lower() == "false"


def _engine_containers(pod: _Raw, policy: Policy, containers: list[_Candidate]) -> list[_Candidate]:
    named = _named(pod)
    if named:
        return [c for c in containers if c.container["name"] == named]
    # Sidecars and clients are named after an engine too, so a command that starts a server takes precedence.
    certain = [c for c in containers if _starts_engine(c)]
    if certain:
        return certain
    likely = [c for c in containers if c.engine is not None and (policy.template or _has_gpu(c.container))]
    if not likely and policy.selected:
        return [c for c in containers if _has_gpu(c.container)] or (containers if len(containers) == 1 else [])
    return likely


def _named(pod: _Raw) -> str:
    """The container that an annotation calls the engine, where its command does not; "" = none."""
    return endpoint.annotation(pod.annotations, "kvpressure.io/container")


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
                yield ContainerRow(text(container["name"]), "opted_out", gpus=_gpus(container))
        return
    if named and not any(c.container["name"] == named for c in containers):
        yield ContainerRow(named[:253], "annotated_container_missing")
    worker = pod.group is not None and not pod.group.leads
    for found in containers:
        name, gpus = text(found.container["name"]), _gpus(found.container)
        engine = engines.get(id(found))
        if engine is not None:
            args = found.args
            port_unknown = "port" in args.explicit and args.port is None
            complete = args.complete and not port_unknown and None not in args.values.values()
            role, public = _pool(pod, found).role, found.dialect.public_arguments(args.values)
            yield ContainerRow(
                name, engine.refusal or "", _sign(pod, found), engine.target, complete, gpus, role, public
            )
            continue
        image = text(found.container.get("image")).lower()
        named_engine, other = found.engine is not None, named_after(image)
        if not (_has_gpu(found.container) or named_engine or other):
            continue
        reason = reason_of(bool(named), named_engine, _has_gpu(found.container), worker, other)
        yield ContainerRow(name, reason, gpus=gpus)


def _containers(pod: _Raw) -> list[Mapping[str, Any]]:
    """Long-running containers of a pod: containers, and restarted init containers (native sidecars)."""
    sidecars = [c for c in mappings(pod.spec.get("initContainers")) if c.get("restartPolicy") == "Always"]
    return [c for c in (*mappings(pod.spec.get("containers")), *sidecars) if text(c.get("name"))]


def _starts_engine(found: _Candidate) -> bool:
    """Whether the container certainly starts an engine's server: by name, or by its arguments for the image's entry
    point.
    """
    if found.line.starts is not None and found.command.certain:
        return True
    if items(found.container.get("command")) or found.of_image is None:
        return False
    return found.of_image.takes_words(found.line.argv, found.args)


def _image(container: Mapping[str, Any]) -> tuple[str, str, str]:
    """Path (with its slash), name and tag of the image."""
    path, slash, last = text(container.get("image")).partition("@")[0].rpartition("/")
    name, _, tag = last.partition(":")
    return path + slash, name, tag


def _has_gpu(container: Mapping[str, Any]) -> bool:
    return any(_gpus(container).values())


def _gpus(container: Mapping[str, Any]) -> Mapping[str, int]:
    """Accelerators that a container requests, by resource: devices, or shares in the resource's own unit. Each claim
    counts as one, because its number of devices is not in the pod.
    """
    asked = {
        name: int(quantity(value) or 0)
        for name, value in list(_limits(container).items())[:64]
        if isinstance(name, str) and is_accelerator(name)
    }
    claims = len(items(mapping(container.get("resources")).get("claims")))
    return {**asked, "claims": claims} if claims else asked


def _has_endpoint(pod: _Raw, found: _Candidate) -> bool:
    """Whether a container serves metrics; followers in an engine of several pods do not, unless they certainly start a
    server of their own.
    """
    if _named(pod) or endpoint.annotation(pod.annotations, endpoint.EXPLICIT + "port"):
        return True
    serves, host = found.dialect.endpoints(found.args).serves, found.host
    if serves and (found.command.certain or (host is not None and host.every_pod)):
        return True
    return serves is not False and (pod.group is None or pod.group.leads)


# --- one engine ---------------------------------------------------------------------------------------------


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
            engine = replace(engine, targets=targets, refusal=engine.refusal or SAME_ADDRESS)
        taken |= {target.name for target in targets}
        result.append(engine)
    return result


def _engine(
    pod: _Raw, found: _Candidate, status: Mapping[str, Any], policy: Policy, annotated: bool
) -> EngineContainer:
    targets: tuple[Target, ...] = ()
    serves = _has_endpoint(pod, found)
    refusal: str | None = None
    if not serves:
        refusal = "no_endpoint"
    elif pod.bare.phase == "Running":
        first, refusal = _target(pod, found, status, policy, annotated)
        if first is not None:
            targets, refusal = _ranks(pod, found, first)
            targets += tuple(_further(found, first))
    assumed = all(target.assumed for target in targets) if targets else not _is_named(pod, found)
    run = replace(_run(pod, found.container, status), assumed=assumed) if serves else None
    return EngineContainer(
        text(found.container["name"]),
        _hex(status.get("containerID")),
        replace(_reading(pod, found.container, status), pool=_pool(pod, found), run=run),
        targets,
        refusal,
        found.engine.name if found.engine is not None else "",
        bool(targets) and pod.spec.get("hostNetwork") is not True and not _is_certain(pod, found, targets[0].port),
    )


def _further(found: _Candidate, first: Target) -> Iterable[Target]:
    """The endpoints of the further servers that one script starts."""
    for args in found.command.others:
        port = found.dialect.default_port if args.is_explicit("port") is False else args.port
        if port is not None:
            yield replace(first, port=port, args=found.dialect.public_words(args), assumed=True)


def _ranks(pod: _Raw, found: _Candidate, first: Target) -> tuple[tuple[Target, ...], str | None]:
    """All endpoints, and why some are missing."""
    endpoints = found.dialect.endpoints(found.args)
    if not endpoints.port_each:
        return (first,), None if endpoints.metrics or found.host is not None else endpoint.METRICS_OFF
    if endpoints.ranks is None:
        return (first,), "ranks_not_known"
    last = first.port + min(endpoints.ranks, MAX_RANKS)
    ports = set(range(first.port + 1, min(last, 65536)))
    refusal = "too_many_ranks" if endpoints.ranks > MAX_RANKS else None
    if pod.spec.get("hostNetwork") is True:
        declared = ports.intersection(number for number, _ in found.ports) - endpoint.NODE_PORTS
        ports, refusal = declared, refusal if declared == ports else "port_not_declared"
    return (first, *(replace(first, port=port) for port in sorted(ports))), refusal


def _target(
    pod: _Raw, found: _Candidate, status: Mapping[str, Any], policy: Policy, annotated: bool
) -> tuple[Target | None, str | None]:
    args, (words, env) = found.args, found.line.shown
    try:
        address = str(ipaddress.ip_address(text(pod.status.get("podIP"))))
    except ValueError:
        return None, "no_pod_ip"
    annotations = dict(pod.annotations)
    if not annotated or found.dialect.endpoints(args).port_each:
        annotations = {name: value for name, value in annotations.items() if name not in PORT_ANNOTATIONS}
    port, refusal = endpoint.port(_server(pod, found, args, policy), annotations)
    if port is None:
        return None, refusal
    host = found.host
    usual = (host.path if host is not None else "") or found.dialect.default_path
    path = endpoint.beside_port(pod.annotations, "path", port) or usual
    if not _PATH.fullmatch(path):
        return None, "bad_path"
    https = endpoint.beside_port(pod.annotations, "scheme", port) == "https" or "ssl_keyfile" in args.explicit
    try:
        return Target(
            address,
            port,
            path,
            "https" if https else "http",
            namespace=pod.bare.namespace,
            pod=pod.bare.name,
            container=text(found.container["name"]),
            args=words,
            env=env,
            verify=policy.verify_tls or not https,
            version=None if found.of_image is None else found.of_image.image_version(*_image(found.container)[1:]),
            dialect=found.engine.name if found.engine is not None else "",
            uid=pod.bare.uid,
            pool=_pool(pod, found),
            assumed=not _is_certain(pod, found, port) and _run(pod, found.container, status).answered is None,
            kv_events=_kv_events(pod, found),
        ), None
    except InputError:
        return None, "bad_path"


def _is_named(pod: _Raw, found: _Candidate) -> bool:
    """Whether more than an image or a text says that the container serves: an annotation, or words that were
    understood, unless it may be the follower of another node whose command is the same.
    """
    explicit = _named(pod) or endpoint.annotation(pod.annotations, endpoint.EXPLICIT + "port")
    leads = pod.group is not None or found.dialect.endpoints(found.args).serves is not None
    return bool(explicit) or (leads and (found.command.certain or _sign(pod, found) == OF_ARGUMENTS))


def _is_certain(pod: _Raw, found: _Candidate, port: int) -> bool:
    """Whether the container certainly serves there: not at a default port behind words that are not visible."""
    seen = found.args.complete or port in (found.args.port, *(number for number, _ in found.ports))
    explicit = str(port) == endpoint.annotation(pod.annotations, endpoint.EXPLICIT + "port")
    return _is_named(pod, found) and (seen or explicit or found.host is not None)


def _pool(pod: _Raw, found: _Candidate) -> EnginePool:
    return pool_of(pod.bare.name, pod.workload, found.dialect.features(found.args, None, ()).kv_role)


def _kv_events(pod: _Raw, found: _Candidate) -> EventsEndpoint | None:
    """Where it publishes KV events; on the node's network only at a port that the pod declares."""
    published = endpoint_of(found.args)
    on_node = pod.spec.get("hostNetwork") is True
    allowed = published is not None and (not on_node or published.events[1] in {number for number, _ in found.ports})
    return published if allowed else None


def _server(pod: _Raw, found: _Candidate, args: EngineArgs, policy: Policy) -> endpoint.ServerPort:
    """What the pod shows about the server's port."""
    host = found.host
    default_port: int | None = found.dialect.default_port
    if host is not None:
        by_name = {name: number for number, name in reversed(found.ports) if name}
        default_port = by_name.get(host.port_name) if host.port is None else host.port
    return endpoint.ServerPort(
        found.ports,
        host.port if host is not None and host.asked else args.port,
        "port" in args.explicit and args.port is None and not policy.template,
        default_port,
        found.dialect.port_names,
        pod.spec.get("hostNetwork") is True,
        None if policy.template or host is not None else endpoint.unreachable(args),
    )


def _reading(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerReading:
    limits = _limits(container)
    ready = status.get("ready")
    memory = quantity(limits.get("memory"))
    reach = pod.annotation((ALERTS_KEY,)) or text(pod.labels.get(ALERTS_KEY)).strip()
    return ContainerReading(
        pod.bare.namespace,
        pod.bare.name,
        text(container["name"]),
        restarts=ceilings.whole(status.get("restartCount"), ceilings.COUNT),
        ready=ready if isinstance(ready, bool) else None,
        last_termination=_termination(pod, status),
        cpu_limit_cores=quantity(limits.get("cpu")),
        memory_limit_bytes=None if memory is None else int(memory),
        alerts=reach if reach in ALERT_REACHES else None,
    )


def _run(pod: _Raw, container: Mapping[str, Any], status: Mapping[str, Any]) -> Run:
    state = mapping(status.get("state"))
    waits, over = (text(mapping(state.get(part)).get("reason")) for part in ("waiting", "terminated"))
    return Run(
        moment(pod.status.get("startTime")),
        _became_ready(pod, state) if mapping(container.get("readinessProbe")) else None,
        waits or over,
        pod.bare.phase if pod.bare.phase in ENDED_PHASES else "deleted" if pod.deleted else "",
        pod.workload.counted,
    )


def _became_ready(pod: _Raw, state: Mapping[str, Any]) -> float | None:
    """When the pod became ready, or ceased to be, if that was in the container's present run: it is unready before its
    first start, and when a run ends, and its condition keeps the time of the last change only.
    """
    ready = next((one for one in mappings(pod.status.get("conditions")) if one.get("type") == "Ready"), {})
    turned, started = moment(ready.get("lastTransitionTime")), moment(mapping(state.get("running")).get("startedAt"))
    if turned is None or started is None or turned < started:
        return None
    return turned if turned > started or ready.get("status") == "True" else None  # moments are whole seconds


def _termination(pod: _Raw, status: Mapping[str, Any]) -> Termination | None:
    """The container's last termination: the current one, else the previous, else the pod's eviction."""
    for part in ("state", "lastState"):
        ended = mapping(mapping(status.get(part)).get("terminated"))
        if ended:
            return Termination(
                text(ended.get("reason")) or None,
                ceilings.whole(ended.get("exitCode"), ceilings.IDENTIFIER, -ceilings.IDENTIFIER),
                moment(ended.get("finishedAt")),
            )
    reason = text(pod.status.get("reason"))
    return Termination(reason) if pod.bare.phase == "Failed" and reason else None


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(container.get("resources")).get("limits"))


def _hex(value: object) -> str:
    found = _CONTAINER_ID.fullmatch(text(value))
    return found[1] if found else ""
