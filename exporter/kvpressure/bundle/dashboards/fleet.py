"""The fleet dashboard: models and replicas, verdicts, error budgets, nodes and exporters.

Views of models read recording rules, so that a thousand nodes cost as little as ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvpressure.bundle.dashboards.builder import (
    NOT_A_POD,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    DashboardContext,
    column,
    dashed,
    drill,
    matching,
    steps,
    table,
    timeseries,
)
from kvpressure.bundle.dashboards.first_screen import COLORED, RATIO, VERDICTS
from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    CONTAINER,
    ENGINE,
    GPU,
    TOP,
    Json,
    PanelQuery,
    at_end,
    engine,
    some,
)

MODEL: Final = 'cluster=~"$cluster",namespace=~"$namespace",model_name=~"$model"'
BY_MODEL: Final = "cluster, namespace, model_name"
BY_POOL: Final = "cluster, namespace, pool, model_name, role"
BY_OBJECTIVE: Final = f"{BY_POOL}, objective"
POOL: Final = "{{namespace}}/{{model_name}} {{pool}}"
CLUSTER: Final = 'cluster=~"$cluster"'
NO_OBJECTIVE: Final = "no objective is set (thresholds objective_*_ratio)"
NO_KUBE_STATE_METRICS: Final = "kube-state-metrics is not scraped"
NO_NODE: Final = "exporters are scraped without a node label"
NO_RECORDER: Final = "no exporter has a flight recorder (record.directory)"
NOTHING_FAILED: Final = "nothing failed"


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    dashboard = Dashboard(
        "kvpressure / Fleet",
        "All models and nodes: missing capacity and remaining error budget of each model, and nodes without an"
        " exporter.",
    )
    dashboard.row("Models")
    dashboard.add(_models(site), 24, 9)
    dashboard.add(_verdicts(site), 8, 8)
    dashboard.add(_pressed(site), 8, 8)
    dashboard.add(_headroom(site), 8, 8)
    dashboard.row("Replicas")
    dashboard.add(_workloads(site), 14, 8)
    dashboard.add(_replicas_up(site), 10, 8)
    dashboard.row("Error budgets")
    dashboard.add(_burn(site), 8, 8)
    dashboard.add(_budget_left(site), 8, 8)
    dashboard.add(_missed(site), 8, 8)
    dashboard.add(_objectives(site), 24, 6)
    dashboard.row("Nodes and GPUs")
    dashboard.add(_nodes(site), 14, 8)
    dashboard.add(_unwatched(site), 5, 8)
    dashboard.add(_throttled(site), 5, 8)
    dashboard.row("What watches, and what is left out")
    _watchers(site, dashboard)
    return dashboard


def _by_pool(metric: str) -> str:
    """A recording rule of the selected models, also where it is evaluated twice."""
    return f"max by ({BY_POOL}) ({metric}{{{MODEL}}})"


def _by_model(metric: str, pools: str = "max") -> str:
    """The same by model; ``pools``: how its pools are put together (default: the one with the largest value)."""
    return f"{pools} by ({BY_MODEL}) ({_by_pool(metric)})"


def _of_model(expr: str) -> str:
    """Sum over the selected engines, by model."""
    return f"sum by ({BY_MODEL}) ({expr})"


def _models(site: DashboardContext) -> Json:
    firing = (
        f'count by ({BY_MODEL}) (ALERTS{{alertstate="firing",kvpressure_family=~".+",severity=~"critical|warning",'
        f'{MODEL},model_name!=""}})'
    )
    stalled = engine("verdict", 'verdict="stalled"')
    values = [
        (_by_model("pool:kvpressure_engines:count", "sum"), ""),
        (f"count by ({BY_MODEL}) ({engine('engine_up')} == 0)", "every engine answers"),
        (_by_model("pool:kvpressure_engines_under_pressure:ratio"), ""),
        (_of_model(stalled), ""),
        (_by_model("pool:kvpressure_kv_headroom:ratio", "min"), ""),
        (_of_model(engine("requests_waiting")), ""),
        (_by_model("pool:kvpressure_requests_finished:rate", "sum"), ""),
        (_by_model("pool:kvpressure_objective_burn_rate:1h"), NO_OBJECTIVE),
        (firing, "nothing fires"),
    ]
    queries = [PanelQuery(_most_pressed(expr), table=True, optional=why) for expr, why in values]
    columns = {
        "model_name": "Model",
        "namespace": "Namespace",
        "cluster": "Cluster",
        "Value #A": "Engines up",
        "Value #B": "Down",
        "Value #C": "Under KV pressure",
        "Value #D": "Stalled",
        "Value #E": "KV cache free",
        "Value #F": "Waiting",
        "Value #G": "Finished/s",
        "Value #H": "Budget burn",
        "Value #I": "Alerts",
    }
    bad = ("thresholds", steps(site, (RED, 1), base="text"))  # from one on
    shown: dict[str, tuple[tuple[str, object], ...]] = {
        "Under KV pressure": (*RATIO, ("thresholds", steps(site, (RED, "most_ratio"))), COLORED),
        "KV cache free": RATIO,
        "Waiting": (("thresholds", steps(site, (ORANGE, 1))), COLORED),
        "Finished/s": (("decimals", 2),),
        "Budget burn": (
            ("decimals", 1),
            ("thresholds", steps(site, (ORANGE, 1), (RED, "objective_fast_burn"))),
            COLORED,
        ),
        "Down": (bad, COLORED),
        "Stalled": (bad, COLORED),
        "Alerts": (bad, COLORED),
        "Model": (("links", [drill("kvpressure-incident", "Incident: only this model", model="${__value.raw}")]),),
    }
    return table(
        site,
        "Models",
        "Models with the largest share of engines under KV pressure, with their engines, free KV cache and queue."
        ' Column "Budget burn" is the burn rate over an hour: at 2, the error budget is spent twice as fast as allowed.'
        " A click on a model opens the incident dashboard.",
        queries,
        columns,
        [column(name, *properties) for name, properties in shown.items()],
        sort="Under KV pressure",
        alert="InferenceModelKVPressure",
    )


def _most_pressed(expr: str) -> str:
    """``expr`` for the models with the largest share of engines under KV pressure."""
    return f"{expr} and on ({BY_MODEL}) topk({TOP}, {_by_model('pool:kvpressure_engines_under_pressure:ratio')})"


def _verdicts(site: DashboardContext) -> Json:
    colors = [
        matching(f"/^{verdict}$/", ("color", {"mode": "fixed", "fixedColor": color}))
        for verdict, (_, color) in VERDICTS.items()
    ]
    return timeseries(
        site,
        "Engines by verdict",
        "How many engines were healthy, stalled, under KV pressure and so on at each moment.",
        [PanelQuery(f"topk({TOP}, sum by (verdict) ({engine('verdict', by='verdict')}) > 0)", "{{verdict}}")],
        "short",
        overrides=colors,
    )


def _pressed(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Engines under KV pressure, by pool",
        "Share of a pool's engines whose verdict is kv_pressure, for the pools with the highest share at the end of"
        " the time range.",
        [
            PanelQuery(_largest(_by_pool("pool:kvpressure_engines_under_pressure:ratio")), POOL),
        ],
        "percentunit",
        steps(site, (RED, "most_ratio")),
        "InferenceModelKVPressure",
        top=1,
    )


def _headroom(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "KV cache free, by pool",
        "Free share of the KV caches of all engines of a pool, for the pools with the lowest share.",
        [PanelQuery(_smallest(_by_pool("pool:kvpressure_kv_headroom:ratio")), POOL)],
        "percentunit",
        top=1,
    )


def _largest(expr: str) -> str:
    return f"{expr} and on ({BY_POOL}) topk({TOP}, {at_end(expr)})"


def _smallest(expr: str) -> str:
    return f"{expr} and on ({BY_POOL}) topk({TOP}, -({at_end(expr)}))"


def _workloads(site: DashboardContext) -> Json:
    by = "cluster, namespace, workload, model_name, role"
    up = f"max by ({by}) (workload:kvpressure_pods_up:count{{{MODEL}}})"
    pods = f"max by ({by}) (workload:kvpressure_pods:count{{{MODEL}}})"
    asked = (
        "max by (cluster, namespace, workload)"
        ' (workload:kvpressure_replicas_wanted:max{cluster=~"$cluster",namespace=~"$namespace"})'
    )
    wanted = f"{asked} * on (cluster, namespace, workload) group_right () ({pods} / {pods})"
    least = f"topk({TOP}, {pods} - on ({by}) {up})"
    return table(
        site,
        "Replicas by workload",
        'Workloads with the most missing pods. Column "Answer" counts pods whose engines all answer. Column "Pods"'
        ' counts existing pods. Column "Wanted" counts requested replicas (from kube-state-metrics).',
        [
            PanelQuery(f"{up} and on ({by}) {least}", table=True),
            PanelQuery(f"{pods} and on ({by}) {least}", table=True),
            PanelQuery(f"{wanted} and on ({by}) {least}", table=True, optional=NO_KUBE_STATE_METRICS),
        ],
        {
            "workload": "Workload",
            "namespace": "Namespace",
            "model_name": "Model",
            "role": "Role",
            "Value #A": "Answer",
            "Value #B": "Pods",
            "Value #C": "Wanted",
        },
        alert="InferenceCapacityLost",
    )


def _replicas_up(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Engines that answer, by pool",
        "Where a line ends, no engine of that pool answers any more.",
        [PanelQuery(_largest(_by_pool("pool:kvpressure_engines:count")), POOL)],
        "short",
        alert="InferenceModelDown",
    )


def _burn(site: DashboardContext) -> Json:
    return _by_objective(
        site,
        "Error budget: burn rate over an hour, and over six (dashed)",
        "Burn rate: at 2, the error budget is spent twice as fast as allowed. The alert fires only if the burn rate is"
        " high over both a long and a short window, such as six hours and half an hour.",
        {f"{{{{model_name}}}} {{{{pool}}}} {{{{objective}}}} {window}": _burn_rate(window) for window in ("1h", "6h")},
        "none",
        steps(site, (YELLOW, 1), (ORANGE, "objective_slow_burn"), (RED, "objective_fast_burn")),
        overrides=[dashed("/ 6h$/")],
    )


def _budget_left(site: DashboardContext) -> Json:
    return _by_objective(
        site,
        "Error budget of three days: share spent",
        "Share of a three-day error budget that was spent in the last three days. The panel covers less time if"
        " Prometheus has less history.",
        {"{{model_name}} {{pool}} {{objective}}": _burn_rate("3d")},
        "percentunit",
    )


def _missed(site: DashboardContext) -> Json:
    missed = some(
        f"sum by ({BY_OBJECTIVE}) (max by ({BY_ENGINE}, objective)"
        f" (rate(kvpressure_objective_missed_requests_total{{{ENGINE}}}[$__rate_interval])))"
    )
    return _by_objective(
        site,
        "Requests that missed an objective",
        "Requests per second that missed their objective.",
        {"{{model_name}} {{objective}}": missed},
        "reqps",
    )


def _burn_rate(window: str) -> str:
    return _largest(f"max by ({BY_OBJECTIVE}) (pool:kvpressure_objective_burn_rate:{window}{{{MODEL}}})")


def _by_objective(
    site: DashboardContext,
    title: str,
    description: str,
    expressions: Mapping[str, str],
    unit: str,
    thresholds: Json | None = None,
    overrides: Sequence[Json] = (),
) -> Json:
    """A graph of ``expressions``, by legend; empty where no objective is set."""
    queries = [PanelQuery(expr, legend, optional=NO_OBJECTIVE) for legend, expr in expressions.items()]
    return timeseries(
        site, title, description, queries, unit, thresholds, "InferenceObjectiveBurn", overrides=overrides
    )


def _objectives(site: DashboardContext) -> Json:
    def highest(metric: str) -> str:
        return some(f"max by ({BY_OBJECTIVE}) (kvpressure_objective_{metric}{{{ENGINE}}})")

    return table(
        site,
        "Objectives",
        "Required share of good requests, and the latency up to which a request is good (the latency"
        " objective, rounded down to a bucket bound of the engine's histogram).",
        [
            PanelQuery(highest("target_ratio"), table=True, optional=NO_OBJECTIVE),
            PanelQuery(highest("bound_seconds"), table=True, optional=NO_OBJECTIVE),
        ],
        {
            "model_name": "Model",
            "namespace": "Namespace",
            "objective": "Objective",
            "Value #A": "Required",
            "Value #B": "Bound",
        },
        [column("Required", ("unit", "percentunit"), ("decimals", 2)), column("Bound", ("unit", "s"))],
        alert="InferenceObjectiveBurn",
    )


def _nodes(site: DashboardContext) -> Json:
    mine = f"kvpressure_engine_gpu_info{{{ENGINE}}}"
    up = f"max by (cluster, node, uuid) (kvpressure_gpu_up{{{GPU}}})"
    fullest = f"max by (cluster, node) (kvpressure_gpu_memory_demand_ratio{{{GPU}}})"
    ranked = f"topk({TOP}, {fullest})"
    return table(
        site,
        "Fullest nodes",
        'One row for each node, the node with the fullest GPU first. Column "Fullest GPU" shows'
        " the share of memory that is really in use (required memory) on that GPU.",
        [
            PanelQuery(ranked, table=True),
            PanelQuery(f"sum by (cluster, node) ({up}) and on (cluster, node) {ranked}", table=True),
            PanelQuery(
                f"count by (cluster, node) ({up} == 0) and on (cluster, node) {ranked}",
                table=True,
                optional="every GPU answers",
            ),
            PanelQuery(
                f"count by (cluster, node) (max by (cluster, node, namespace, pod, model_name, engine)"
                f" (kvpressure_engine_up{{{ENGINE}}})) and on (cluster, node) {ranked}",
                table=True,
                optional=NO_NODE,
            ),
            PanelQuery(
                f"count by (cluster, node) (max by (cluster, node, uuid) (kvpressure_gpu_info{{{GPU}}})"
                f" unless on (cluster, uuid) {mine}) and on (cluster, node) {ranked}",
                table=True,
                optional="every GPU has an engine",
            ),
        ],
        {
            "node": "Node",
            "cluster": "Cluster",
            "Value #B": "GPUs",
            "Value #C": "Lost",
            "Value #D": "Engines",
            "Value #E": "GPUs without engine",
            "Value #A": "Fullest GPU",
        },
        [
            column(
                "Fullest GPU",
                *RATIO,
                ("thresholds", steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio"))),
                COLORED,
            )
        ],
        alert="GpuMemoryHigh",
    )


def _unwatched(site: DashboardContext) -> Json:
    return table(
        site,
        "Nodes without an exporter",
        "Ready nodes on which no exporter reports. Each of them has GPUs or pods of a model. The list of nodes"
        " comes from kube-state-metrics.",
        [
            PanelQuery(
                f"topk({TOP}, node:kvpressure_expected:present{{{CLUSTER}}} unless on (cluster, node)"
                f" node:kvpressure_exporter:present{{{CLUSTER}}})",
                table=True,
                optional="every node is watched, or kube-state-metrics is not scraped",
            )
        ],
        {"node": "Node", "cluster": "Cluster"},
        alert="KvpressureExportersDown",
    )


def _throttled(site: DashboardContext) -> Json:
    throttled = f"topk({TOP}, max by (cluster, uuid, gpu, reason) (kvpressure_gpu_throttled{{{GPU}}} == 1))"
    return table(
        site,
        "GPUs with reduced clocks",
        "GPUs whose clocks are reduced now, and the reason that the driver reports.",
        [
            PanelQuery(
                throttled, table=True, optional="no clock is reduced, or the driver does not report reduced clocks"
            )
        ],
        {"uuid": "GPU", "reason": "Reason"},
    )


def _watchers(site: DashboardContext, dashboard: Dashboard) -> None:
    rate = "[$__rate_interval]"
    for panel in (
        timeseries(
            site,
            "Exporters that report",
            "Number of exporters that report, by cluster.",
            [PanelQuery(some(f"max by (cluster) (cluster:kvpressure_exporters:count{{{CLUSTER}}})"), "{{cluster}}")],
            "short",
            alert="KvpressureExportersDown",
        ),
        timeseries(
            site,
            "Internal failures of exporters",
            "Internal failures per second, by what the exporter was processing. The panel also shows items left out"
            " of a scrape, and web requests refused because of a limit.",
            [
                PanelQuery(
                    some(f"sum by (kind, reason) (rate(kvpressure_isolated_failures_total{{{CLUSTER}}}{rate})) > 0"),
                    "{{kind}} {{reason}}",
                    optional=NOTHING_FAILED,
                ),
                PanelQuery(
                    some(f"max by (target, reason) (kvpressure_page_cut{{{CLUSTER}}}) > 0"),
                    "{{target}} cut: {{reason}}",
                    optional=NOTHING_FAILED,
                ),
                PanelQuery(
                    some(f"sum by (reason) (rate(kvpressure_web_refused_total{{{CLUSTER}}}{rate})) > 0"),
                    "web server: {{reason}}",
                    optional=NOTHING_FAILED,
                ),
            ],
            "short",
            alert="KvpressureExporterImpaired",
        ),
        timeseries(
            site,
            "Flight recorders",
            "Number of flight recorders that record every tick, their failures per second, and ticks per second that"
            " are missing from recordings.",
            [
                PanelQuery(
                    some(f"sum by (cluster) (kvpressure_recorder_up{{{CLUSTER}}})"), "keep up", optional=NO_RECORDER
                ),
                PanelQuery(
                    some(f"sum by (reason) (rate(kvpressure_recorder_errors_total{{{CLUSTER}}}{rate}))"),
                    "errors/s {{reason}}",
                    optional=NO_RECORDER,
                ),
                PanelQuery(
                    some(f"sum by (cluster) (rate(kvpressure_recorder_dropped_ticks_total{{{CLUSTER}}}{rate}))"),
                    "missing ticks/s",
                    optional=NO_RECORDER,
                ),
            ],
            "short",
            alert="KvpressureExporterImpaired",
        ),
    ):
        dashboard.add(panel, 8, 7)
    for panel in (
        _list(
            site,
            "Containers that look like an engine and are not scraped",
            "Containers that have a GPU or look like an inference server, but are not scraped.",
            "max by (cluster, namespace, pod, container, result)"
            f' (kvpressure_container_discovery_info{{{CONTAINER},result!="engine"}})',
            {"namespace": "Namespace", "pod": "Pod", "container": "Container", "result": "Why"},
            f"no such container is found, or {NOT_A_POD}",
        ),
        _list(
            site,
            "Pods that opted out of alerts",
            "Pods whose annotation or label kvpressure.io/alerts turns alerts off, or limits alerts to tickets.",
            f"max by (cluster, namespace, pod, alerts) (kvpressure_container_alerts_info{{{CONTAINER}}})",
            {"namespace": "Namespace", "pod": "Pod", "alerts": "Alerts"},
            "no pod opted out",
        ),
        _list(
            site,
            "Containers that are not ready",
            "Containers of engines that the kubelet reports as not ready.",
            f"max by (cluster, namespace, pod, container) (kvpressure_container_ready{{{CONTAINER}}}) == 0",
            {"namespace": "Namespace", "pod": "Pod", "container": "Container"},
            f"all containers are ready, or {NOT_A_POD}",
        ),
    ):
        dashboard.add(panel, 8, 7)


def _list(
    site: DashboardContext, title: str, description: str, expr: str, columns: Mapping[str, str], empty: str
) -> Json:
    """A table of the results of ``expr``; ``empty``: what an empty result means."""
    return table(site, title, description, [PanelQuery(some(expr), table=True, optional=empty)], columns)
