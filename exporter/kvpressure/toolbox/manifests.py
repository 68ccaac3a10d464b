"""Servers in documents: manifests, ``helm template`` output, ``kubectl get -o yaml``, Compose files.

Pod templates are read by the code for running pods (``sources.kubernetes.podspec``), so that both find the same
arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpressure.engines.registry import default, dialect, named_by, titles
from kvpressure.errors import InputError, refused_file
from kvpressure.files import read_file
from kvpressure.model.arguments import GIB, EngineArgs
from kvpressure.model.state import LIMITS
from kvpressure.parsed import items, mapping
from kvpressure.settings.yaml_lines import bounded_loader
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.toolbox.live_pages import GivenGpu
from kvpressure.toolbox.pod_templates import may_hold_engine, templates, with_templates

NO_ADDRESS: Final = "192.0.2.1"  # of the range for documentation: stands for the address of a pod that does not run
OF_CONTAINER: Final = "192.0.2.2"  # and of a container without a pod
MAX_BYTES: Final = 8 * 1024 * 1024
_SIZE: Final = re.compile(r"(\d{2,3})GB", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """A vLLM container as it would run. ``args``: parsed, without secrets. ``place``: pod template and container, as in
    ``leaderTemplate/vllm``; the container alone where the object has one template.
    """

    kind: str
    namespace: str
    name: str
    place: str
    args: EngineArgs
    version: str | None = None
    gpu: GivenGpu | None = None
    scrape_annotation: bool = False
    dialect: str = ""

    @property
    def title(self) -> str:
        """``deployment/inference/chat:vllm``."""
        return "/".join(part for part in (self.kind.lower(), self.namespace, self.name) if part) + f":{self.place}"


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers in files. ``unread``: objects that may hold an engine whose limits are not seen (``RayService llm``),
    because a controller or a program in the container sets them.
    """

    servers: tuple[ServerContainer, ...]
    unread: tuple[str, ...]


def read_all(paths: Sequence[str]) -> Servers:
    """The servers in all files (``-`` = standard input). Raises ``InputError`` without one."""
    names: list[str] = []
    unread: list[str] = []
    servers: list[ServerContainer] = []
    for where, document in _documents_in(paths):
        found = list(_servers(document, f"{where}: "))
        names.append(_named(document))
        seen = [one for one in found if one.args.complete or not one.args.explicit.isdisjoint(LIMITS)]
        if len(seen) < len(found) or (not found and may_hold_engine(document)):
            unread.append(_named(document))
        servers += found
    if not servers:
        raise InputError(f"{_all(paths)}: no container runs {titles()} in {listed(names)}; {_READ}")
    return Servers(tuple(servers), tuple(unread))


_READ: Final = "read are pod templates, LLMInferenceService and Docker Compose"
_LISTED: Final = 8  # objects in one sentence


def listed(names: Sequence[str]) -> str:
    """The first of these objects."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(dict.fromkeys(names[:_LISTED])) or "an empty file") + more


def _all(paths: Iterable[str]) -> str:
    return ", ".join("standard input" if path == "-" else path for path in paths)


def _named(document: Mapping[str, Any]) -> str:
    """``Workspace phi``, as an object is called in sentences."""
    name = mapping(document.get("metadata")).get("name") or ""
    return f"{document.get('kind') or ('service' if name else 'document')} {name}".strip()


@dataclass(frozen=True, slots=True)
class PodDocument:
    """An object in a file: its name in sentences, its pods or those of its templates as far as known, and whether it
    may hold an engine outside of them.
    """

    name: str
    pods: tuple[Mapping[str, Any], ...]
    may_hold_engine: bool


def pod_documents(paths: Iterable[str]) -> Iterator[PodDocument]:
    """Every object in files (``-`` = standard input). Raises ``InputError``."""
    for _, document in _documents_in(paths):
        yield PodDocument(_named(document), tuple(_as_pods(document)), may_hold_engine(document))


def _as_pods(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    metadata = mapping(document.get("metadata"))
    named = {
        "namespace": str(metadata.get("namespace") or "default"),
        "name": str(metadata.get("name") or metadata.get("generateName") or "pod"),
        "uid": str(metadata.get("uid") or "template"),
    }
    running = {"phase": "Running", "podIP": NO_ADDRESS if "kind" in document else OF_CONTAINER}
    if document.get("kind") == "Pod":
        yield {**document, "metadata": {**metadata, **named}, "status": {**running, **mapping(document.get("status"))}}
        return
    for place in templates(document):
        name = place.name or named["name"]
        pod = {**mapping(place.template.get("metadata")), **named, "name": name, "labels": place.labels}
        yield {"metadata": pod, "spec": place.template.get("spec"), "status": running}


def from_command_line(argv: tuple[str, ...]) -> ServerContainer:
    """A server of which only the command line is known."""
    one = named_by(argv)
    return ServerContainer("args", "", one.name, one.name, one.read_command(argv).args, dialect=one.name)


def _documents_in(paths: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object in the files, with the name of its file."""
    for path in paths:
        where = "standard input" if path == "-" else path
        for document in _documents(_text(path, where), where):
            yield from ((where, made) for made in with_templates(document))


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
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise InputError(f"{where}{line}: not valid YAML ({problem}); allowed: Kubernetes documents") from error


# --- servers ----------------------------------------------------------------------------------------------


def _servers(document: Mapping[str, Any], where: str = "") -> Iterator[ServerContainer]:
    """The servers in a document; errors begin with ``where``."""
    metadata = mapping(document.get("metadata"))
    for place in templates(document):
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
                    "labels": place.labels,
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
            path = (*place.pointer[:-1], listed, index)
            title = f"{where}{document.get('kind') or 'document'} {metadata.get('name') or ''}: "
            for name in ("command", "args"):
                _check_words(raw.get(name), title + "/".join(map(str, (*path, name))))
            templates_above = [part for part in path if isinstance(part, str) and part.endswith("Template")]
            yield ServerContainer(
                str(document.get("kind") or ""),
                str(metadata.get("namespace") or ""),
                str(metadata.get("name") or ""),
                "/".join((*templates_above[-1:], engine.container)),
                dialect(engine.dialect).read_command(engine.target.args, engine.target.env).args,
                engine.target.version,
                _gpu(spec),
                str(annotations.get("prometheus.io/scrape")).lower() == "true",
                engine.dialect,
            )


def _container(spec: Mapping[str, Any], name: str) -> tuple[str, int, Mapping[str, Any]]:
    """(list, index, container) in the spec; native sidecars are among the init containers."""
    return next(
        (listed, index, item)
        for listed in ("containers", "initContainers")
        for index, item in enumerate(map(mapping, items(spec.get(listed))))
        if item.get("name") == name
    )


def _check_words(value: object, where: str) -> None:
    """Raises ``InputError`` for words of a command line that are no strings, which the API server refuses."""
    for index, item in enumerate(items(value)):
        if not isinstance(item, str):
            found = (
                type(item).__name__ if isinstance(item, list | dict) else json.dumps(item, default=str)[:60].strip('"')
            )
            quoted = "text" if isinstance(item, list | dict) or item is None else f'it in quotes, "{found}"'
            raise InputError(
                f"{where}/{index} is {found}, not a string; Kubernetes takes strings only; allowed: {quoted}"
            )


def _gpu(spec: Mapping[str, Any]) -> GivenGpu | None:
    """The GPU of the node selector, if its name includes the size."""
    selector = mapping(spec.get("nodeSelector"))
    product = selector.get("nvidia.com/gpu.product") or selector.get("cloud.google.com/gke-accelerator")
    size = _SIZE.search(product) if isinstance(product, str) else None
    return GivenGpu(str(product).replace("-", " "), int(size[1]) * GIB) if size else None
