"""The dashboard for one incident. Its first screen, without scrolling on 1600 x 900: which engine, why, since when,
what to set, what fires, first token, time between tokens, errors, KV cache, queue.
"""

from __future__ import annotations

from typing import Final

from kvpressure.advice.triage import NOTABLE_EVENTS
from kvpressure.bundle.dashboards.builder import (
    COLORED,
    FILLED,
    KV_FULL,
    MEMORY_FULL,
    NO_BASELINE,
    NOT_A_POD,
    OF_ENGINES,
    SHARE,
    Dashboard,
    DashboardContext,
    firing,
    fixed,
    texts,
)
from kvpressure.bundle.dashboards.harm import (
    BLUE,
    LISTED,
    ORANGE,
    RED,
    TOP,
    WINE,
    YELLOW,
    gpu_line,
    line,
    order_of_engines,
    states,
    worst,
)
from kvpressure.bundle.dashboards.queries import BY_ENGINE, CONTAINER, ENGINE, OF_ENGINE, POD, PanelQuery, engine, named
from kvpressure.diagnosis import findings
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.publish.links import RUNBOOK_FOLDER

SCREEN: Final = 20  # grid rows
NO_REASON: Final = "no verdict needs action, or too many inputs are unknown"
LOG_EVENTS: Final = "|".join(sorted(ALLOCATION_EVENTS | NOTABLE_EVENTS))  # lines of trouble, not facts of the start
STAGES: Final = texts(
    building=("building", YELLOW),
    reuse=("reuse", ORANGE),
    saturated=("saturated", ORANGE),
    thrashing=("thrashing", RED),
    failing=("failing", WINE),
    step_tokens=("step tokens", YELLOW),
)
MITIGATION_ORDER: Final = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
_CONTAINER: Final = ("cluster", "namespace", "pod", "container")


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    board = Dashboard(
        "kvpressure / Incident",
        "For the first five minutes of an incident: affected engines, cause, first action and firing alerts.",
        site,
        OF_ENGINES,
    )
    _engines(board)
    _why(board)
    _settings(board)
    _fires(board)
    _users(board)
    board.row("Over time")
    _over_time(board)
    board.row("Memory and KV cache")
    _memory(board)
    board.row("Load")
    _load(board)
    board.row("The pod around the engine")
    _pod(board)
    return board


def _causes(site: DashboardContext) -> str:
    """Certainty of each engine's cause, with its first action, marked if the cause is not certain."""
    cause, confident = engine("cause_info", by="stage, action"), site.thresholds["confident"]
    doubted = f'label_replace({cause} < {confident:g}, "action", "Not certain: $1", "action", "(.+)")'
    return f"({cause} >= {confident:g} or {doubted})"


def _engines(board: Dashboard) -> None:
    demand = "max by (cluster, uuid) (kvpressure_gpu_memory_demand_ratio)"
    memory = f'kvpressure_engine_gpu_info{{{ENGINE},uuid=~"$gpu"}} * on (cluster, uuid) group_left () {demand}'
    p95 = 'quantile="0.95"'
    queries = [
        PanelQuery(f"topk({TOP}, {order_of_engines()})"),
        PanelQuery(worst(_causes(board.site))),
        PanelQuery(worst(f"time() - {engine('verdict_since_timestamp_seconds')}")),
        PanelQuery(worst(engine("latency_seconds", f'phase="ttft",{p95}'))),
        PanelQuery(worst(engine("latency_seconds", f'phase="inter_token",{p95}'))),
        PanelQuery(worst(engine("requests_lost_ratio")), optional="hardly any request fails, or no engine answers"),
        PanelQuery(worst(engine("kv_cache_used_ratio_max"))),
        PanelQuery(worst(f"max by ({BY_ENGINE}) ({memory})"), optional="no GPU is known to belong to the engine"),
        PanelQuery(worst(engine("requests_waiting"))),
        PanelQuery(worst(engine("requests_running"))),
    ]
    columns = {
        "namespace": "Namespace",
        "pod": "Pod",
        "engine": "Rank",
        "model_name": "Model",
        "Value #A": "State",
        "stage": "Stage",
        "Value #C": "For",
        "Value #B": "Certain",
        "action": "First action",
        "Value #D": "First token",
        "Value #E": "Token",
        "Value #F": "Failed",
        "Value #G": "KV cache",
        "Value #H": "Memory",
        "Value #I": "Waiting",
        "Value #J": "Running",
    }
    widths = {
        "Namespace": 90,
        "Rank": 46,
        "Model": 96,
        "State": 196,
        "Stage": 82,
        "For": 62,
        "Certain": 66,
        "First action": 320,
        "First token": 86,
        "Token": 80,
        "Failed": 58,
        "KV cache": 76,
        "Memory": 74,
        "Waiting": 70,
        "Running": 74,
    }  # the pod's name gets the rest
    row = {"namespace": "${__data.fields.Namespace}", "pod": "${__data.fields.Pod}"}
    detail = board.drill("kvpressure-detail", "Detail of this pod", **row)
    shown = {
        "Pod": [board.drill("kvpressure-incident", "Only this pod", **row)],
        "State": [("mappings", states()), FILLED],
        "Stage": [("mappings", STAGES), COLORED],
        "For": [("unit", "s"), ("decimals", 0)],
        "Certain": SHARE,
        "First token": [("unit", "s"), *board.marked((ORANGE, "ttft_floor_seconds"))],
        "Token": [("unit", "s"), *board.marked((ORANGE, "inter_token_floor_seconds"))],
        "Failed": [*SHARE, *board.marked((ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio"))],
        "KV cache": [*SHARE, *board.marked(*KV_FULL), detail],
        "Memory": [*SHARE, *board.marked(*MEMORY_FULL), detail],
        "Waiting": [*board.marked((ORANGE, 1)), detail],
    }
    board.table(
        "Engines, worst first: state, cause and first action",
        'Engines that do not answer come first, then those that a page fires about, then by verdict. Column "Memory"'
        " shows required memory of the fullest GPU: an engine reserves its KV pool at start, so used memory is high"
        " with and without pressure. First token and time between tokens are p95. Click a pod to see it alone; KV"
        " cache, memory and waiting lead to its details.",
        queries,
        columns,
        {name: [("custom.width", width), *shown.pop(name, ())] for name, width in widths.items()} | shown,
        order="Value #A",
        size=(24, 6),
    )


def _why(board: Dashboard) -> None:
    words = {key: (text, "text") for key, text in findings.reasons(board.site.thresholds).items()}
    board.table(
        "Why: evidence about the first engine",
        "Current evidence for the verdict of the engine that comes first. Filter by pod to see another engine. The"
        " triage page also lists the evidence against the verdict.",
        [PanelQuery(worst(engine("verdict_reason", by="reason"), 1), optional=NO_REASON)],
        {"Value": "Now", "reason": "Evidence"},
        {"Now": [("custom.width", 76), ("custom.align", "right")], "Evidence": [("mappings", texts(**words))]},
        order="reason",
    )


def _settings(board: Dashboard) -> None:
    recommended = engine("limit_recommended", by="limit")
    now = f"{engine('limit', by='limit')} and on ({BY_ENGINE}, limit) {recommended}"
    why = 'no limit change is recommended; see column "First action"'
    board.table(
        "What to set",
        "Limits to change, each with the value in force and the value to set, computed for each engine. Every limit is"
        " an argument of the engine and takes effect after a restart. First cap the tokens of a request: at the gateway"
        f" (no restart) or with {MITIGATION_ORDER[0]} (restart). Then set {', '.join(MITIGATION_ORDER[1:-1])} and"
        f" {MITIGATION_ORDER[-1]}.",
        [PanelQuery(_stepped(worst(expr)), named=OF_ENGINE, optional=why) for expr in (recommended, now)],
        {"step": "Step", "limit": "Limit", "Value #B": "Now", "Value #A": "Set to", "series": "Engine"},
        {
            "Step": [("custom.width", 46)],
            "Limit": [("custom.width", 200)],
            "Now": [("custom.width", 60)],
            "Set to": [("custom.width", 62), ("thresholds", board.steps((), BLUE)), COLORED],
        },
        order="step",
    )


def _stepped(expr: str) -> str:
    """``expr`` with the label ``step``: the mitigation step of its limit."""
    for step, limit in enumerate(MITIGATION_ORDER, 1):
        expr = f'label_replace({expr}, "step", "{step}", "limit", "{limit}")'
    return expr


def _alerts() -> str:
    """Firing alerts, each named by what it is about."""
    of_pod, of_others = ("namespace", "pod", "container", "engine"), ("namespace", "pool", "model_name", "node", "uuid")

    def about(labels: tuple[str, ...], pod: str) -> str:
        alerts = f"max by (alertname, severity, cluster, {', '.join(labels)}) ({firing(OF_ENGINES, f'{LISTED},{pod}')})"
        return named(alerts, "cluster", *labels)

    every = " or ".join((about(of_pod, 'pod!=""'), about(of_others, 'pod=""')))
    return f'label_replace({every}, "series", "$1/$2", "series", "(.*[^/])//+(.*)")'  # a label between others is empty


def _fires(board: Dashboard) -> None:
    levels = texts(critical=("critical", RED), warning=("warning", ORANGE))
    runbook = [("links", links)] if (links := board.site.runbook_links("Runbook", "${__value.raw}")) else []
    board.table(
        "What fires",
        "Firing alerts of this bundle: about the chosen engines, about GPUs, and about the exporter. Each has its"
        f" runbook in {RUNBOOK_FOLDER}.",
        [PanelQuery(_alerts(), optional="nothing fires")],
        {"severity": "Severity", "alertname": "Alert", "series": "About"},
        {
            "Severity": [("custom.width", 76), ("mappings", levels), COLORED],
            "Alert": [("custom.width", 244), *runbook],
        },
        order="severity",
    )


def _p95(phase: str) -> list[PanelQuery]:
    """p95 of a phase, and its usual value: the engine's own baseline."""
    p95 = engine("latency_seconds", f'phase="{phase}",quantile="0.95"')
    ratio = engine("latency_baseline_ratio", f'phase="{phase}"')
    usual = worst(f"{p95} / on ({BY_ENGINE}) {ratio}")
    return [
        PanelQuery(worst(p95), "", OF_ENGINE),
        PanelQuery(usual, "usual", OF_ENGINE, optional=NO_BASELINE, part="The usual value"),
    ]


def _users(board: Dashboard) -> None:
    board.graph(
        "First token: p95, and usual (dashed)",
        "p95 of the last minute, and the engine's own baseline.",
        _p95("ttft"),
        "s",
        [(ORANGE, "ttft_floor_seconds")],
        dashed="usual",
        size=(5, 7),
    )
    board.graph(
        "Between tokens: p95, usual (dashed)",
        "p95 of the last minute, and the engine's own baseline.",
        _p95("inter_token"),
        "s",
        [(ORANGE, "inter_token_floor_seconds")],
        dashed="usual",
        size=(5, 7),
    )
    board.graph(
        "Failed requests",
        "Share of requests of the last five minutes that failed, were aborted by the server or given up by clients.",
        [line("requests_lost_ratio", optional="hardly any request fails, or no engine answers")],
        "percentunit",
        [(ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio")],
        size=(4, 7),
    )
    board.graph(
        "KV cache: peak, and now (dashed)",
        "Highest KV cache usage of the last minute, including peaks between two scrapes, and usage now.",
        [line("kv_cache_used_ratio_max"), line("kv_cache_used_ratio", "now")],
        "percentunit",
        KV_FULL,
        dashed="now",
        top=1,
        size=(5, 7),
    )
    board.graph(
        "Requests: waiting, running (dashed)",
        "Requests waiting for any reason, and requests running.",
        [line("requests_waiting", "waiting"), line("requests_running", "running")],
        "short",
        dashed="running",
        size=(5, 7),
    )


def _over_time(board: Dashboard) -> None:
    board.states(
        "State over time",
        "One bar for each engine: its verdict, or that a page fires about it, or that it does not answer.",
        [PanelQuery(f"floor({order_of_engines()})", named=OF_ENGINE)],
        states(),
        shown="auto",
    )
    board.states(
        "Alerts over time",
        'Firing alerts of this bundle, except those with severity "info".',
        [PanelQuery(_alerts(), "{{series}} {{severity}} {{alertname}}", optional="nothing fires")],
        texts(v1=("fires", "text")),
        [fixed("/ critical /", RED), fixed("/ warning /", ORANGE)],
    )
    told = "|".join(name for name in findings.PUBLISHED if findings.of(name).runbook)  # the others serve rules alone
    found = engine("finding", f'finding=~"{told}"', by="finding") + " == 1"
    board.states(
        "Findings about the first engine",
        "What holds of the engine that comes first, with the conditions of the documented signature, and the evidence"
        " for its verdict.",
        [
            PanelQuery(worst(found, 1), "{{finding}}", optional="nothing holds", part="The findings"),
            PanelQuery(
                worst(f"group by ({BY_ENGINE}, reason) (kvpressure_verdict_reason{{{ENGINE}}})", 1),
                "reason: {{reason}}",
                optional=NO_REASON,
                part="The reasons",
            ),
        ],
        texts(v1=("holds", "text")),
        [fixed("/./", YELLOW), fixed("/^reason: /", ORANGE)],
        size=(24, 8),
    )


def _memory(board: Dashboard) -> None:
    board.graph(
        "GPU memory: required, and used (dashed)",
        "Required memory means used memory minus the unused part of the KV pool. The gap between the lines is the"
        " unused part of the KV pool.",
        [gpu_line("gpu_memory_demand_ratio"), gpu_line("gpu_memory_used_ratio", "used")],
        "percentunit",
        MEMORY_FULL,
        dashed="used",
        top=1,
    )
    board.graph(
        "Preemptions, and recomputed tokens (right)",
        "Requests preempted per second: from the engine's counter, or inferred from queue movement. Tokens recomputed"
        " per second (estimate).",
        [line("preemption_rate"), line("recomputed_tokens_estimate_rate", "recomputed")],
        "reqps",
        dashed="recomputed",
        right="short",
    )
    board.graph(
        "Time until the cache is full",
        "Extrapolated from the current rise of KV cache usage.",
        [line("kv_cache_seconds_to_full", optional="no cache is filling")],
        "s",
    )


def _load(board: Dashboard) -> None:
    board.graph(
        "In flight, and limits (dashed)",
        "Requests in flight, and the limits on running requests: one line for each source of a limit. The smallest"
        " limit applies.",
        [line("requests_in_flight"), line("max_concurrent_requests", "limit", by="source")],
        "short",
        dashed="limit",
    )
    board.graph(
        "Waiting by reason",
        'Reason "capacity": requests wait for free KV cache or for max_num_seqs. Reason "deferred": requests wait for'
        " LoRA, grammar or remote KV.",
        [line("requests_waiting_by_reason", by="reason")],
        "short",
    )
    board.graph(
        "Tokens/s: generated, and prompt (dashed)",
        "Tokens generated and prompt tokens computed per second, over the last half minute.",
        [line("tokens_per_second", by="kind")],
        "short",
        dashed="prompt",
    )
    board.graph(
        "Batch size: p95, and mean (dashed)",
        "p95 of the number of running requests, and the mean number of decoding requests.",
        [line("effective_batch_size", "p95", 'quantile="0.95"'), line("effective_batch_size_mean", "mean")],
        "short",
        [(ORANGE, "signature_batch_size")],
        dashed="mean",
    )
    board.graph(
        "Context: longest, and mean (dashed)",
        "Prompt plus output tokens: the longest request of the last five minutes, and the mean.",
        [line("context_length_max_tokens"), line("context_length_mean_tokens", "mean")],
        "short",
        dashed="mean",
    )
    board.graph(
        "GPU activity",
        "Utilization is the share of time in which a kernel ran, however little of the GPU it used. SM and tensor"
        " activity show which parts were busy. Score: KV cache full, GPU activity low and requests present.",
        [
            line("memory_high_compute_low_score", "score"),
            gpu_line("gpu_utilization_ratio", "utilization"),
            *(
                gpu_line(
                    f"gpu_{unit}_activity_ratio",
                    unit,
                    "the GPU does not report it (NVIDIA GPUs before Hopper), or nvidia.gpm is off",
                    "The curves for SM and tensor activity",
                )
                for unit in ("sm", "tensor")
            ),
        ],
        "percentunit",
        [(YELLOW, "signature_utilization_ratio")],
        top=1,
    )


def _of_containers(metric: str, legend: str, optional: str = NOT_A_POD) -> PanelQuery:
    expr = worst(f"max by ({POD}, container) (kvpressure_container_{metric}{{{CONTAINER}}})", by=POD)
    return PanelQuery(expr, legend, _CONTAINER, optional=optional, part=f'The curves "{legend}"')


def _pod(board: Dashboard) -> None:
    board.graph(
        "CPU and host memory of the container",
        "Share of CFS periods throttled, and used share of the limits on CPU and (dashed) memory. vLLM's API server"
        " sends no tokens while its container is throttled.",
        [
            _of_containers("cpu_throttled_ratio", "throttled"),
            _of_containers("cpu_used_ratio", "CPU"),
            _of_containers("memory_used_ratio", "memory", "no container has a memory limit"),
        ],
        "percentunit",
        [(YELLOW, "cpu_throttled_ratio"), (ORANGE, "container_limit_ratio")],
        dashed="memory",
    )
    events = f'kvpressure_log_events_total{{{CONTAINER},event=~"{LOG_EVENTS}"}}'
    board.graph(
        "Restarts and problems in the log",
        "Container restarts so far, and log lines per minute that report problems: failed allocations, killed workers,"
        " preemptions, dead engines.",
        [
            _of_containers("restarts_total", "restarts"),
            PanelQuery(
                worst(f"60 * sum by ({POD}, container, event) (rate({events}[$__rate_interval]))", by=POD),
                "{{event}} per minute",
                _CONTAINER,
                optional="no problem was logged",
                part="The curves of events",
            ),
        ],
        "short",
    )
    board.graph(
        "Queue, and whole answer (dashed): p95",
        "p95 of the last minute. A whole answer takes longer if it is longer.",
        [
            line("latency_seconds", "queue", 'phase="queue",quantile="0.95"'),
            line("latency_seconds", "answer", 'phase="e2e",quantile="0.95"'),
        ],
        "s",
        dashed="answer",
    )
