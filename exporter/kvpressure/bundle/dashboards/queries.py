"""What panels ask for: expressions over the chosen engines and GPUs, and which engines come first.

First is by verdict as on the exporter's page, then by how many requests wait. The rank is taken at the end of the time
shown (``@ end()``), so that a graph keeps the same lines over its whole width, and a dashboard over a thousand engines
draws a bounded number of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
ENGINE: Final = 'cluster=~"$cluster",namespace=~"$namespace",model_name=~"$model",pod=~"$pod"'
CONTAINER: Final = 'cluster=~"$cluster",namespace=~"$namespace",pod=~"$pod"'
GPU: Final = 'cluster=~"$cluster",uuid=~"$gpu"'
BY_ENGINE: Final = "cluster, namespace, pod, model_name, engine"
POD: Final = "cluster, namespace, pod"
TOP: Final = 20  # engines, or other subjects, that a panel shows


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One PromQL query of a panel. ``now``: current values; ``table``: the same as a table; ``heat``: buckets over
    time. ``optional``: why it may return nothing on a healthy system, e.g. "every GPU answers"; ``part``: what the
    panel then lacks, if it shows more. A table names the column itself.
    """

    expr: str
    legend: str = ""
    table: bool = False
    optional: str = ""
    part: str = ""
    heat: bool = False
    now: bool = False

    def model(self, index: int) -> Json:
        """The query as Grafana's JSON, with refId A, B, ..."""
        now = self.now or self.table
        shape = (
            {"format": "table"}
            if self.table
            else {"format": "heatmap" if self.heat else "time_series", "legendFormat": self.legend}
        )
        kind = {"instant": now, "range": not now, **shape}
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expr,
            **kind,
        }


def engine(metric: str, more: str = "", by: str = "") -> str:
    """``metric`` of the selected engines, one series per engine (and ``by``), also if several exporters scrape it."""
    labels = ENGINE + (f",{more}" if more else "")
    return f"max by ({BY_ENGINE}{', ' + by if by else ''}) (kvpressure_{metric}{{{labels}}})"


def some(expr: str) -> str:
    """The ``TOP`` largest series."""
    return f"topk({TOP}, {expr})"


def at_end(expr: str) -> str:
    """The same at the end of the displayed time range, so that a graph keeps its lines over its whole width."""
    return expr.replace("})", "} @ end())")


def top(base: str, expr: str) -> str:
    """``expr`` for the ``TOP`` engines with the largest ``base``."""
    return f"{expr} and on ({BY_ENGINE}) topk({TOP}, {base})"


def gpus_of_workers(engines: str) -> str:
    """One series per GPU that worker pods on other nodes hold for ``engines`` (``kvpressure_engine_group_info``)."""
    return f"gpu:kvpressure_worker:present and on (cluster, namespace, group) {engines}"


def gpu(metric: str) -> str:
    """``metric`` of the selected engines' GPUs."""
    return (
        f"max by (cluster, uuid, gpu) (kvpressure_{metric}{{{GPU}}}) "
        f"and on (cluster, uuid) (kvpressure_engine_gpu_info{{{ENGINE}}} "
        f"or {gpus_of_workers(f'kvpressure_engine_group_info{{{ENGINE}}}')})"
    )


def verdict_rank() -> str:
    """Rank of each chosen engine's verdict, one series an engine."""
    return f"floor(max by ({BY_ENGINE}) (kvpressure_engine_trouble{{{ENGINE}}}))"


def trouble() -> str:
    """The order of engines at the end of the time shown, the largest first."""
    return f"max by ({BY_ENGINE}) (kvpressure_engine_trouble{{{ENGINE}}} @ end())"


def worst(expr: str, count: int = TOP) -> str:
    """``expr`` for the ``count`` engines in most trouble."""
    return f"{expr} and on ({BY_ENGINE}) topk({count}, {trouble()})"


def worst_pods(expr: str) -> str:
    """``expr`` for the pods of the engines in most trouble."""
    return f"{expr} and on ({POD}) topk({TOP}, {trouble()})"


def worst_gpus(expr: str) -> str:
    """``expr``, one series a GPU, for the GPUs of the engines in most trouble, on whichever nodes they are."""
    of_workers = gpus_of_workers(f"({worst(f'kvpressure_engine_group_info{{{ENGINE}}}')})")
    return f"{expr} and on (cluster, uuid) ({worst(f'kvpressure_engine_gpu_info{{{ENGINE}}}')} or {of_workers})"


def worst_model(expr: str) -> str:
    """``expr`` for the model of the engine in most trouble: buckets of models differ, so that they must not
    be added up.
    """
    return f"{expr} and on (model_name) topk(1, {trouble()})"


def lines(metric: str, more: str = "", by: str = "") -> str:
    """``metric`` of the engines in most trouble, one series an engine (and ``by``): what graphs draw."""
    return worst(engine(metric, more, by))


def quantiles(metric: str, more: str = "", *, which: tuple[str, ...] = ("0.5", "0.95", "0.99")) -> list[PanelQuery]:
    """A line for each quantile, named p50, p95 and so on."""
    label = 'quantile="{}"' + (f",{more}" if more else "")
    return [
        PanelQuery(lines(metric, label.format(quantile)), f"{{{{pod}}}} p{100 * float(quantile):.0f}")
        for quantile in which
    ]
