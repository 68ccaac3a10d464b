"""Values of a running server for the prevention checklist: from vLLM's own endpoints, or from an exporter that
watches it.

Metrics have values in force, seldom whether they were set; what they lack stays unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpressure.diagnosis.findings import about
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.model.arguments import EngineArgs, value_text
from kvpressure.model.state import LIMITS
from kvpressure.parsed import items, mapping
from kvpressure.publish.collector import worst_first
from kvpressure.settings.thresholds import Thresholds
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import fetch
from kvpressure.toolbox.audit_subject import Seen
from kvpressure.toolbox.engine_view import EngineView, name_of
from kvpressure.toolbox.exporter_document import engine_views
from kvpressure.toolbox.inputs import watch_and_judge
from kvpressure.toolbox.live_pages import GivenGpu
from kvpressure.toolbox.manifests import ServerContainer


def is_address(text: str) -> bool:
    """Whether an input of ``audit`` is a server, not a file."""
    return text.startswith(("http://", "https://"))


def read(
    address: str, args: tuple[str, ...], gpu: GivenGpu | None, thresholds: Thresholds
) -> list[tuple[ServerContainer, Seen]]:
    """Every engine behind ``address`` of an exporter or a vLLM server. Raises ``InputError``."""
    target = fetch.target_of(address, "URL")
    document = fetch.get_json(target, fetch.DIAGNOSIS_PATH)
    if isinstance(document, Mapping) and isinstance(document.get("engines"), list):
        return _exporter(address, document, thresholds)
    target = replace(target, args=target.args or args)
    found = watch_and_judge([target], gpu, 0.0, thresholds)
    return _all_found([case.view for case in found.cases], _model(target), thresholds)


def _exporter(address: str, document: Mapping[str, Any], t: Thresholds) -> list[tuple[ServerContainer, Seen]]:
    views = engine_views(document)
    if not views:
        raise InputError(f"{address}: the exporter has found no engine yet; try again later")
    return _all_found(views, None, t, f"kvpressure exporter at {address}", bool(items(document.get("gpus"))))


def _all_found(
    views: Sequence[EngineView],
    model: str | None,
    t: Thresholds,
    exporter: str | None = None,
    gpus_watched: bool = False,
) -> list[tuple[ServerContainer, Seen]]:
    """All engines, those in trouble first; several of one pod are told apart by model and rank."""
    of_pod = Counter((view.engine.key.namespace, view.engine.key.pod) for view in views)
    audited = []
    for view in sorted(views, key=lambda view: worst_first(view.engine)):
        server = _server(view, model)
        key = view.engine.key
        if of_pod[key.namespace, key.pod] > 1:
            server = replace(server, container=name_of(replace(key, namespace="", pod=server.container)))
        audited.append((server, _seen(view, t, exporter, gpus_watched)))
    return audited


def _server(view: EngineView, model: str | None) -> ServerContainer:
    limits = {name: view.engine.limit(name) for name in LIMITS}
    values: dict[str, str | None] = {
        name: value_text(limit.value)
        for name, limit in limits.items()
        if limit.value is not None and not (limit.source == "default" and limit.explicit is None)
    }
    values["model"] = model or view.engine.key.model_name or None
    known = {name for name, limit in limits.items() if limit.explicit is not None}
    explicit = frozenset(name for name, limit in limits.items() if limit.explicit) | {"model"}
    args = EngineArgs(values, explicit, complete=known == set(LIMITS))
    return ServerContainer(
        "server",
        view.engine.key.namespace,
        view.engine.key.pod or view.engine.target,
        view.engine.container or dialect(view.engine.dialect).name,
        (),
        0,
        args,
        version=view.engine.version,
        gpu=_gpu(view),
        dialect=view.engine.dialect,
    )


def _seen(view: EngineView, t: Thresholds, exporter: str | None, gpus_watched: bool) -> Seen:
    context, found = view.signals.context.context_mean, about(view.signals, t)
    return Seen(
        capacity_tokens=view.signals.kv.kv_capacity_tokens,
        context=view.usual.context_mean if context is None else context,
        bursts=found["arrivals_bursty"],
        bimodal_prompts=found["prompt_lengths_bimodal"],
        conditions={name: value for name, value in view.diagnosis.conditions.items() if name != "documented_signature"},
        exporter=exporter,
        gpus_watched=gpus_watched,
    )


def _gpu(view: EngineView) -> GivenGpu | None:
    """The GPU, if it was read and not only stated; else None."""
    for gpu in view.gpus:
        if gpu.name and gpu.memory_total_bytes:
            return GivenGpu(gpu.name, gpu.memory_total_bytes)
    return None


def _model(target: Target) -> str | None:
    """The model's own name or path, which the served name may hide."""
    for item in items(mapping(fetch.get_json(target, "/v1/models")).get("data")):
        root = mapping(item).get("root")
        if isinstance(root, str) and root:
            return root
    return None
