"""What an expression reads and which labels its result carries, told from its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import promql_parser as pp

from kvpressure.publish.metrics import BY_NAME, PREFIX

SCRAPE = frozenset({"cluster", "node", "instance", "job", "exported_namespace", "exported_pod"})
LABELLESS = frozenset({"absent", "vector", "time", "scalar"})
_VLLM: Final = ("namespace", "pod", "model_name", "engine")

EXTERNAL: Final[Mapping[str, tuple[str, ...]]] = {
    "up": (),
    "process_start_time_seconds": (),
    "ALERTS": ("alertname", "alertstate", "severity", "namespace", "model_name"),
    "kube_pod_info": ("namespace", "pod", "node", "created_by_kind"),
    "kube_node_status_allocatable": ("node", "resource"),
    "kube_node_status_condition": ("node", "condition", "status"),
    **dict.fromkeys(
        ("kube_deployment_spec_replicas", "kube_deployment_status_replicas_available"), ("namespace", "deployment")
    ),
    **dict.fromkeys(
        ("kube_statefulset_replicas", "kube_statefulset_status_replicas_ready"), ("namespace", "statefulset")
    ),
    **dict.fromkeys(
        ("kube_daemonset_status_desired_number_scheduled", "kube_daemonset_status_number_available"),
        ("namespace", "daemonset"),
    ),
    **dict.fromkeys(
        ("kube_replicaset_spec_replicas", "kube_replicaset_status_ready_replicas"), ("namespace", "replicaset")
    ),
    "kube_replicaset_owner": ("namespace", "replicaset", "owner_kind", "owner_name"),
    "kube_pod_container_status_restarts_total": ("namespace", "pod", "container"),
    "kube_pod_container_status_last_terminated_reason": ("namespace", "pod", "container", "reason"),
    **dict.fromkeys(
        (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "vllm:generation_tokens_total",
            "vllm:num_preemptions_total",
            "vllm:prompt_tokens_total",
        ),
        _VLLM,
    ),
    "http_requests_total": ("namespace", "pod", "handler", "method", "status"),
    "vllm:request_success_total": (*_VLLM, "finished_reason"),
    **dict.fromkeys(
        (
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:request_queue_time_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
            "vllm:time_per_output_token_seconds_bucket",
        ),
        (*_VLLM, "le"),
    ),
}
"""Metrics that are not ours: Prometheus' own, kube-state-metrics' where it is there, and what the rules over
vLLM's own metrics read.
"""


def metric_labels(metric: str) -> tuple[str, ...]:
    """Labels of series of ``metric``, without those of the scrape. Raises ``KeyError`` for an unknown metric."""
    return EXTERNAL[metric] if metric in EXTERNAL else BY_NAME[metric.removeprefix(PREFIX)].labels


def walk(node: pp.Expr) -> Iterator[pp.Expr]:
    """``node`` and everything below it."""
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        child = getattr(node, name, None)
        if isinstance(child, pp.Expr):
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


def selectors(text: str) -> Iterator[pp.VectorSelector]:
    return (node for node in walk(pp.parse(text)) if isinstance(node, pp.VectorSelector))


def metrics(text: str) -> set[str]:
    return {str(selector.name) for selector in selectors(text)}


def result_labels(text: str, recordings: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return _labels(pp.parse(text), recordings)


def _labels(node: pp.Expr, recordings: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if isinstance(node, pp.VectorSelector):
        name = str(node.name)
        return recordings[name] if name in recordings else frozenset(metric_labels(name)) | SCRAPE
    if isinstance(node, pp.MatrixSelector):
        return _labels(node.vector_selector, recordings)
    if isinstance(node, pp.AggregateExpr):
        return _aggregated(node, recordings)
    if isinstance(node, pp.Call):
        if node.func.name in LABELLESS:
            return frozenset()
        vector = next(arg for arg in node.args if not isinstance(arg, pp.NumberLiteral))
        added = {node.args[1].val} if node.func.name in ("label_replace", "label_join") else set()
        removed = {"le"} if node.func.name == "histogram_quantile" else set()
        return _labels(vector, recordings) - removed | added
    if isinstance(node, pp.BinaryExpr):
        return _combined(node, recordings)
    if isinstance(node, pp.ParenExpr | pp.UnaryExpr | pp.SubqueryExpr):
        return _labels(node.expr, recordings)
    return frozenset()  # a number or a text


def _aggregated(node: pp.AggregateExpr, recordings: Mapping[str, frozenset[str]]) -> frozenset[str]:
    inner = _labels(node.expr, recordings)
    if str(node.op) in ("topk", "bottomk"):
        return inner
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    if str(node.op) == "count_values":
        return inner & named | {node.param.val}
    return inner & named if node.modifier.type == pp.AggModifierType.By else inner - named


def _combined(node: pp.BinaryExpr, recordings: Mapping[str, frozenset[str]]) -> frozenset[str]:
    left, right = _labels(node.lhs, recordings), _labels(node.rhs, recordings)
    if isinstance(node.rhs, pp.NumberLiteral) or _is_scalar(node.rhs):
        return left
    if isinstance(node.lhs, pp.NumberLiteral) or _is_scalar(node.lhs):
        return right
    operator = str(node.op)
    if operator in ("and", "unless"):
        return left
    if operator == "or":  # an alert with several causes names its subject by each; unit tests hold the labels of each
        return left | right
    modifier = node.modifier
    added = frozenset((modifier.group_labels or ()) if modifier else ())
    if modifier and modifier.card == pp.VectorMatchCardinality.ManyToOne:
        return left | added
    if modifier and modifier.card == pp.VectorMatchCardinality.OneToMany:
        return right | added
    if modifier and modifier.matching:
        return frozenset(modifier.matching.labels)
    return left & right


def _is_scalar(node: pp.Expr) -> bool:
    if isinstance(node, pp.ParenExpr | pp.UnaryExpr):
        return _is_scalar(node.expr)
    if isinstance(node, pp.BinaryExpr):
        return _is_scalar(node.lhs) and _is_scalar(node.rhs)
    return isinstance(node, pp.NumberLiteral) or (isinstance(node, pp.Call) and node.func.name in ("time", "scalar"))
