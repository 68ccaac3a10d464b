"""Which engines come first: by verdict as on the exporter's page, then by how many requests wait.

The rank is taken at the end of the time shown (``@ end()``), so that a graph keeps the same lines over its whole width,
and a board over a thousand engines draws a bounded number of them.
"""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import BY_ENGINE, ENGINE, POD, TOP, PanelQuery, engine, gpus_of_workers
from kvpressure.publish.page.view import ORDER

RANKS: Final = {verdict: rank for rank, verdict in enumerate(reversed(ORDER), 1)}  # the larger, the worse


def verdict_rank(at: str = "") -> str:
    """The rank of each chosen engine's verdict, one series an engine; ``at`` is a time modifier."""
    ranked = (f'{rank} * kvpressure_verdict{{{ENGINE},verdict="{verdict}"}}{at}' for verdict, rank in RANKS.items())
    return f"max by ({BY_ENGINE}) ({' or '.join(ranked)})"


def trouble() -> str:
    """Verdict's rank plus a fraction that grows with the queue: the order of engines, the largest first."""
    waiting = f"max by ({BY_ENGINE}) (kvpressure_requests_waiting{{{ENGINE}}} @ end())"
    unknown = (
        f"max by ({BY_ENGINE}) (0 * kvpressure_verdict{{{ENGINE}}} @ end())"  # an engine that is not read has no queue
    )
    return f"({verdict_rank(' @ end()')} + on ({BY_ENGINE}) ({waiting} / ({waiting} + 1) or {unknown}))"


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
