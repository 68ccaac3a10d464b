"""Pod templates in documents: of Kubernetes objects, of KServe's LLMInferenceService, of Docker Compose's services."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpressure.engines.registry import default, dialects
from kvpressure.errors import InputError
from kvpressure.model.arguments import EngineArgs
from kvpressure.parsed import items, mapping, mappings, text
from kvpressure.printable import command

_DEPTH: Final = 13  # how deep a pod spec may lie in a document
_MAX_MAPPINGS: Final = 50_000  # of a document that are looked at, aliases written out
_MONITORS: Final = ("ServiceMonitor", "PodMonitor", "VMServiceScrape", "VMPodScrape", "PodMonitoring")
_OF_ENGINES: Final = frozenset(
    {"args", "command", "containers", "engine", "image", "inference", "model", "serveConfigV2"}
)
"""Keys under which objects of custom kinds describe an engine's container, model or options."""


@dataclass(frozen=True, slots=True)
class Place:
    """A pod template, and the path of its containers in the document. ``name``: of its pods, as far as the document
    gives it; ``labels``: with those that its controller adds.
    """

    template: Mapping[str, Any]
    pointer: tuple[str | int, ...]
    name: str
    labels: Mapping[str, Any]


def templates(document: Mapping[str, Any]) -> Iterator[Place]:
    """Every pod spec in a document: a mapping with a list of containers. Raises ``InputError`` for endless aliases."""
    return (_place(document, pointer, node) for pointer, node in _mappings(document) if _is_pod_spec(node))


def _is_pod_spec(node: Mapping[str, Any]) -> bool:
    return any(isinstance(item, Mapping) for item in items(node.get("containers")))


_Pointer = tuple[str | int, ...]
_Found = tuple[_Pointer, Mapping[str, Any]]


def _mappings(document: Mapping[str, Any]) -> Iterator[_Found]:
    """Every mapping in a document that is not part of a pod spec, with its path."""
    return _below(document, (), _DEPTH, iter(range(_MAX_MAPPINGS)))


def _below(node: object, path: _Pointer, depth: int, left: Iterator[int]) -> Iterator[_Found]:
    if depth == 0 or not isinstance(node, Mapping):
        return
    if next(left, None) is None:
        raise InputError(
            f"a document of more than {_MAX_MAPPINGS} mappings, aliases written out; split the file"
            " into smaller documents"
        )
    yield path, node
    for key, value in () if _is_pod_spec(node) else node.items():
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            yield from _below(child, (*path, str(key)) if index is None else (*path, str(key), index), depth - 1, left)


_LWS: Final = "leaderworkerset.sigs.k8s.io/"
_GIVEN_LABELS: Final = {  # by the key that the template is below: what its controller puts on the pods
    "leaderTemplate": {_LWS + "worker-index": "0"},
    "workerTemplate": {_LWS + "worker-index": "1"},
    "worker": {_LWS + "worker-index": "1"},
    "headGroupSpec": {"ray.io/node-type": "head"},
    "workerGroupSpecs": {"ray.io/node-type": "worker"},
    "prefill": {"llm-d.ai/role": "prefill"},
}


def _place(document: Mapping[str, Any], pointer: _Pointer, spec: Mapping[str, Any]) -> Place:
    """A pod template by the path of its spec. A LeaderWorkerSet without a template for leaders makes them from the
    workers'.
    """
    names = [text(mapping(document.get("metadata")).get("name"))]
    labels: dict[str, Any] = {}
    around: Any = document
    node: Any = document
    for key in pointer:
        if key != "workerTemplate" or "leaderTemplate" in node:
            labels |= _GIVEN_LABELS.get(str(key), {})
        if key == "template" and "worker" in node:
            labels |= _GIVEN_LABELS["leaderTemplate"]
        if key == "template" and "prefill" in node:
            labels["llm-d.ai/role"] = "decode"
        around, node = node, node[key]
        names += [key] if key == "prefill" else [text(node.get("name"))] if isinstance(key, int) else []
    name = "-".join(filter(None, names))
    metadata = mapping(around.get("metadata")) if pointer[-1:] == ("spec",) else {}
    group = {_LWS + "name": name, _LWS + "group-index": "0", "ray.io/cluster": name}
    labels = {**mapping(metadata.get("labels")), **group, **labels}
    return Place({"metadata": metadata, "spec": spec}, (*pointer, "containers"), name, labels)


def may_hold_engine(document: Mapping[str, Any]) -> bool:
    """Whether an object of a custom kind describes an engine outside of pod templates, as only its controller reads
    it.
    """
    group = text(document.get("apiVersion")).rpartition("/")[0]
    if "." not in group or group.endswith("k8s.io") or document.get("kind") in _MONITORS:
        return False
    return any(not _OF_ENGINES.isdisjoint(node) for _, node in _mappings(document) if not _is_pod_spec(node))


def with_templates(document: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The document with the pod templates that its controller would make; a Compose file as one object a service."""
    if document.get("kind") == "LLMInferenceService":
        return [_of_kserve(document)]
    services = document.get("services")
    if "kind" in document or "apiVersion" in document or not isinstance(services, Mapping):
        return [document]
    project = text(document.get("name")) or "compose"
    return [
        _of_compose(project, str(name), service) for name, service in services.items() if isinstance(service, Mapping)
    ]


# --- KServe's LLMInferenceService ---------------------------------------------------------------------------

_MAIN: Final = "main"  # the container that runs the engine
_PARALLEL: Final = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "data": "data_parallel_size",
    "dataLocal": "data_parallel_size_local",
}


def _of_kserve(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the start of the engine in its containers, as the presets of KServe write it (kserve/kserve,
    config/llmisvcconfig). A preset may set more, so the arguments never count as complete.
    """
    spec = mapping(document.get("spec"))
    prefill = spec.get("prefill")
    made = {**spec, **_workload(spec, spec, "8000" if prefill is None else "8001")}  # behind the routing sidecar
    if isinstance(prefill, Mapping):
        made["prefill"] = {**prefill, **_workload(spec, prefill, "8000")}
    return {**document, "spec": made}


def _workload(spec: Mapping[str, Any], workload: Mapping[str, Any], port: str) -> dict[str, Any]:
    """The pod specs of one pool."""
    model, parallel = mapping(spec.get("model")), mapping(workload.get("parallelism"))
    source = text(model.get("uri"))
    values = {
        "model": source.removeprefix("hf://") if source.startswith("hf://") else "/mnt/models",
        "served_model_name": text(model.get("name")),
        "port": port,
        **{name: str(parallel.get(size) or "") for size, name in _PARALLEL.items()},
    }
    values = {name: value for name, value in values.items() if value}
    engine = next((one for one in dialects() if one.name in text(spec.get("runtime"))), default())
    made = {"template": _started(mapping(workload.get("template")), engine.public_words(EngineArgs(values)))}
    if "worker" in workload:
        words = engine.public_words(EngineArgs({**values, "headless": "True"}))
        made["worker"] = _started(mapping(workload.get("worker")), words)
    return made


def _started(pod: Mapping[str, Any], start: Sequence[str]) -> Mapping[str, Any]:
    """The pod spec whose main container starts the engine, unless it has a command of its own."""
    containers = mappings(pod.get("containers"))
    if not any(item.get("name") == _MAIN for item in containers):
        containers.insert(0, {"name": _MAIN})
    return {**pod, "containers": [_main(item, start) if item.get("name") == _MAIN else item for item in containers]}


def _main(container: Mapping[str, Any], start: Sequence[str]) -> Mapping[str, Any]:
    names = (text(variable.get("name")) for variable in mappings(container.get("env")))
    more = " ".join(f"${name}" for name in names if name.endswith("_ADDITIONAL_ARGS"))
    return {"command": ["/bin/bash", "-c", f'eval "exec {command(*start)} {more} $@"', "--"], **container}


# --- Docker Compose -----------------------------------------------------------------------------------------

_VARIABLE: Final = re.compile(r"\$(?:\$|\{(\w+)(?:[^{}]|\{[^{}]*\})*\}|([A-Za-z_]\w*))")
_UNKNOWN: Final = "compose."  # before the names of variables that are not the container's
_DEFAULT: Final = re.compile(r"\$\{\w+:?-([^{}]*)\}")


def _of_compose(project: str, name: str, service: Mapping[str, Any]) -> Mapping[str, Any]:
    """A service of a Compose file as a pod. Variables that Compose fills in from its environment are unknown, but for
    the default of an image's name.
    """
    deploy = mapping(mapping(service.get("deploy")).get("resources"))
    counted, claimed = _devices(service, mapping(deploy.get("reservations")))
    container = {
        "name": name,
        "image": _filled(_DEFAULT.sub(r"\1", text(service.get("image")))),
        "command": _words(service.get("entrypoint"), name, "entrypoint"),
        "args": _words(service.get("command"), name, "command"),
        "env": _variables(service.get("environment")),
        "resources": {"limits": {"nvidia.com/gpu": str(counted)} if counted else {}, "claims": claimed},
    }
    return {"metadata": {"namespace": project, "name": name}, "spec": {"containers": [container]}}


def _filled(text: str) -> str:
    """The text as Compose writes it, with references that nothing resolves in place of its variables."""
    return _VARIABLE.sub(lambda found: "$" if found[0] == "$$" else f"$({_UNKNOWN}{found[1] or found[2]})", text)


def _words(value: object, service: str, key: str) -> list[str]:
    """The words of a command, which is a list or one text. Raises ``InputError`` for an open quotation."""
    if isinstance(value, str):
        try:
            return shlex.split(_filled(value))
        except ValueError as error:
            raise InputError(f"service {service}: {key}: {error}; allowed: closed quotations") from error
    return [_filled(str(item)) for item in items(value)]


def _variables(value: object) -> list[Mapping[str, str]]:
    """The variables with a literal value; others come from Compose's environment or a file."""
    given = value.items() if isinstance(value, Mapping) else (str(item).split("=", 1) for item in items(value))
    return [
        {"name": str(pair[0]), "value": filled}
        for pair in map(tuple, given)
        if len(pair) == 2 and pair[1] is not None and _UNKNOWN not in (filled := _filled(str(pair[1])))
    ]


def _devices(service: Mapping[str, Any], reserved: Mapping[str, Any]) -> tuple[int, list[Mapping[str, str]]]:
    """(GPUs that are counted, a claim for each request of an unknown number)."""
    asked = [item for item in items(reserved.get("devices")) if "gpu" in items(mapping(item).get("capabilities"))]
    gpus = service.get("gpus")
    asked += [{"count": gpus}] if isinstance(gpus, str) else items(gpus)
    counts = [len(items(one.get("device_ids"))) or one.get("count", "all") for one in map(mapping, asked)]
    mapped = [str(item) for item in items(service.get("devices"))]
    claims = [one for one in counts if not isinstance(one, int) or one < 0]
    claims += [item for item in mapped if item.startswith(("/dev/kfd", "/dev/nvidia", "nvidia.com/", "amd.com/"))]
    claims += ["runtime"] if service.get("runtime") == "nvidia" and not asked else []
    return sum(one for one in counts if isinstance(one, int) and one > 0), [{"name": str(one)} for one in claims[:1]]
