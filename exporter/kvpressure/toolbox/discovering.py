"""Results of discovery for the containers of a node, a namespace or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvpressure import redaction
from kvpressure.errors import InputError
from kvpressure.parsed import mapping
from kvpressure.sources.kubernetes.pod import discovered
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.toolbox import fetch
from kvpressure.toolbox.kubectl import Kubectl, KubectlError
from kvpressure.toolbox.manifests import NO_ADDRESS, pod_documents

_SHOWN: Final = 8  # objects in one note
_RESULTS: Final = {"engine": "engine", "no_target": "engine, not scraped", "not_engine": "not an engine"}


def of_exporter(address: str) -> list[Mapping[str, Any]]:
    """Containers as a running exporter sees them. Raises ``InputError``."""
    found = fetch.exporter_document(address).get("discovered")
    if not isinstance(found, list):
        raise InputError(
            f"--exporter: {address} does not report which engines it discovered; update the exporter to the same"
            " release as this command"
        )
    return [mapping(entry) for entry in found]


def of_namespace(namespace: str, selector: str | None, context: str | None) -> list[Mapping[str, Any]]:
    """Containers of a namespace's pods as exporters on their nodes would see them. Raises ``InputError``."""
    more = ["-l", selector] if selector else []
    try:
        documents = Kubectl(context).objects("pods", namespace, *more)
    except KubectlError as error:
        raise InputError(f"-n {redaction.value(namespace)}: {error}") from error
    return _of_pods(documents, Policy(selected=bool(selector)))


def of_files(paths: Sequence[str]) -> tuple[list[Mapping[str, Any]], str]:
    """(containers of pods and pod templates in files, note on objects whose pods only their controllers know, "" =
    none). Raises ``InputError``.
    """
    found = pod_documents(paths)
    note = ""
    if found.opaque:
        more = f" and {len(found.opaque) - _SHOWN} more" if len(found.opaque) > _SHOWN else ""
        names = ", ".join(found.opaque[:_SHOWN]) + more
        note = f"no pod template in {names}; the pods that its controller makes: kvpressure discover -n NAMESPACE"
        if not found.pods:
            raise InputError(f"{', '.join(paths)}: {note}")
    return [_unstarted(entry) for entry in _of_pods(found.pods, Policy())], note


def _unstarted(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry of a file: a pod that does not run has no address yet."""
    return {**entry, "address": str(entry["address"]).replace(f"//{NO_ADDRESS}:", "//<pod IP>:")}


def _of_pods(documents: Iterable[Mapping[str, Any]], policy: Policy) -> list[Mapping[str, Any]]:
    pods = [pod for document in documents if (pod := read_pod(document, policy)) is not None]
    return [asdict(entry) for entry in discovered(pods)]


def text(entries: Iterable[Mapping[str, Any]]) -> str:
    """One paragraph per container."""
    return "\n".join(_paragraph(entry) for entry in entries) or "no container with a GPU or an inference server"


def _paragraph(entry: Mapping[str, Any]) -> str:
    name = "/".join(str(entry.get(part) or "–") for part in ("namespace", "pod", "container"))
    lines = [f"{name}: {_RESULTS.get(str(entry.get('result')), 'unknown')} ({entry.get('reason')})"]
    lines.append(f"  why: {entry.get('explanation')}")
    if entry.get("address"):
        lines.append(f"  metrics: {entry['address']}")
    gpus = ", ".join(f"{resource}: {count}" for resource, count in mapping(entry.get("gpus")).items())
    lines += [f"  GPUs requested: {gpus}"] if gpus else []
    if entry.get("complete") is not None:
        lines.append(f"  arguments: {'all visible' if entry['complete'] else 'partly visible'}")
    return "\n".join(lines)
