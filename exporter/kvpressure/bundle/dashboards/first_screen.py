"""The first screen of the incident dashboard: engines in trouble, the reason, the first action with its values,
firing alerts, and four graphs.

Everything above row ``SCREEN`` fits on 1600 x 900 without scrolling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.bundle.dashboards.builder import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    WINE,
    YELLOW,
    Dashboard,
    DashboardContext,
    column,
    dashed,
    drill,
    neutral,
    steps,
    table,
    texts,
    timeseries,
)
from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    ENGINE,
    Json,
    PanelQuery,
    engine,
    gpu,
    lines,
    trouble,
    worst,
    worst_gpus,
)
from kvpressure.diagnosis import findings
from kvpressure.publish.links import RUNBOOK_FOLDER, VERDICT_RUNBOOKS

SCREEN: Final = 20  # grid rows

VERDICTS: Final = {
    "idle": ("idle", BLUE),
    "healthy": ("healthy", GREEN),
    "kv_pressure": ("KV pressure", RED),
    "concurrency_limited": ("concurrency limited", YELLOW),
    "compute_bound": ("compute bound", YELLOW),
    "host_bound": ("host bound", YELLOW),
    "stalled": ("stalled", WINE),
    "unknown": ("unknown", PURPLE),
}
STAGES: Final = texts(
    building=("building", YELLOW),
    saturated=("saturated", ORANGE),
    thrashing=("thrashing", RED),
    failing=("failing", WINE),
    step_tokens=("step tokens", YELLOW),
)
# They begin with the title of the first action on the exporter's page.
FIRST_ACTIONS: Final = {
    "kv_pressure": "Lower max_num_seqs, or cap input and output tokens at the edge",
    "concurrency_limited": "Raise max_num_seqs (stage step tokens: max_num_batched_tokens)",
    "compute_bound": "Find the client that sends the most prompt tokens",
    "host_bound": "Give the container more CPU",
    "stalled": "Ask whether it was told to pause; else save the evidence and restart the pod",
    "unknown": "Change nothing yet: check the failed sources",
}
UNSURE: Final = "README"  # list of all runbooks
LOOK_FIRST: Final = "Low confidence: check the evidence first"
COLORED: Final = ("custom.cellOptions", {"type": "color-text"})
FIRING: Final = (
    'ALERTS{alertstate="firing",kvpressure_family=~".+",severity!~"info|none",cluster=~"$cluster",'
    'namespace=~"$namespace|",model_name=~"$model|",pod=~"$pod|"}'
)

MITIGATION_ORDER: Final = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
NO_LIMIT: Final = 'no limit change is recommended; if requests wait, see column "First action" above'
RATIO: Final = (("unit", "percentunit"), ("min", 0), ("max", 1), ("decimals", 0))


def add(site: DashboardContext, dashboard: Dashboard) -> None:
    """Fill the first screen of ``dashboard``."""
    dashboard.add(_engines(site), 24, 6)
    dashboard.add(_why(site), 10, 8)
    dashboard.add(_settings(site), 7, 8)
    dashboard.add(_fires(site), 7, 8)
    for graph in _graphs(site):
        dashboard.add(graph, 6, 6)


def fullest_gpu(metric: str) -> str:
    """``metric`` of the fullest GPU of each engine, with that GPU's labels."""
    joined = (
        f'kvpressure_engine_gpu_info{{{ENGINE},uuid=~"$gpu"}} * on (cluster, uuid) group_left (gpu) '
        f"max by (cluster, uuid, gpu) ({metric})"
    )
    return f"topk by ({BY_ENGINE}) (1, max by ({BY_ENGINE}, uuid, gpu) ({joined}))"


def _dashboard(uid: str, title: str) -> tuple[str, list[Json]]:
    return ("links", [drill(uid, title, pod="${__data.fields.Pod}")])


def _verdict_with_first_action() -> str:
    """The verdict of each engine with the label ``runbook``: of its first action, or ``UNSURE`` without confidence."""
    labelled = engine("verdict", by="verdict") + " == 1"
    for verdict, runbook in VERDICT_RUNBOOKS.items():
        labelled = f'label_replace({labelled}, "runbook", "{runbook}", "verdict", "{verdict}")'
    doubted = "|".join(verdict for verdict in VERDICT_RUNBOOKS if verdict != "unknown")  # which is never confident
    doubt = engine("finding", 'finding="verdict_confident"') + " == 0"
    unsure = engine("verdict", f'verdict=~"{doubted}"', by="verdict") + f" == 1 and on ({BY_ENGINE}) {doubt}"
    return f'(label_replace({unsure}, "runbook", "{UNSURE}", "", "") or on ({BY_ENGINE}) {labelled})'


def _engines(site: DashboardContext) -> Json:
    queries = [
        PanelQuery(
            f"sort_desc({trouble()} * on ({BY_ENGINE}) group_right () {worst(_verdict_with_first_action())})",
            table=True,
        ),
        PanelQuery(
            worst(engine("pressure_stage", by="stage") + " == 1"),
            table=True,
            optional="no engine has a verdict with stages",
            part='Column "Stage"',
        ),
        PanelQuery(worst(f"time() - {engine('verdict_since_timestamp_seconds')}"), table=True),
        PanelQuery(worst(engine("verdict_confidence")), table=True),
        PanelQuery(worst(engine("kv_cache_used_ratio_max")), table=True),
        PanelQuery(worst(fullest_gpu("kvpressure_gpu_memory_demand_ratio")), table=True),
        PanelQuery(worst(engine("requests_waiting")), table=True),
        PanelQuery(worst(engine("requests_running")), table=True),
        PanelQuery(
            worst(engine("finding", 'finding="documented_signature"')),
            table=True,
            optional="too few conditions of the signature can be evaluated",
        ),
    ]
    columns = {
        "model_name": "Model",
        "namespace": "Namespace",
        "pod": "Pod",
        "engine": "Engine",
        "gpu": "GPU",
        "verdict": "Verdict",
        "stage": "Stage",
        "Value #C": "For",
        "Value #D": "Confidence",
        "runbook": "First action",
        "Value #E": "KV cache",
        "Value #F": "Memory",
        "Value #G": "Waiting",
        "Value #H": "Running",
        "Value #I": "Signature",
    }
    about = (
        "The engine in most trouble first, with its fullest GPU, its verdict and the first action. Runbooks are in"
        f' {RUNBOOK_FOLDER}. Column "Memory" shows required memory, not used memory: an engine reserves its KV pool'
        ' at start, so used memory is high with and without pressure. Column "Signature" does not'
        " decide the verdict. Click a pod to filter the whole dashboard."
    )
    return table(
        site,
        "Engines in trouble: cause and first action",
        about,
        queries,
        columns,
        _engine_columns(site),
    )


def _engine_columns(site: DashboardContext) -> list[Json]:
    widths = {
        "Model": 90,
        "Namespace": 90,
        "Engine": 60,
        "GPU": 48,
        "Verdict": 158,
        "Stage": 82,
        "For": 72,
        "Confidence": 88,
        "First action": 312,
        "KV cache": 96,
        "Memory": 96,
        "Waiting": 68,
        "Running": 70,
        "Signature": 80,
    }  # the pod's name gets the rest
    gauge = ("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"})
    first = {UNSURE: (LOOK_FIRST, "text")} | {
        VERDICT_RUNBOOKS[verdict]: (text, "text") for verdict, text in FIRST_ACTIONS.items()
    }
    shown: dict[str, tuple[tuple[str, object], ...]] = {
        "Verdict": (
            ("mappings", texts(**VERDICTS)),
            ("custom.cellOptions", {"type": "color-background", "mode": "basic"}),
        ),
        "Stage": (("mappings", STAGES), COLORED),
        "For": (("unit", "s"), ("decimals", 0)),
        "Confidence": (*RATIO, ("thresholds", steps(site, (GREEN, "confident"), base=YELLOW)), COLORED),
        "KV cache": (
            *RATIO,
            ("thresholds", steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio"))),
            gauge,
            _dashboard("kvpressure-memory", "Memory and KV cache of this pod"),
        ),
        "Memory": (
            *RATIO,
            ("thresholds", steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio"))),
            gauge,
            _dashboard("kvpressure-memory", "Memory and KV cache of this pod"),
        ),
        "Waiting": (
            ("thresholds", steps(site, (ORANGE, 1))),
            COLORED,
            _dashboard("kvpressure-workload", "Workload of this pod"),
        ),
        "Signature": (("mappings", texts(v0=("not met", "text"), v1=("met", YELLOW))), COLORED),
        "First action": (("mappings", texts(**first)), *_runbook_of_the_row(site)),
    }
    return [
        *(column(name, ("custom.width", width), *shown.get(name, ())) for name, width in widths.items()),
        column("Pod", ("links", [drill("kvpressure-incident", "Only this pod", pod="${__value.raw}")])),
    ]


def _runbook_of_the_row(site: DashboardContext) -> Sequence[tuple[str, object]]:
    """Makes each value of a column a link to the runbook of that name, where an address is configured."""
    links = site.runbook_links("Runbook", "${__value.raw}")
    return [("links", links)] if links else []


def _why(site: DashboardContext) -> Json:
    words = {key: (text, "text") for key, text in findings.reasons(site.thresholds).items()}
    overrides = [
        column("Pod", ("custom.width", 118)),
        column("Now", ("custom.width", 66), ("custom.align", "right")),
        column("Evidence", ("mappings", texts(**words))),
    ]
    about = (
        "Current evidence for the verdict of the engine in most trouble, with number and meaning. Filter by"
        " pod to see another engine. The triage page also lists the evidence against the verdict."
    )
    return table(
        site,
        "Why: evidence about the worst engine",
        about,
        [
            PanelQuery(
                worst(engine("verdict_reason", by="reason"), 1),
                table=True,
                optional="no verdict needs action, or too many inputs are unknown",
            )
        ],
        {"pod": "Pod", "Value": "Now", "reason": "Evidence"},
        overrides,
        order="reason",
    )


def _settings(site: DashboardContext) -> Json:
    recommended = engine("limit_recommended", by="limit")
    now = f"{engine('limit', by='limit')} and on ({BY_ENGINE}, limit) {recommended}"
    queries = [PanelQuery(_stepped(worst(expr)), table=True, optional=NO_LIMIT) for expr in (recommended, now)]
    overrides = [
        column("Step", ("custom.width", 56)),
        column("Limit", ("custom.width", 188)),
        column("Now", ("custom.width", 64)),
        column("Set to", ("custom.width", 74), ("thresholds", neutral()), COLORED),
    ]
    return table(
        site,
        "What to set",
        "Limits to change, each with the value in force and the value to set, computed for each engine. Every limit is"
        " an argument of the engine and takes effect after a restart. First cap the tokens of a request: at the edge"
        f" (no restart) or with {MITIGATION_ORDER[0]} (restart). Then set {', '.join(MITIGATION_ORDER[1:-1])} and"
        f" {MITIGATION_ORDER[-1]}.",
        queries,
        {"pod": "Pod", "step": "Step", "limit": "Limit", "Value #B": "Now", "Value #A": "Set to"},
        overrides,
        order="step",
    )


def _stepped(expr: str) -> str:
    """``expr`` with the label ``step``: the mitigation step of its limit."""
    for step, limit in enumerate(MITIGATION_ORDER, 1):
        expr = f'label_replace({expr}, "step", "{step}", "limit", "{limit}")'
    return expr


def _fires(site: DashboardContext) -> Json:
    levels = texts(critical=("critical", RED), warning=("warning", ORANGE), info=("info", BLUE))
    overrides = [
        column("Alert", ("custom.width", 226), *_runbook_of_the_row(site)),
        column("Severity", ("custom.width", 70), ("mappings", levels), COLORED),
    ]
    return table(
        site,
        "What fires",
        "Firing alerts of this bundle: about the chosen engines, about GPUs, and about the exporter. Each has its"
        f" runbook in {RUNBOOK_FOLDER}.",
        [PanelQuery(f"max by (alertname, severity, pod) ({FIRING})", table=True, optional="nothing fires")],
        {"alertname": "Alert", "severity": "Severity", "pod": "Pod"},
        overrides,
        order="severity",
    )


def _graphs(site: DashboardContext) -> list[Json]:
    return [
        timeseries(
            site,
            "KV cache used",
            "Highest KV cache usage of the last minute, including peaks between two scrapes.",
            [PanelQuery(lines("kv_cache_used_ratio_max"), "{{pod}} {{engine}}")],
            "percentunit",
            steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
            "InferenceKVCachePressure",
            top=1,
            small=True,
        ),
        timeseries(
            site,
            "GPU memory: required, and used (dashed)",
            "Required memory means used memory minus the unused part of the KV pool. The gap between the lines is the"
            " unused part of the KV pool.",
            [
                PanelQuery(
                    worst_gpus(gpu("gpu_memory_demand_ratio")),
                    "GPU {{gpu}} required",
                ),
                PanelQuery(worst_gpus(gpu("gpu_memory_used_ratio")), "GPU {{gpu}} used"),
            ],
            "percentunit",
            steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio")),
            "GpuMemoryHigh",
            top=1,
            overrides=[dashed("/ used$/")],
            small=True,
        ),
        timeseries(
            site,
            "Requests: waiting, and running (dashed)",
            "Requests waiting for any reason, and requests running.",
            [
                PanelQuery(lines("requests_waiting"), "{{pod}} waiting"),
                PanelQuery(lines("requests_running"), "{{pod}} running"),
            ],
            "short",
            None,
            "InferenceQueueTimeHigh",
            overrides=[dashed("/ running$/")],
            small=True,
        ),
        timeseries(
            site,
            "Tokens/s: generated, and prompt (dashed)",
            "Tokens generated and prompt tokens computed per second, over the last half minute.",
            [PanelQuery(lines("tokens_per_second", by="kind"), "{{pod}} {{kind}}")],
            "short",
            overrides=[dashed("/ prompt$/")],
            small=True,
        ),
    ]
