"""vLLM servers in Kubernetes documents: manifests, ``helm template`` output, ``kubectl get -o yaml``.

Pod templates are read by the code for running pods (``sources.kubernetes.podspec``), so that both find the same
arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvpressure.engines.mistakes import named_by
from kvpressure.engines.registry import default, dialect, titles
from kvpressure.errors import InputError, refused_file, shown
from kvpressure.files import read_file
from kvpressure.model.arguments import GIB, EngineArgs
from kvpressure.parsed import items, mapping
from kvpressure.settings.yaml_lines import bounded_loader
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.toolbox.host_settings import HostSettings, host_settings
from kvpressure.toolbox.live_pages import GivenGpu

NO_ADDRESS: Final = "192.0.2.1"  # of the range for documentation: stands for the address of a pod that does not run
MAX_BYTES: Final = 8 * 1024 * 1024
_DEPTH: Final = 12  # how deep a pod template may lie in a document
_MAX_MAPPINGS: Final = 50_000  # of a document that are looked at, aliases written out
_PRODUCT: Final = "nvidia.com/gpu.product"
_ACCELERATOR: Final = "cloud.google.com/gke-accelerator"
_SIZE: Final = re.compile(r"(\d{2,3})GB", re.IGNORECASE)
_MONITORS: Final = ("ServiceMonitor", "PodMonitor", "VMServiceScrape", "VMPodScrape", "PodMonitoring")


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """A vLLM container as it would run. ``argv``: its real command line, whose first ``command_length`` words are
    ``command``; ``args``: parsed, without secrets. ``pointer``: path of the container in the document; ``env``:
    literal variables; ``variables``: where the others come from, in words; ``owner``: what manages the document;
    ``host``: settings of the pod template, None without one.
    """

    kind: str
    namespace: str
    name: str
    container: str
    argv: tuple[str, ...]
    command_length: int
    args: EngineArgs
    image: str = ""
    version: str | None = None
    gpu: GivenGpu | None = None
    scrape_annotation: bool = False
    pointer: tuple[str | int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    dialect: str = ""
    host: HostSettings | None = None

    @property
    def title(self) -> str:
        """``deployment/inference/chat:vllm``."""
        return "/".join(part for part in (self.kind.lower(), self.namespace, self.name) if part) + f":{self.place}"

    @property
    def place(self) -> str:
        """``leaderTemplate/vllm``: pod template and container; only the container's name where the
        object has one template.
        """
        named = [part for part in self.pointer if isinstance(part, str) and part.endswith("Template")]
        return "/".join((*named[-1:], self.container))


def choose(servers: Sequence[ServerContainer], container: str | None, where: str) -> ServerContainer:
    """The only one of ``servers``, or the one whose name, ``place`` or ``title`` is ``container``. Raises
    ``InputError``, whose message begins with ``where``, when none or several match.
    """
    found = [one for one in servers if container is None or container in (one.container, one.place, one.title)]
    if len(found) == 1:
        return found[0]
    names = [one.container for one in servers]
    unique = len(set(names)) == len(names)
    places = [one.place for one in servers]
    listed = names if unique else places if len(set(places)) == len(places) else [one.title for one in servers]
    problem = f"{len(found)} server containers" if found else f"no server container {shown(container)}"
    raise InputError(f"{where}: {problem}; choose one with --container: {', '.join(listed[:8])}")


def servers_of(document: Mapping[str, Any]) -> tuple[ServerContainer, ...]:
    """The servers in one object, e.g. from the API server."""
    return tuple(_servers(document))


def read_all(paths: Sequence[str]) -> tuple[ServerContainer, ...]:
    """The servers in all files (``-`` = standard input). Raises ``InputError``."""
    kinds: set[str] = set()
    servers: list[ServerContainer] = []
    for where, document in _documents_in(paths):
        kinds.add(str(document.get("kind")))
        servers += _servers(document, f"{where}: ")
    where = ", ".join("standard input" if path == "-" else path for path in paths)
    if not servers:
        found = ", ".join(sorted(kinds)[:8]) or "nothing"
        raise InputError(
            f"{where}: no container runs {titles()} (found: {found}); allowed: manifests with a pod"
            " template, such as a Deployment"
        )
    return tuple(servers)


@dataclass(frozen=True, slots=True)
class PodDocuments:
    """Pods in files, and those of pod templates. ``opaque``: objects of custom kinds (``Workspace llama``), whose
    controllers may create pods.
    """

    pods: tuple[Mapping[str, Any], ...]
    opaque: tuple[str, ...]


def pod_documents(paths: Iterable[str]) -> PodDocuments:
    """Pods in files (``-`` = standard input), as far as known. Raises ``InputError``."""
    pods: list[Mapping[str, Any]] = []
    opaque: list[str] = []
    for _, document in _documents_in(paths):
        found = list(_as_pods(document))
        pods += found
        if not found and _of_others(document):
            opaque.append(f"{document.get('kind')} {mapping(document.get('metadata')).get('name') or ''}".strip())
    return PodDocuments(tuple(pods), tuple(opaque))


def _of_others(document: Mapping[str, Any]) -> bool:
    group = str(document.get("apiVersion") or "").rpartition("/")[0]
    return "." in group and not group.endswith(".k8s.io") and document.get("kind") not in _MONITORS


def _as_pods(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    metadata = mapping(document.get("metadata"))
    named = {
        "namespace": str(metadata.get("namespace") or "default"),
        "name": str(metadata.get("name") or metadata.get("generateName") or "pod"),
        "uid": str(metadata.get("uid") or "template"),
    }
    running = {"phase": "Running", "podIP": NO_ADDRESS}
    if document.get("kind") == "Pod":
        yield {**document, "metadata": {**metadata, **named}, "status": {**running, **mapping(document.get("status"))}}
        return
    for place in _templates(document):
        own = mapping(place.template.get("metadata"))
        labels = {**mapping(own.get("labels")), **_given_labels(document, place.pointer)}
        pod = {**own, **named, "labels": labels}
        yield {"metadata": pod, "spec": place.template.get("spec"), "status": running}


def from_command_line(argv: tuple[str, ...]) -> ServerContainer:
    """A server of which only the command line is known."""
    one = named_by(argv)
    return ServerContainer("args", "", one.name, one.name, argv, 0, one.read_command(argv).args, dialect=one.name)


def _documents_in(paths: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object in the files, with the name of its file."""
    for path in paths:
        where = "standard input" if path == "-" else path
        yield from ((where, document) for document in _documents(_text(path, where), where))


def _text(path: str, where: str) -> str:
    try:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else read_file(path, MAX_BYTES + 1, pipe=True)
    except OSError as error:
        give = "a readable file with Kubernetes documents, or - for standard input"
        raise InputError(refused_file(where, error, give)) from error
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where}: larger than the limit of {MAX_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start}); allowed: YAML or JSON") from error


def _documents(text: str, where: str) -> Iterator[Mapping[str, Any]]:
    """Every object; lists are expanded."""
    import yaml

    try:
        loader = bounded_loader()(text)  # the loader written in C dies of deep nesting
        while loader.check_node():
            document = loader.construct_document(loader.get_node())
            if document is None:
                continue
            if not isinstance(document, Mapping):
                raise InputError(
                    f"{where}: a document is {type(document).__name__}, not a mapping; allowed: Kubernetes documents"
                )
            if not str(document.get("kind", "")).endswith("List"):
                yield document
                continue
            yield from (listed for listed in items(document.get("items")) if isinstance(listed, Mapping))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise InputError(
            f"{where}{line}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'}); allowed: Kubernetes"
            " documents"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: not valid YAML ({type(error).__name__}); allowed: Kubernetes documents") from error


# --- servers ----------------------------------------------------------------------------------------------


def _servers(document: Mapping[str, Any], where: str = "") -> Iterator[ServerContainer]:
    """The servers in a document; errors begin with ``where``."""
    metadata = mapping(document.get("metadata"))
    for place in _templates(document):
        own = mapping(place.template.get("metadata"))
        annotations = mapping(own.get("annotations"))
        kept = {name: value for name, value in annotations.items() if name == "kvpressure.io/container"}
        spec = {name: value for name, value in mapping(place.template.get("spec")).items() if name != "hostNetwork"}
        pod = read_pod(
            {  # as if it ran
                "metadata": {
                    "namespace": str(metadata.get("namespace") or "default"),
                    "name": str(metadata.get("name") or default().name),
                    "uid": "template",
                    "annotations": kept,
                    "labels": {**mapping(own.get("labels")), **_given_labels(document, place.pointer)},
                },
                "spec": spec,
                "status": {"phase": "Running", "podIP": NO_ADDRESS},
            },
            Policy(template=True),
        )
        for engine in pod.engines if pod is not None else ():
            if engine.target is None:
                continue
            listed, index, raw = _container(spec, engine.container)
            pointer = (*place.pointer[:-1], listed, index)
            path = "/".join(map(str, pointer))
            command, args = (
                _words(
                    raw.get(name),
                    f"{where}{document.get('kind') or 'document'} {metadata.get('name') or ''}: {path}/{name}",
                )
                for name in ("command", "args")
            )
            env, variables = _environment(raw)
            yield ServerContainer(
                str(document.get("kind") or ""),
                str(metadata.get("namespace") or ""),
                str(metadata.get("name") or ""),
                engine.container,
                (*command, *args),
                len(command),
                dialect(engine.dialect).read_command(engine.target.args, engine.target.env).args,
                str(raw.get("image") or ""),
                engine.target.version,
                _gpu(spec),
                str(annotations.get("prometheus.io/scrape")).lower() == "true",
                pointer,
                env,
                variables,
                _owner(metadata),
                engine.dialect,
                host_settings(spec, raw),
            )


_GIVEN_LABELS: Final = {  # by the key that the template is below: what its controller puts on the pods
    "workerTemplate": {"leaderworkerset.sigs.k8s.io/worker-index": "1"},
    "workerGroupSpecs": {"ray.io/node-type": "worker"},
}


def _given_labels(document: Mapping[str, Any], pointer: tuple[str | int, ...]) -> dict[str, str]:
    """Labels by which pods of this template count as workers of an engine that another pod serves. A LeaderWorkerSet
    without a template for leaders makes them from the workers'.
    """
    labels: dict[str, str] = {}
    node: Any = document
    for key in pointer:
        if key != "workerTemplate" or "leaderTemplate" in node:
            labels |= _GIVEN_LABELS.get(str(key), {})
        node = node[key]
    return labels


def _container(spec: Mapping[str, Any], name: str) -> tuple[str, int, Mapping[str, Any]]:
    """(list, index, container) in the spec; native sidecars are among the init containers."""
    return next(
        (listed, index, item)
        for listed in ("containers", "initContainers")
        for index, item in enumerate(map(mapping, items(spec.get(listed))))
        if item.get("name") == name
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A pod template, and the path of its containers in the document."""

    template: Mapping[str, Any]
    pointer: tuple[str | int, ...]


def _templates(document: Mapping[str, Any]) -> Iterator[_Place]:
    """Every mapping with a pod spec below ``spec``, the object included. Raises ``InputError`` for endless aliases."""
    return _below(document, (), _DEPTH, iter(range(_MAX_MAPPINGS)))


def _below(node: object, path: tuple[str | int, ...], depth: int, left: Iterator[int]) -> Iterator[_Place]:
    if depth == 0 or not isinstance(node, Mapping):
        return
    if next(left, None) is None:
        raise InputError(
            f"a document of more than {_MAX_MAPPINGS} mappings, aliases written out; split the file"
            " into smaller documents"
        )
    spec = node.get("spec")
    if isinstance(spec, Mapping) and any(isinstance(item, Mapping) for item in items(spec.get("containers"))):
        yield _Place(node, (*path, "spec", "containers"))
        return
    for key, value in node.items():
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            yield from _below(child, (*path, str(key)) if index is None else (*path, str(key), index), depth - 1, left)


def _environment(container: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(literal variables, source of the others such as ``ConfigMap chat-args``)."""
    literal: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    for item in map(mapping, items(container.get("env"))):
        name, source = str(item.get("name") or ""), mapping(item.get("valueFrom"))
        if isinstance(item.get("value"), str):
            literal[name] = str(item["value"])
        elif source:
            kind, reference = next(iter(source.items()))
            where = str(mapping(reference).get("name") or "")
            elsewhere[name] = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}.get(str(kind), str(kind)) + (
                f" {where}" if where else ""
            )
    for item in map(mapping, items(container.get("envFrom"))):
        for kind, words in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if item.get(kind):
                elsewhere.setdefault(f"{item.get('prefix') or ''}*", f"{words} {mapping(item[kind]).get('name')}")
    return literal, elsewhere


def _owner(metadata: Mapping[str, Any]) -> str:
    """What would overwrite the object: a controller, Helm, Argo CD, Flux; "" if nothing is visible."""
    annotations, labels = mapping(metadata.get("annotations")), mapping(metadata.get("labels"))
    for reference in map(mapping, items(metadata.get("ownerReferences"))):
        if reference.get("controller") is True:
            return f"{reference.get('kind')} {reference.get('name')}"
    release = annotations.get("meta.helm.sh/release-name")
    if release or labels.get("app.kubernetes.io/managed-by") == "Helm":
        return f"Helm release {release}" if release else "Helm"
    if any(str(name).startswith("argocd.argoproj.io/") for name in (*annotations, *labels)):
        return "Argo CD"
    return "Flux" if any("toolkit.fluxcd.io/" in str(name) for name in (*annotations, *labels)) else ""


def _words(value: object, where: str) -> tuple[str, ...]:
    """The words of a command line. Raises ``InputError`` for non-strings, which the API server refuses."""
    for index, item in enumerate(items(value)):
        if not isinstance(item, str):
            found = (
                type(item).__name__ if isinstance(item, list | dict) else json.dumps(item, default=str)[:60].strip('"')
            )
            quoted = "text" if isinstance(item, list | dict) or item is None else f'it in quotes, "{found}"'
            raise InputError(
                f"{where}/{index} is {found}, not a string; Kubernetes takes strings only; allowed: {quoted}"
            )
    return tuple(items(value))


def _gpu(spec: Mapping[str, Any]) -> GivenGpu | None:
    """The GPU of the node selector, if its name includes the size."""
    selector = mapping(spec.get("nodeSelector"))
    product = selector.get(_PRODUCT) or selector.get(_ACCELERATOR)
    size = _SIZE.search(product) if isinstance(product, str) else None
    return GivenGpu(str(product).replace("-", " "), int(size[1]) * GIB) if size else None
