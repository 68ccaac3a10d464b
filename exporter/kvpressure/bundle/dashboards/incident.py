"""The incident dashboard: the first screen, then history and details."""

from __future__ import annotations

from kvpressure.bundle.dashboards import first_screen
from kvpressure.bundle.dashboards.builder import (
    GREEN,
    LOG_EVENTS,
    MEDIAN_DASHED,
    NO_BASELINE,
    NOT_A_POD,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    DashboardContext,
    dashed,
    extreme,
    matching,
    neutral,
    states,
    steps,
    texts,
    timeseries,
)
from kvpressure.bundle.dashboards.first_screen import FIRING, VERDICTS, fullest_gpu
from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    CONTAINER,
    ENGINE,
    POD,
    Json,
    PanelQuery,
    engine,
    gpu,
    lines,
    quantiles,
    verdict_rank,
    worst,
    worst_gpus,
    worst_pods,
)
from kvpressure.diagnosis import findings
from kvpressure.publish.collector import RANKS
from kvpressure.signals.window import QUARTER_MINUTE


def build(site: DashboardContext) -> Dashboard:
    """The dashboard for ``site``."""
    dashboard = Dashboard(
        "kvpressure / Incident",
        "For the first five minutes of an incident: affected engines, cause, first action and firing alerts.",
    )
    first_screen.add(site, dashboard)
    dashboard.row("At a glance: the worst of the chosen engines")
    for tile in _tiles(site):
        dashboard.add(tile, 3, 4)
    dashboard.row("Verdict, alerts and evidence over time")
    dashboard.add(_verdicts(site), 12, 9)
    dashboard.add(_alert_states(site), 12, 9)
    dashboard.add(_reasons(site), 12, 9)
    dashboard.add(_signature(site), 12, 9)
    dashboard.row("Memory, KV cache, queue")
    _memory_kv_queue(site, dashboard)
    dashboard.row("What users feel")
    _users(site, dashboard)
    dashboard.row("Compute and batching")
    _compute(site, dashboard)
    dashboard.row("What is being sent, and the pod around the engine")
    _requests_and_pod(site, dashboard)
    return dashboard


def _tiles(site: DashboardContext) -> list[Json]:
    """One tile per aspect, each naming the engine that is worst in it."""
    ratio = "percentunit"
    return [
        extreme(
            site,
            "Fullest KV cache",
            "Highest KV cache usage in the samples of the last minute. A full cache alone is no fault, but a full"
            " cache with a queue is.",
            engine("kv_cache_used_ratio_max"),
            ratio,
            steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
            "InferenceKVCachePressure",
        ),
        extreme(
            site,
            "GPU memory required",
            "Required memory means used memory minus the unused part of the KV pool. Used memory alone means little,"
            " because the KV pool is reserved at start.",
            fullest_gpu("kvpressure_gpu_memory_demand_ratio"),
            ratio,
            steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio")),
            "GpuMemoryHigh",
        ),
        extreme(
            site,
            "Longest queue",
            "Requests waiting for any reason.",
            engine("requests_waiting"),
            "short",
            steps(site, (ORANGE, 1)),
        ),
        extreme(
            site,
            "In flight against the limit",
            "Requests in flight divided by the smallest known limit on running requests.",
            engine("concurrency_ratio"),
            ratio,
            steps(site, (ORANGE, "concurrency_warning_ratio")),
            "InferenceConcurrencyNearLimit",
        ),
        extreme(
            site,
            "Preemptions",
            "Running requests preempted per second because the KV cache was full.",
            engine("preemption_rate"),
            "reqps",
            neutral(),
            "InferenceKVCachePressure",
        ),
        extreme(
            site,
            "Latency against baseline",
            "Highest ratio of p95 latency to the engine's own baseline, over all phases. 1 is normal.",
            engine("latency_baseline_ratio", by="phase"),
            "none",
            steps(site, (YELLOW, "latency_rising_ratio"), (RED, "latency_multiplied_ratio")),
            optional=NO_BASELINE,
        ),
        extreme(
            site,
            "Prompt tokens per second",
            "Prompt tokens computed per second, on the engines that compute the most.",
            engine("tokens_per_second", 'kind="prompt"'),
            "short",
            neutral(),
        ),
        extreme(
            site,
            "CPU throttled",
            "Share of CFS periods in which the container was throttled.",
            f"max by (pod) (kvpressure_container_cpu_throttled_ratio{{{CONTAINER}}})",
            ratio,
            steps(site, (ORANGE, "cpu_throttled_ratio")),
            "InferenceHostBound",
            optional=NOT_A_POD,
        ),
    ]


def _verdicts(site: DashboardContext) -> Json:
    shown = {f"v{RANKS[verdict]}": text for verdict, text in VERDICTS.items()}
    return states(
        site,
        "Verdict over time",
        "One bar for each engine, coloured and named by its verdict.",
        [PanelQuery(worst(verdict_rank()), "{{pod}} {{engine}}")],
        texts(**shown),
        shown="auto",
    )


def _alert_states(site: DashboardContext) -> Json:
    queries = [
        PanelQuery(
            f"max by (alertname, severity, pod) ({FIRING})",
            "{{severity}} {{alertname}} {{pod}}",
            optional="nothing fires",
        )
    ]
    overrides = [
        matching(f"/^{severity} /", ("color", {"mode": "fixed", "fixedColor": color}))
        for severity, color in (("critical", RED), ("warning", ORANGE))
    ]
    return states(
        site,
        "Alerts over time",
        'Firing alerts of this bundle, except those with severity "info".',
        queries,
        texts(v1=("fires", "text")),
        overrides,
    )


def _reasons(site: DashboardContext) -> Json:
    colors = [matching("/./", ("color", {"mode": "fixed", "fixedColor": ORANGE}))]
    there = f"group by ({BY_ENGINE}, reason) (kvpressure_verdict_reason{{{ENGINE}}})"
    panel = states(
        site,
        "Reasons for the verdict",
        'Evidence for the verdict of the engine in most trouble, over time. For the current values, see panel "Why".',
        [
            PanelQuery(
                worst(there, 1),
                "{{pod}} {{reason}}",
                optional="no verdict needs action, or too many inputs are unknown",
            )
        ],
        texts(v1=("true", "text")),
        colors,
    )
    panel["transformations"] = [
        {"id": "renameByRegex", "options": {"regex": f"^(.*) {name}$", "renamePattern": f"$1: {words}"}}
        for name, words in findings.reasons(site.thresholds).items()
    ]
    return panel


def _signature(site: DashboardContext) -> Json:
    about = (
        "Shows when each condition of the documented signature holds."
        " The signature does not replace the verdict: device memory is high even on a healthy engine, and GPU"
        " utilization can stay high under KV pressure."
    )
    colors = [matching("/./", ("color", {"mode": "fixed", "fixedColor": YELLOW}))]
    return states(
        site,
        "Documented signature: conditions that hold",
        about,
        [
            PanelQuery(
                worst(engine("finding", 'finding=~"signature_.*"', by="finding") + " == 1"),
                "{{pod}} {{finding}}",
                optional="no condition holds",
            )
        ],
        texts(v1=("holds", "text")),
        colors,
        "InferenceDocumentedSignature",
    )


def _memory_kv_queue(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "KV cache: samples",
            "Used share of the KV cache, sampled once a second, because usage swings between two scrapes.",
            [PanelQuery(lines("kv_cache_used_ratio"), "{{pod}} {{engine}}")],
            "percentunit",
            steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
            "InferenceKVCachePressure",
            top=1,
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Waiting by reason",
            'Reason "capacity": requests wait for free KV cache or for max_num_seqs. Reason "deferred":'
            " requests wait for LoRA, grammar or remote KV.",
            [PanelQuery(lines("requests_waiting_by_reason", by="reason"), "{{pod}} {{reason}}")],
            "short",
            None,
            "InferenceQueueTimeHigh",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "In flight against the limits",
            "Requests in flight, and the limits on running requests: one line for each source of a limit. The"
            " smallest limit applies.",
            [
                PanelQuery(lines("requests_in_flight"), "{{pod}} in flight"),
                PanelQuery(lines("max_concurrent_requests", by="source"), "{{pod}} limit {{source}}"),
            ],
            "short",
            None,
            "InferenceConcurrencyNearLimit",
            overrides=[dashed("/ limit /")],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Preemption rate",
            "Requests preempted per second: from the engine's counter, or inferred from queue movement.",
            [PanelQuery(lines("preemption_rate"), "{{pod}} {{engine}}")],
            "reqps",
            None,
            "InferenceKVCachePressure",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Time until the cache is full",
            f"Extrapolated from KV cache usage over the last {QUARTER_MINUTE:g} s.",
            [PanelQuery(lines("kv_cache_seconds_to_full"), "{{pod}} {{engine}}", optional="no cache is filling")],
            "s",
            steps(site, (YELLOW, "kv_seconds_to_full_warning"), base=RED),
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Reserved minus allocated",
            'Lines: "allocator" is memory that PyTorch keeps unused (needs the plugin), "kv_pool" is free KV blocks,'
            ' and "kv_block" is unused slots in occupied blocks.',
            [PanelQuery(lines("fragmentation_bytes", by="scope"), "{{pod}} {{scope}}")],
            "decbytes",
            steps(site, (ORANGE, "fragmentation_warning_bytes")),
            "InferenceMemoryFragmentation",
        ),
        8,
        8,
    )


def _users(site: DashboardContext, dashboard: Dashboard) -> None:
    for phase, title, alert in (
        ("ttft", "Time to first token", "InferenceTimeToFirstTokenHigh"),
        ("inter_token", "Time between tokens", "InferenceTokenLatencyHigh"),
        ("queue", "Time in the queue", "InferenceQueueTimeHigh"),
    ):
        dashboard.add(
            timeseries(
                site,
                title,
                "Quantiles over the last minute.",
                quantiles("latency_seconds", f'phase="{phase}"'),
                "s",
                None,
                alert,
                overrides=[MEDIAN_DASHED],
            ),
            8,
            8,
        )
    dashboard.add(
        timeseries(
            site,
            "p95 latency against the engine's baseline",
            "p95 of each phase divided by the engine's own baseline. 1 is normal for this engine.",
            [PanelQuery(lines("latency_baseline_ratio", by="phase"), "{{pod}} {{phase}}", optional=NO_BASELINE)],
            "none",
            steps(site, (YELLOW, "latency_rising_ratio"), (RED, "latency_multiplied_ratio")),
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Outside the engine",
            "Mean time that a finished request spent in the tokenizer, the API server and the network.",
            [PanelQuery(lines("outside_engine_seconds"), "{{pod}} {{engine}}")],
            "s",
            None,
            "InferenceHostBound",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Finished and rejected",
            "Finished requests per second by finish reason, and rejected requests per second.",
            [
                PanelQuery(
                    worst_pods(
                        f"sum by ({POD}, reason)"
                        f" (rate(kvpressure_requests_{kind}_total{{{ENGINE}}}[$__rate_interval])) > 0"
                    ),
                    f"{{{{pod}}}} {shown}{{{{reason}}}}",
                    optional=why,
                    part=f"The curves for {kind} requests",
                )
                for kind, shown, why in (
                    ("finished", "", "no request finished"),
                    ("rejected", "rejected ", "no request was rejected"),
                )
            ],
            "reqps",
        ),
        8,
        8,
    )


def _compute(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Effective batch size",
            "p95 of the number of running requests, and the mean number of decoding requests.",
            [
                PanelQuery(lines("effective_batch_size", 'quantile="0.95"'), "{{pod}} p95"),
                PanelQuery(lines("effective_batch_size_mean"), "{{pod}} mean"),
            ],
            "short",
            steps(site, (GREEN, "signature_batch_size"), base=ORANGE),
            "InferenceBatchCollapse",
            overrides=[dashed("/ mean$/")],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "GPU activity",
            "Utilization is the share of time in which a kernel ran, however little of the GPU it used. Tensor and"
            " DRAM activity are shown only where the GPU reports them.",
            [
                PanelQuery(worst_gpus(gpu("gpu_utilization_ratio")), "GPU {{gpu}} utilization"),
                PanelQuery(worst_gpus(gpu("gpu_tensor_activity_ratio")), "GPU {{gpu}} tensor"),
                PanelQuery(worst_gpus(gpu("gpu_dram_activity_ratio")), "GPU {{gpu}} DRAM"),
            ],
            "percentunit",
            steps(site, (GREEN, "signature_utilization_ratio"), base=YELLOW),
            "InferenceDocumentedSignature",
            top=1,
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Memory high, compute low",
            "Score and its three factors: memory demand is high, GPU activity is low, requests are present. The score"
            " is absent if a factor is unknown.",
            [
                PanelQuery(lines("memory_high_compute_low_score"), "{{pod}} score"),
                PanelQuery(lines("score_factor", by="factor"), "{{pod}} {{factor}}"),
            ],
            "percentunit",
            None,
            top=1,
        ),
        8,
        8,
    )


def _requests_and_pod(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Context length",
            "Longest context (prompt plus output) of the last five minutes, and the mean.",
            [
                PanelQuery(lines("context_length_max_tokens"), "{{pod}} longest"),
                PanelQuery(lines("context_length_mean_tokens"), "{{pod}} mean"),
            ],
            "short",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Request shape, p95",
            "Prompt tokens and output tokens of a request, and the max_tokens that clients ask for.",
            [PanelQuery(lines("request_tokens", 'quantile="0.95"', by="kind"), "{{pod}} {{kind}}")],
            "short",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Log events",
            "Failed allocations and other problems in the log, per minute.",
            [
                PanelQuery(
                    worst_pods(
                        f"60 * sum by ({POD}, event)"
                        f' (rate(kvpressure_log_events_total{{{CONTAINER},event=~"{LOG_EVENTS}"}}[$__rate_interval]))'
                    ),
                    "{{pod}} {{event}}",
                    optional="no problem was logged",
                )
            ],
            "cpm",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Restarts and CPU throttling",
            "Container restarts so far, and share of CFS periods throttled.",
            [
                PanelQuery(
                    worst_pods(f"max by ({POD}, container) (kvpressure_container_restarts_total{{{CONTAINER}}})"),
                    "{{pod}} restarts",
                    optional=NOT_A_POD,
                ),
                PanelQuery(
                    worst_pods(f"max by ({POD}, container) (kvpressure_container_cpu_throttled_ratio{{{CONTAINER}}})"),
                    "{{pod}} throttled",
                    optional=NOT_A_POD,
                ),
            ],
            "short",
            None,
            "InferenceHostBound",
        ),
        6,
        8,
    )
