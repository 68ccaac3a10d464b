"""The dashboard over all models: pools sorted by harm, what users feel, capacity, GPUs, and what is not watched."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import (
    FILLED,
    KV_FULL,
    MEMORY_FULL,
    OF_FLEET,
    SHARE,
    Dashboard,
    DashboardContext,
    firing,
    fixed,
)
from kvpressure.bundle.dashboards.harm import (
    ORANGE,
    PAGE,
    RED,
    SILENT,
    TOP,
    VERDICTS,
    WINE,
    of_pools,
    order_of_pools,
    states,
    worst_pools,
)
from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    BY_POOL,
    CLUSTER,
    EXPORTER,
    MODEL,
    NAMESPACE,
    OF_EXPORTER,
    OF_POOL,
    POD,
    PanelQuery,
    by_pool,
    pooled,
    up,
)

NO_FAILURE: Final = "hardly any request fails, or no engine answers"
NO_OBJECTIVE: Final = "no objective is set (thresholds objective_*_ratio)"
_EXPORTER_COLUMNS: Final = {"node": "Node", "instance": "Exporter"}
_P95: Final = 'phase="ttft",quantile="0.95"'


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    board = Dashboard(
        "kvpressure / Fleet",
        "All pools, those in most trouble first; then GPUs, and what is not watched.",
        site,
        OF_FLEET,
    )
    _tiles(board)
    _pools(board)
    _over_time(board)
    board.row("What users feel")
    _users(board)
    board.row("GPUs")
    _gpus(board)
    board.row("What is not watched")
    _unwatched(board)
    return board


def _tiles(board: Dashboard) -> None:
    def count(expr: str) -> str:
        return f"count({expr}) or vector(0)"

    bad = [(RED, 1)]
    board.tile("Pages firing", "Firing alerts that wake somebody.", count(firing(OF_FLEET, PAGE)), bad)
    board.tile(
        "Pools that do not answer",
        "Pools of which no engine answers.",
        count(f"({order_of_pools()}) >= {SILENT}"),
        bad,
    )
    board.tile(
        "Engines that do not answer",
        "Engines whose metrics cannot be scraped.",
        count(f"{up(BY_ENGINE)} == 0"),
        [(ORANGE, 1)],
    )


def _missing() -> str:
    expected, reports = (f"node:kvpressure_{kind}:present{{{CLUSTER}}}" for kind in ("expected", "exporter"))
    return f"{expected} unless on (cluster, node) {reports}"


def _pages() -> str:
    """Number of pages about each pool and its pods."""
    alerts = f'ALERTS{{{PAGE},{NAMESPACE},pod!=""}}'
    return f"count by ({BY_POOL}) ({pooled(alerts, 'model_name')} or {of_pools(PAGE)})"


def _pools(board: Dashboard) -> None:
    queries = [
        PanelQuery(order_of_pools()),
        PanelQuery(_pages(), optional="no page fires"),
        PanelQuery(by_pool("sum", "engine_up")),
        PanelQuery(by_pool("count", "engine_up")),
        PanelQuery(by_pool("max", "latency_seconds", _P95)),
        PanelQuery(by_pool("max", "requests_lost_ratio"), optional=NO_FAILURE),
        PanelQuery(by_pool("sum", "requests_waiting")),
        PanelQuery(by_pool("max", "requests_waiting")),
        PanelQuery(by_pool("avg", "kv_cache_used_ratio")),
        PanelQuery(by_pool("max", "kv_cache_used_ratio_max")),
        PanelQuery(by_pool("avg", "finding", 'finding="saturated"')),
        PanelQuery(by_pool("avg", "finding", 'finding="spare_capacity"')),
    ]
    columns = {
        "namespace": "Namespace",
        "pool": "Pool",
        "role": "Role",
        "model_name": "Model",
        "cluster": "Cluster",
        "Value #A": "State of the worst engine",
        "Value #B": "Pages",
        "Value #C": "Answer",
        "Value #D": "Engines",
        "Value #E": "First token p95",
        "Value #F": "Failed",
        "Value #G": "Waiting",
        "Value #H": "Most on one",
        "Value #I": "KV mean",
        "Value #J": "KV fullest",
        "Value #K": "Saturated",
        "Value #L": "Spare",
    }
    narrow = ("Pages", "Answer", "Engines", "Failed", "Waiting", "KV mean", "KV fullest", "Saturated", "Spare")
    row = {"namespace": "${__data.fields.Namespace}", "pool": "${__data.fields.Pool}"}
    shown = {
        "Pool": [board.drill("kvpressure-incident", "Incident: only this pool", **row)],
        "State of the worst engine": [("mappings", states()), ("custom.width", 210), FILLED],
        "Pages": board.marked((RED, 1)),
        "Answer": [("thresholds", board.steps([("text", 1)], WINE)), *board.marked()[1:]],
        "First token p95": [("unit", "s"), *board.marked((ORANGE, "ttft_floor_seconds"))],
        "Failed": [*SHARE, *board.marked((ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio"))],
        "Waiting": board.marked((ORANGE, 1)),
        "KV mean": [*SHARE, *board.marked(*KV_FULL)],
        "KV fullest": [*SHARE, *board.marked(*KV_FULL)],
        "Saturated": [*SHARE, *board.marked((ORANGE, "most_ratio"))],
        "Spare": SHARE,
    }
    board.table(
        "Pools, worst first",
        "Pools of which no engine answers come first, then those that a page fires about, then by the verdict and queue"
        " of the worst engine. Saturated, Spare: share of its engines where requests wait for capacity, or that could"
        " take more; a saturated decode pool beside a prefill pool with spare capacity lacks decode replicas. Click a"
        " pool to open the incident dashboard.",
        queries,
        columns,
        shown | {name: [("custom.width", 80), *shown.get(name, ())] for name in narrow},
        order="Value #A",
        size=(24, 9),
    )


def _over_time(board: Dashboard) -> None:
    board.states(
        "State of the worst engine over time",
        "One bar for each pool: the verdict of its worst engine, or that a page fires about it, or that no engine"
        " answers.",
        [PanelQuery(f"floor({order_of_pools()})", named=OF_POOL)],
        states(),
        size=(12, 8),
        shown="auto",
    )
    verdicts = f"max by ({BY_ENGINE}, verdict) (kvpressure_verdict_confidence{{{MODEL}}})"
    board.graph(
        "Engines by verdict",
        "How many engines had each verdict.",
        [PanelQuery(f"count by (verdict) ({verdicts})", "{{verdict}}")],
        "short",
        overrides=[fixed(f"/^{verdict}$/", color) for verdict, (_, color) in VERDICTS.items()],
        size=(12, 8),
        stacked=True,
    )


def _by_pool(metric: str, aggregation: str, legend: str = "", more: str = "", optional: str = "") -> PanelQuery:
    return PanelQuery(worst_pools(by_pool(aggregation, metric, more)), legend, OF_POOL, optional=optional)


def _users(board: Dashboard) -> None:
    board.graph(
        "First token p95: worst engine, and mean (dashed)",
        "p95 of the last minute: the slowest engine of each pool, and the mean over its engines.",
        [_by_pool("latency_seconds", "max", "", _P95), _by_pool("latency_seconds", "avg", "mean", _P95)],
        "s",
        [(ORANGE, "ttft_floor_seconds")],
        dashed="mean",
    )
    board.graph(
        "Failed requests: worst engine, and mean (dashed)",
        "Share of requests of the last five minutes that failed, were aborted by the server or given up by clients.",
        [
            _by_pool("requests_lost_ratio", "max", optional=NO_FAILURE),
            _by_pool("requests_lost_ratio", "avg", "mean", optional=NO_FAILURE),
        ],
        "percentunit",
        [(ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio")],
        dashed="mean",
    )
    board.graph(
        "Waiting: sum, and most on one engine (dashed)",
        "Requests that wait. If one engine has most of them, the load is not balanced.",
        [_by_pool("requests_waiting", "sum"), _by_pool("requests_waiting", "max", "most")],
        "short",
        dashed="most",
    )
    board.graph(
        "KV cache: fullest engine, and mean (dashed)",
        "Highest KV cache usage of the last minute, and the mean usage of all engines of the pool.",
        [_by_pool("kv_cache_used_ratio_max", "max"), _by_pool("kv_cache_used_ratio", "avg", "mean")],
        "percentunit",
        KV_FULL,
        dashed="mean",
        top=1,
    )
    board.graph(
        "Engines that answer",
        "Where a line ends, no engine of that pool is known any more.",
        [_by_pool("engine_up", "sum")],
        "short",
    )
    burns = f"max by ({BY_POOL}, objective) (pool:kvpressure_objective_burn_rate:1h{{{MODEL}}})"
    board.graph(
        "Error budget: burn rate over an hour",
        "At 2, the error budget is spent twice as fast as allowed.",
        [PanelQuery(worst_pools(burns), "{{objective}}", OF_POOL, optional=NO_OBJECTIVE)],
        "none",
        [(ORANGE, "objective_slow_burn"), (RED, "objective_fast_burn")],
    )


def _gpus(board: Dashboard) -> None:
    demand = f"by ({EXPORTER}) (kvpressure_gpu_memory_demand_ratio{{{CLUSTER}}})"
    gpus = f"kvpressure_gpu_up{{{CLUSTER}}}"
    seen = f"sum by ({EXPORTER}) ({gpus})"
    known = f"(sum by ({EXPORTER}) (kvpressure_gpus_expected{{{CLUSTER}}}) or count by ({EXPORTER}) ({gpus}))"
    first = f"topk({TOP}, ({known} - {seen} > 0) + 1 or max {demand})"
    listed = f"and on ({EXPORTER}) {first}"
    board.table(
        "Nodes: GPUs that do not answer, then fullest GPU",
        "Required memory of the GPUs of each node; required memory means used memory minus the unused part of the KV"
        " pool.",
        [
            PanelQuery(first),
            PanelQuery(f"{known} {listed}"),
            PanelQuery(f"{seen} {listed}"),
            PanelQuery(f"avg {demand} {listed}"),
            PanelQuery(f"max {demand} {listed}"),
        ],
        {**_EXPORTER_COLUMNS, "Value #B": "GPUs", "Value #C": "Answer", "Value #D": "Mean", "Value #E": "Fullest"},
        {name: [*SHARE, *board.marked(*MEMORY_FULL)] for name in ("Mean", "Fullest")},
        order="Value #A",
        size=(12, 8),
    )
    by = f"{EXPORTER}, gpu, uuid"
    xids = f"max by ({by}, xid) (kvpressure_gpu_xid_last_timestamp_seconds{{{CLUSTER}}}) * 1000"
    slowed = f"max by ({by}, reason) (kvpressure_gpu_throttled{{{CLUSTER}}} == 1)"
    lost = f"max by ({by}) (kvpressure_gpu_up{{{CLUSTER}}} == 0)"
    faults = (
        f'label_replace({lost}, "what", "does not answer", "", "")'
        f' or label_replace({slowed}, "what", "clocks reduced: $1", "reason", "(.*)")'
    )
    events = f'label_replace({xids}, "what", "XID $1", "xid", "(.*)")'
    board.table(
        "GPUs with a fault",
        "GPUs that do not answer, whose clocks are reduced, or that had an XID event since the exporter started.",
        [
            PanelQuery(f"topk({TOP}, {faults})", optional="every GPU that is watched answers at full clocks"),
            PanelQuery(f"topk({TOP}, {events})", optional="no XID event occurred"),
        ],
        {**_EXPORTER_COLUMNS, "gpu": "GPU", "uuid": "UUID", "what": "What", "Value #B": "Last"},
        {
            "GPU": [("custom.width", 50)],
            "UUID": [("custom.width", 290)],
            "Last": [("unit", "dateTimeFromNow"), ("custom.width", 110)],
        },
        size=(12, 8),
    )


def _unwatched(board: Dashboard) -> None:
    def listed(title: str, about: str, expr: str, columns: dict[str, str], empty: str, size: tuple[int, int]) -> None:
        board.table(title, about, [PanelQuery(f"topk({TOP}, {expr})", optional=empty)], columns, size=size)

    pod = {"namespace": "Namespace", "pod": "Pod"}
    listed(
        "Nodes without an exporter",
        "Ready nodes with GPUs or pods of a model, on which no exporter reports.",
        _missing(),
        {"node": "Node", "cluster": "Cluster"},
        "every node is watched, or kube-state-metrics is not scraped",
        (4, 5),
    )
    listed(
        "Containers that are not scraped",
        "Containers that have a GPU or look like an inference server, but are not scraped, and why.",
        f"max by ({POD}, container, result, reason)"
        f' (kvpressure_container_discovery_info{{{NAMESPACE},result!="engine"}})',
        {**pod, "container": "Container", "result": "Result", "reason": "Why"},
        "no such container is found, or the exporter does not read pods",
        (8, 5),
    )
    listed(
        "Exporters with a problem",
        "Sources that are down, items that an exporter left out after an internal failure or because of a limit, and"
        " flight recorders that do not keep up.",
        _impaired(),
        {**_EXPORTER_COLUMNS, "what": "What"},
        "no exporter reports a problem",
        (7, 5),
    )
    listed(
        "Pods that opted out of alerts",
        "Pods whose annotation or label kvpressure.io/alerts turns alerts off, or limits alerts to tickets.",
        f"max by ({POD}, alerts) (kvpressure_container_alerts_info{{{NAMESPACE}}})",
        {**pod, "alerts": "Alerts"},
        "no pod opted out",
        (5, 5),
    )


def _impaired() -> str:
    """What an exporter reports of itself, in the label ``what``."""
    problems = (
        ("kvpressure_source_up{{{}}} == 0", "source down: $1", "source"),
        ("rate(kvpressure_isolated_failures_total{{{}}}[$__rate_interval]) > 0", "internal failure: $1", "name"),
        ("kvpressure_page_cut{{{}}} > 0", "left out of a scrape: $1", "reason"),
        ("kvpressure_recorder_up{{{}}} == 0", "flight recorder does not keep up", ""),
    )
    return (
        f"max by ({', '.join((*OF_EXPORTER, 'what'))}) ("
        + " or ".join(
            f'label_replace({expr.format(CLUSTER)}, "what", "{text}", "{label}", "(.*)")'
            for expr, text, label in problems
        )
        + ")"
    )
