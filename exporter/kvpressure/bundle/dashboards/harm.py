"""Which engines and pools come first, and the colour each has: those that do not answer, then those a page fires about,
then by verdict as on the exporter's page, then by how many requests wait.

The order is taken at the end of the time shown, so that a graph keeps the same lines over its whole width, and a
dashboard over a thousand engines draws a bounded number of them.
"""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    BY_POOL,
    CLUSTER,
    ENGINE,
    MODEL,
    OF_ENGINE,
    POD,
    Json,
    PanelQuery,
    at_end,
    by_pool,
    engine,
    pooled,
    up,
)
from kvpressure.publish.collector import RANKS

TOP: Final = 20  # engines, or other subjects, that a panel shows
YELLOW, ORANGE, RED, BLUE = "#F0E442", "#E69F00", "#D55E00", "#56B4E9"
WINE, PURPLE, GREY = "#882255", "#CC79A7", "#999999"
"""Okabe and Ito's palette, and Tol's wine: distinguished with any colour vision, and by their lightness."""
VERDICTS: Final = {
    "idle": ("idle", GREY),
    "healthy": ("healthy", BLUE),
    "kv_pressure": ("KV pressure", ORANGE),
    "concurrency_limited": ("concurrency limited", YELLOW),
    "compute_bound": ("compute bound", YELLOW),
    "host_bound": ("host bound", YELLOW),
    "transfer_bound": ("transfer bound", YELLOW),
    "stalled": ("stalled", RED),
    "unknown": ("unknown", PURPLE),
}
PAGED, SILENT = 10, 20  # added to the rank of a verdict: a page fires; nothing answers
FIRING: Final = 'alertstate="firing",kvpressure_family=~".+"'
PAGE: Final = f'{FIRING},severity="critical"'
LISTED: Final = f'{FIRING},severity!~"info|none"'


def order_of_engines() -> str:
    """A number for each chosen engine, the larger the worse. A page about a pod is about all ranks in it."""
    trouble = f"max by ({BY_ENGINE}) (kvpressure_engine_trouble{{{ENGINE}}})"
    return f"{trouble} + on ({BY_ENGINE}) {SILENT} * (1 - {up(BY_ENGINE)}) {_paged()}"


def _paged() -> str:
    """What is added for pods that a page fires about; 0 for the others."""
    pages = f'group by ({POD}) (ALERTS{{{PAGE},pod!=""}})'
    return f"+ on ({POD}) group_left () ({PAGED} * {pages} or 0 * {up(POD)})"


def order_of_pools() -> str:
    """A number for each pool, the larger the worse; also for a pool of which only alerts are left."""
    return f"max by ({BY_POOL}) ({_by_engines()} or {PAGED} * {of_pools(PAGE)}) or 0 * {of_pools(LISTED)}"


def _by_engines() -> str:
    """The same of pools that have engines, by their engines alone."""
    silent = f"({by_pool('max', 'engine_up')} == 0) + {SILENT}"
    return f"{silent} or {pooled(f'(kvpressure_engine_trouble{{{MODEL}}} {_paged()})')}"


def of_pools(alerts: str) -> str:
    """1 for each pool that such an alert is about as a whole."""
    chosen = f'{MODEL},pool=~"$pool|",pod="",model_name!=""'
    return f"group by ({BY_POOL}) (ALERTS{{{alerts},{chosen}}})"


def states() -> list[Json]:
    """Value mappings of both orders. Whatever a page fires about is red, and nothing is ever green."""
    bands = [(float(RANKS[verdict]), *shown) for verdict, shown in VERDICTS.items()]
    bands += [(PAGED + rank, f"page · {text}", RED) for rank, text, _ in bands]
    bands += [(0.0, "not observed", PURPLE), (float(PAGED), "page", RED)]
    ranges = [(low, low + 0.9999, text, color) for low, text, color in bands]
    return [
        {"type": "range", "options": {"from": low, "to": high, "result": {"text": text, "color": color}}}
        for low, high, text, color in (*ranges, (float(SILENT), 2.0 * SILENT, "does not answer", WINE))
    ]


def worst(expr: str, count: int = TOP, by: str = BY_ENGINE) -> str:
    """``expr`` for the ``count`` engines in most trouble, or by the labels of their pods."""
    return f"{expr} and on ({by}) topk({count}, {at_end(order_of_engines())})"


def worst_pools(expr: str) -> str:
    """``expr`` for the pools in most trouble."""
    return f"{expr} and on ({BY_POOL}) topk({TOP}, max by ({BY_POOL}) ({at_end(_by_engines())}))"


def line(metric: str, legend: str = "", more: str = "", by: str = "", optional: str = "", part: str = "") -> PanelQuery:
    """``metric`` of the engines in most trouble over time, a line an engine (and ``by``)."""
    legend = f"{{{{{by}}}}} {legend}".strip() if by else legend
    return PanelQuery(worst(engine(metric, more, by)), legend, OF_ENGINE, optional=optional, part=part)


def gpu_line(metric: str, legend: str = "", optional: str = "", part: str = "") -> PanelQuery:
    """``metric`` of the GPUs of the engines in most trouble, named by the pod that holds them, on whichever node."""
    workers = (
        f'label_replace(kvpressure_worker_gpu_info{{{CLUSTER},namespace=~"$namespace"}}, "worker", "$1", "pod", "(.*)")'
        " * on (cluster, namespace, group) group_left (pod, model_name, engine)"
        f" topk by (cluster, namespace, group) (1, kvpressure_engine_group_info{{{ENGINE}}})"
    )
    held = worst(f"(kvpressure_engine_gpu_info{{{ENGINE}}} or {workers})")
    value = f'topk by (cluster, uuid) (1, kvpressure_{metric}{{{CLUSTER},uuid=~"$gpu"}})'
    joined = f"({held}) * on (cluster, uuid) group_left (gpu) {value}"
    pod = ("cluster", "namespace", "pod", "worker")
    expr = f"max by ({', '.join(pod)}, gpu, uuid) ({joined})"
    return PanelQuery(expr, f"GPU {{{{gpu}}}} {legend}".strip(), pod, optional=optional, part=part)
