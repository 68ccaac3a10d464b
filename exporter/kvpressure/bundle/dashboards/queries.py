"""What panels ask for: expressions over the chosen engines and pools, and the name of a series in a legend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvpressure.bundle.spec import SUBJECTS

Json = dict[str, Any]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
CLUSTER: Final = 'cluster=~"$cluster"'
NAMESPACE: Final = f'{CLUSTER},namespace=~"$namespace"'
CONTAINER: Final = f'{NAMESPACE},pod=~"$pod"'
MODEL: Final = f'{NAMESPACE},model_name=~"$model"'
ENGINE: Final = f'{MODEL},pod=~"$pod"'
BY_ENGINE: Final = ", ".join(SUBJECTS["engine"])
BY_POOL: Final = ", ".join(SUBJECTS["pool"])
POD: Final = ", ".join(SUBJECTS["pod"])
EXPORTER: Final = ", ".join(SUBJECTS["exporter"])
OF_ENGINE: Final = ("cluster", "namespace", "pod", "engine")
OF_POOL: Final = ("cluster", "namespace", "pool", "model_name", "role")
OF_EXPORTER: Final = ("cluster", "node", "instance")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One PromQL query of a panel. ``named``: labels that name a series in the legend, before ``legend``. ``table``:
    current values as a table. ``optional``: why it may return nothing on a healthy system, e.g. "every GPU answers";
    ``part``: what the panel then lacks, if it shows more. A table names the column itself.
    """

    expr: str
    legend: str = ""
    named: tuple[str, ...] = ()
    table: bool = False
    optional: str = ""
    part: str = ""

    def model(self, index: int) -> Json:
        """The query as Grafana's JSON, with refId A, B, ..."""
        legend = f"{{{{series}}}} {self.legend}".strip() if self.named else self.legend
        shape = {"format": "table"} if self.table else {"format": "time_series", "legendFormat": legend}
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": named(self.expr, *self.named) if self.named else self.expr,
            "instant": self.table,
            "range": not self.table,
            **shape,
        }


def named(expr: str, *labels: str) -> str:
    """``expr`` with the label ``series``: ``labels`` that are set, joined by "/". A rank 0 at the end is left out, so
    that engines without ranks are named by their pod.
    """
    listed = ", ".join(f'"{label}"' for label in labels)
    joined = f'label_join({expr}, "series", "/", {listed})'
    return f'label_replace({joined}, "series", "$1", "series", "/*(.*?)/*(/0)?/*")'


def engine(metric: str, more: str = "", by: str = "") -> str:
    """``metric`` of the selected engines, one series per engine (and ``by``), also if several exporters scrape it."""
    labels = ENGINE + (f",{more}" if more else "")
    return f"max by ({BY_ENGINE}{', ' + by if by else ''}) (kvpressure_{metric}{{{labels}}})"


def up(by: str) -> str:
    """Whether the engines of the chosen pools answer: the one place that knows to which pool a pod belongs."""
    return f'max by ({by}) (kvpressure_engine_up{{{NAMESPACE},pool=~"$pool"}})'


def pooled(expr: str, *more: str) -> str:
    """``expr``, by pod, with the labels of its pool (and ``more`` of its engines); only of the chosen pools."""
    added = ", ".join(("pool", "role", *more))
    of_pod = f"topk by ({POD}) (1, {up(f'{POD}, {added}')} >= bool 0)"  # two exporters may see it
    return f"{expr} * on ({POD}) group_left ({added}) {of_pod}"


def by_pool(aggregation: str, metric: str, more: str = "") -> str:
    """``metric`` of the chosen engines, once an engine, put together by pool."""
    labels = MODEL + (f",{more}" if more else "")
    engines = f"max by ({BY_ENGINE}) (kvpressure_{metric}{{{labels}}})"
    return f"{aggregation} by ({BY_POOL}) ({pooled(engines)})"


def at_end(expr: str) -> str:
    """The same at the end of the displayed time range, so that a graph keeps its lines over its whole width."""
    return expr.replace("}", "} @ end()")
