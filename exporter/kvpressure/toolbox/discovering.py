"""Results of discovery for the containers of a node, a namespace or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from kvpressure import redaction
from kvpressure.engines.base import Known
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.model.arguments import OF_PROCESS, value_text
from kvpressure.parsed import items, mapping
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import SourceError
from kvpressure.sources.host.processes import ProcessesSource
from kvpressure.sources.kubernetes.pod import Pod, discovered
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import fetch
from kvpressure.toolbox.kubectl import Kubectl, KubectlError
from kvpressure.toolbox.manifests import NO_ADDRESS, OF_CONTAINER, listed, pod_documents

_RESULTS: Final = {"engine": "engine", "no_target": "engine, not scraped", "not_engine": "not an engine"}
_NOTHING: Final = "no container with an accelerator or an inference server"

_Limits = Mapping[str, Mapping[str, Any]]


def of_exporter(address: str) -> list[Mapping[str, Any]]:
    """Containers as a running exporter sees them, with the limits in force. Raises ``InputError``."""
    document = fetch.exporter_document(address)
    found = document.get("discovered")
    if not isinstance(found, list):
        raise InputError(
            f"--exporter: {address} does not report which engines it discovered; update the exporter to the same"
            " release as this command"
        )
    engines = {
        mapping(engine).get("target"): mapping(mapping(engine).get("limits")) for engine in items(document["engines"])
    }
    rows = [mapping(entry) for entry in found]
    return _any([_entry(row, engines.get(row.get("address"), {})) for row in rows], f"--exporter: {address}")


def of_host(settings: Settings) -> list[Mapping[str, Any]]:
    """The servers among the processes of this host, as an exporter on it would see them. Raises ``InputError``."""
    try:
        found = ProcessesSource(settings).read().discovered or ()
    except SourceError as error:
        raise InputError(f"this host: {error.detail}; name what to read with -n, -f or --exporter") from error
    targets = {target.name: target for target in settings.shared.targets}
    rows = [_entry(asdict(row), _limits(targets.get(row.address))) for row in found]
    where = f"{settings.node_name}: no process serves; elsewhere: -n NAMESPACE, -f FILE or --exporter ADDRESS"
    return _any(rows, where)


def of_namespace(namespace: str, selector: str | None, context: str | None) -> list[Mapping[str, Any]]:
    """Containers of a namespace's pods as exporters on their nodes would see them. Raises ``InputError``."""
    more = ["-l", selector] if selector else []
    try:
        documents = Kubectl(context).objects("pods", namespace, *more)
    except KubectlError as error:
        raise InputError(f"-n {redaction.value(namespace)}: {error}") from error
    where = f"-n {redaction.value(namespace)}: {len(documents)} pods"
    return _any(_of_pods(documents, Policy(selected=bool(selector))), where)


def of_files(paths: Sequence[str]) -> tuple[list[Mapping[str, Any]], str]:
    """(containers of pods and pod templates in files, note on objects whose engines only their controllers know, "" =
    none). Raises ``InputError`` without a container.
    """
    entries: list[Mapping[str, Any]] = []
    names, unread, where = [], [], ", ".join(paths)
    for document in pod_documents(paths):
        rows = _of_pods(document.pods, Policy())
        entries += map(_unstarted, rows)
        names.append(document.name)
        seen = any(one["source"] == "args" for row in rows for one in row["arguments"].values())
        if document.may_hold_engine and not seen:
            unread.append(document.name)
    note = f"no arguments in {listed(unread)}; pods that its controller made: kvpressure discover -n NAMESPACE"
    if unread and not entries:
        raise InputError(f"{where}: {note}")
    return _any(entries, f"{where}: {listed(names)}"), note if unread else ""


def _any(entries: list[Mapping[str, Any]], where: str) -> list[Mapping[str, Any]]:
    """The entries; raises ``InputError`` without one, because an empty answer reads like a pass."""
    if not entries:
        raise InputError(f"{where}: {_NOTHING}")
    return entries


def _unstarted(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry of a file: what does not run has no address yet."""
    address = str(entry["address"]).replace(f"//{NO_ADDRESS}:", "//<pod IP>:")
    return {**entry, "address": address.replace(f"//{OF_CONTAINER}:", "//<container IP>:")}


def _of_pods(documents: Iterable[Mapping[str, Any]], policy: Policy) -> list[Mapping[str, Any]]:
    pods = [pod for document in documents if (pod := read_pod(document, policy)) is not None]
    return [_entry(asdict(row), _limits(_target(pod, row.container))) for pod in pods for row in discovered([pod])]


def _target(pod: Pod, container: str) -> Target | None:
    return next((one.target for one in pod.engines if one.container == container), None)


def _limits(target: Target | None) -> _Limits:
    """The limits of an engine by its command line and the defaults of its version."""
    if target is None:
        return {}
    one = dialect(target.dialect)
    args = replace(one.read_command(target.args, target.env).args, source=target.args_source)
    limits = one.limits(Known(args, version=target.version))
    return {name: asdict(limit) for name, limit in limits.items()}


def _entry(row: Mapping[str, Any], limits: _Limits) -> Mapping[str, Any]:
    """A container with the value of each argument, None where it is not visible, and its source: what is in no
    namespace is a process.
    """
    given = "args" if row.get("namespace") else OF_PROCESS
    arguments = {
        name: {"value": None if value == redaction.REDACTED else value, "source": given}
        for name, value in mapping(row.get("arguments")).items()
    }
    for name, limit in limits.items():
        value, source = limit.get("value"), limit.get("source")
        if isinstance(value, int | float) and source:
            assumed = source == "default" and limit.get("explicit") is None
            arguments[name] = {"value": value_text(value), "source": "assumed" if assumed else source}
    return {**row, "arguments": arguments}


def text(entries: Iterable[Mapping[str, Any]]) -> str:
    """One paragraph per container."""
    return "\n".join(map(_paragraph, entries))


def _paragraph(entry: Mapping[str, Any]) -> str:
    name = "/".join(str(entry[part]) for part in ("namespace", "pod", "container") if entry.get(part))
    lines = [f"{name}: {_RESULTS.get(str(entry.get('result')), 'unknown')} ({entry.get('reason')})"]
    lines.append(f"  why: {entry.get('explanation')}")
    if entry.get("address"):
        lines.append(f"  metrics: {entry['address']}")
    gpus = ", ".join(f"{resource}: {count}" for resource, count in mapping(entry.get("gpus")).items())
    lines += [f"  accelerators requested: {gpus}"] if gpus else []
    role = f", role {entry['role']}" if entry.get("role") else ""
    lines.append(f"  group: {entry.get('group') or '–'}{role}")
    values = {name: mapping(argument).get("value") for name, argument in mapping(entry.get("arguments")).items()}
    if entry.get("complete") is not None:
        visible = entry["complete"] and None not in values.values()
        lines.append(f"  arguments: {'all visible' if visible else 'partly visible'}")
    for name, value in values.items():
        lines.append(f"    {name}: {value or 'not visible'} ({entry['arguments'][name]['source']})")
    return "\n".join(lines)
