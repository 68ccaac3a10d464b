"""Which engines come first: by verdict as on the exporter's page, then by how many requests wait.

The rank is taken at the end of the time shown (``@ end()``), so that a graph keeps the same lines over its whole width,
and a dashboard over a thousand engines draws a bounded number of them.
"""

from __future__ import annotations

from kvpressure.bundle.dashboards.builder import BY_ENGINE, ENGINE, POD, TOP, PanelQuery, engine, gpus_of_workers


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
