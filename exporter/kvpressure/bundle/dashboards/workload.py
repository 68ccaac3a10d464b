"""The dashboard of the workload: request lengths, batching, latency."""

from __future__ import annotations

from kvpressure.bundle.dashboards.builder import (
    GREEN,
    MEDIAN_DASHED,
    NO_BASELINE,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    DashboardContext,
    column,
    dashed,
    drill,
    heatmap,
    stat,
    states,
    steps,
    table,
    texts,
    timeseries,
)
from kvpressure.bundle.dashboards.queries import (
    ENGINE,
    POD,
    TOP,
    Json,
    PanelQuery,
    engine,
    gpu,
    lines,
    quantiles,
    top,
    worst,
    worst_gpus,
    worst_model,
    worst_pods,
)

VLLM_BUCKETS = "this Prometheus does not scrape vLLM's own histograms"
NO_GPM = "the GPU does not report this activity (NVIDIA GPUs before Hopper), or nvidia.gpm is off"


def build(site: DashboardContext) -> Dashboard:
    """The dashboard for ``site``."""
    dashboard = Dashboard(
        "kvpressure / Workload and batching",
        "Number, length and bursts of requests, how requests are batched, and how long they take.",
    )
    for tile in _tiles(site):
        dashboard.add(tile, 4, 4)
    dashboard.add(_busiest(site), 24, 8)
    dashboard.row("Batching and limits")
    _batching(site, dashboard)
    dashboard.row("Request shape")
    _shape(site, dashboard)
    dashboard.row("Latency")
    _latency(site, dashboard)
    dashboard.row("Throughput and compute")
    _throughput(site, dashboard)
    return dashboard


def _tiles(site: DashboardContext) -> list[Json]:
    return [
        stat(
            site,
            "In flight",
            "Requests running and waiting on all chosen engines.",
            f"sum({engine('requests_in_flight')})",
            "short",
            steps(site, (GREEN, 1), base=YELLOW),
        ),
        stat(
            site,
            "Concurrency",
            "Requests in flight divided by the smallest known limit on running requests, for the worst engine.",
            f"max({engine('concurrency_ratio')})",
            "percentunit",
            steps(site, (ORANGE, "concurrency_warning_ratio")),
            "InferenceConcurrencyNearLimit",
        ),
        stat(
            site,
            "Batch missing",
            "How far the p95 batch size is below the number of requests that could run, for the worst engine.",
            f"max({engine('batch_collapse_ratio')})",
            "percentunit",
            steps(site, (ORANGE, "most_ratio")),
            "InferenceBatchCollapse",
        ),
        stat(
            site,
            "Context spike",
            "Longest context of the last five minutes divided by the mean.",
            f"max({engine('context_length_spike_ratio')})",
            "none",
            steps(site, (ORANGE, "context_spike_ratio")),
            "InferenceContextLengthSpike",
        ),
        stat(
            site,
            "Burst",
            "Arrival rate of the busiest ten seconds divided by the five-minute mean.",
            f"max({engine('arrival_burst_ratio')})",
            "none",
            steps(site, (ORANGE, "arrival_burst_ratio_high")),
        ),
        stat(
            site,
            "Latency vs baseline",
            "Highest ratio of p95 latency to the engine's own baseline, over all phases.",
            f"max({engine('latency_baseline_ratio', by='phase')})",
            "none",
            steps(site, (YELLOW, "latency_rising_ratio"), (RED, "latency_multiplied_ratio")),
            "InferenceTokenLatencyHigh",
            optional=NO_BASELINE,
        ),
    ]


def _busiest(site: DashboardContext) -> Json:
    base = engine("requests_in_flight")
    queries = [
        PanelQuery(f"topk({TOP}, {base})", table=True),
        PanelQuery(top(base, engine("requests_waiting")), table=True),
        PanelQuery(top(base, engine("effective_batch_size", 'quantile="0.95"')), table=True),
        PanelQuery(top(base, engine("request_tokens", 'kind="prompt",quantile="0.95"')), table=True),
        PanelQuery(top(base, engine("request_tokens", 'kind="output",quantile="0.95"')), table=True),
        PanelQuery(top(base, engine("request_tokens", 'kind="max_tokens",quantile="0.95"')), table=True),
        PanelQuery(top(base, engine("latency_seconds", 'phase="queue",quantile="0.95"')), table=True),
        PanelQuery(top(base, engine("latency_seconds", 'phase="inter_token",quantile="0.95"')), table=True),
    ]
    columns = {
        "model_name": "Model",
        "namespace": "Namespace",
        "pod": "Pod",
        "engine": "Engine",
        "Value #A": "In flight",
        "Value #B": "Waiting",
        "Value #C": "Batch p95",
        "Value #D": "Prompt p95",
        "Value #E": "Output p95",
        "Value #F": "max_tokens p95",
        "Value #G": "Queue p95",
        "Value #H": "Token p95",
    }
    colored = ("custom.cellOptions", {"type": "color-text"})
    overrides = [
        column(
            "Pod", ("links", [drill("kvpressure-incident", "Incident dashboard of this pod", pod="${__value.raw}")])
        ),
        column("Waiting", ("thresholds", steps(site, (ORANGE, 1))), colored),
        *(column(name, ("decimals", 0)) for name in ("Batch p95", "Prompt p95", "Output p95", "max_tokens p95")),
        column("Queue p95", ("unit", "s"), ("thresholds", steps(site, (ORANGE, "ttft_floor_seconds"))), colored),
        column("Token p95", ("unit", "s"), ("thresholds", steps(site, (ORANGE, "inter_token_floor_seconds"))), colored),
    ]
    return table(
        site,
        "Busiest engines",
        f"The {TOP} engines with the most requests in flight, with the lengths and waiting times of the requests.",
        queries,
        columns,
        overrides,
        sort="In flight",
        alert="InferenceQueueTimeHigh",
    )


def _batching(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Effective batch size",
            "p50, p95 and p99 of the number of running requests over the last minute, and the mean number of decoding"
            " requests.",
            [*quantiles("effective_batch_size"), PanelQuery(lines("effective_batch_size_mean"), "{{pod}} mean")],
            "short",
            steps(site, (GREEN, "signature_batch_size"), base=ORANGE),
            "InferenceBatchCollapse",
            overrides=[dashed("/ (p50|mean)$/")],
        ),
        8,
        8,
    )
    dashboard.add(
        heatmap(
            site,
            "Requests running",
            "Distribution of the number of running requests, over all samples of the chosen engines.",
            PanelQuery(
                f"sum by (le) (increase(kvpressure_batch_size_samples_bucket{{{ENGINE}}}[$__rate_interval]))",
                "{{le}}",
                heat=True,
            ),
            "short",
            "InferenceBatchCollapse",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Missing batch",
            "How far the p95 batch size is below the number of requests that could run. Not counted: deferred"
            " requests, and requests above the limit on running requests.",
            [PanelQuery(lines("batch_collapse_ratio"), "{{pod}} {{engine}}")],
            "percentunit",
            steps(site, (ORANGE, "most_ratio")),
            "InferenceBatchCollapse",
            top=1,
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
            "Concurrency",
            "Requests in flight divided by the smallest known limit on running requests.",
            [PanelQuery(lines("concurrency_ratio"), "{{pod}} {{engine}}")],
            "percentunit",
            steps(site, (ORANGE, "concurrency_warning_ratio")),
            "InferenceConcurrencyNearLimit",
        ),
        8,
        8,
    )


def _shape(site: DashboardContext, dashboard: Dashboard) -> None:
    for kind, title, counted, name in (
        ("prompt", "Prompt tokens", "prompt tokens", "request_prompt_tokens"),
        ("output", "Output tokens", "output tokens", "request_generation_tokens"),
        ("max_tokens", "max_tokens asked for", "max_tokens", "request_params_max_tokens"),
    ):
        dashboard.add(
            timeseries(
                site,
                title,
                f"Quantiles of {counted} per request, over five minutes.",
                quantiles("request_tokens", f'kind="{kind}"'),
                "short",
                None,
                "InferenceContextLengthSpike",
                overrides=[MEDIAN_DASHED],
            ),
            12,
            8,
        )
        dashboard.add(
            heatmap(
                site,
                f"{title}, distribution",
                f"Requests by {counted}, over all pods of the chosen model. If several models are chosen, the one in"
                " most"
                " trouble is shown. Two bands mean two groups of requests: short and long.",
                PanelQuery(
                    f"""sum by (le) ({worst_model(f'increase(vllm:{name}_bucket{{model_name=~"$model"}}[$__rate_interval])')})""",  # noqa: E501
                    "{{le}}",
                    heat=True,
                    optional=VLLM_BUCKETS,
                ),
                "short",
            ),
            12,
            8,
        )
    dashboard.add(
        timeseries(
            site,
            "Context length",
            "Prompt plus output tokens: the longest request of the last five minutes, and the mean.",
            [
                PanelQuery(lines("context_length_max_tokens"), "{{pod}} longest"),
                PanelQuery(lines("context_length_mean_tokens"), "{{pod}} mean"),
            ],
            "short",
            None,
            "InferenceContextLengthSpike",
            overrides=[dashed("/ mean$/")],
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Context spike",
            "Longest request divided by the mean request length.",
            [PanelQuery(lines("context_length_spike_ratio"), "{{pod}} {{engine}}")],
            "none",
            steps(site, (ORANGE, "context_spike_ratio")),
            "InferenceContextLengthSpike",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Bursts",
            "Arrival rate of the busiest ten seconds divided by the five-minute mean.",
            [PanelQuery(lines("arrival_burst_ratio"), "{{pod}} {{engine}}")],
            "none",
            steps(site, (ORANGE, "arrival_burst_ratio_high")),
        ),
        6,
        8,
    )
    dashboard.add(
        states(
            site,
            "Two kinds of traffic on one server",
            "Engines that serve short and long prompts together; give short and long prompts separate deployments.",
            [
                PanelQuery(
                    worst(engine("prompt_lengths_bimodal") + " == 1"),
                    "{{pod}} {{engine}}",
                    optional="no engine serves both short and long prompts",
                )
            ],
            texts(v1=("mixed", ORANGE)),
        ),
        6,
        8,
    )


def _latency(site: DashboardContext, dashboard: Dashboard) -> None:
    for phase, title, alert, floor in (
        ("ttft", "Time to first token", "InferenceTimeToFirstTokenHigh", "ttft_floor_seconds"),
        ("inter_token", "Time between tokens", "InferenceTokenLatencyHigh", "inter_token_floor_seconds"),
        ("queue", "Time in the queue", "InferenceQueueTimeHigh", "ttft_floor_seconds"),
    ):
        dashboard.add(
            timeseries(
                site,
                title,
                f"Quantiles over the last minute. {alert} does not fire below the orange line.",
                quantiles("latency_seconds", f'phase="{phase}"'),
                "s",
                steps(site, (ORANGE, floor)),
                alert,
                overrides=[MEDIAN_DASHED],
            ),
            8,
            8,
        )
    dashboard.add(
        timeseries(
            site,
            "Whole request",
            "Quantiles over the last minute.",
            quantiles("latency_seconds", 'phase="e2e"'),
            "s",
            overrides=[MEDIAN_DASHED],
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
            "Length of streams",
            "End-to-end time of the requests that finished in the last five minutes.",
            quantiles("stream_seconds"),
            "s",
            overrides=[MEDIAN_DASHED],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Prefill and decode time, p95",
            "Latency of finished requests of the chosen model, from vLLM's buckets. If several models are chosen,"
            " the one"
            " in most trouble is shown.",
            [
                PanelQuery(_p95(f"request_{phase}_time_seconds"), phase, optional=VLLM_BUCKETS)
                for phase in ("prefill", "decode")
            ],
            "s",
            alert="InferenceTimeToFirstTokenHigh",
        ),
        8,
        8,
    )


def _p95(name: str) -> str:
    """p95 of one of vLLM's own histograms for the selected model."""
    rate = worst_model(f'rate(vllm:{name}_bucket{{model_name=~"$model"}}[$__rate_interval])')
    return f"histogram_quantile(0.95, sum by (le) ({rate}))"


def _throughput(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Tokens per second",
            "Prompt and generated tokens per second, over the last half minute.",
            [PanelQuery(lines("tokens_per_second", by="kind"), "{{pod}} {{kind}}")],
            "short",
            overrides=[dashed("/ prompt$/")],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Throughput against its best",
            "Throughput of the last minute divided by the best one-minute throughput of the last fifteen minutes.",
            [
                PanelQuery(
                    lines("throughput_trend_ratio"),
                    "{{pod}} {{engine}}",
                    optional="there is little history, or demand fell",
                )
            ],
            "percentunit",
            None,
            "InferenceDocumentedSignature",
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
                    "{{pod}} " + shown,
                    optional=why,
                    part=f"The curves for {kind} requests",
                )
                for kind, shown, why in (
                    ("finished", "{{reason}}", "no request finished"),
                    ("rejected", "rejected {{reason}}", "no request was rejected"),
                )
            ],
            "reqps",
            None,
            "InferenceRequestsFailing",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "GPU activity",
            "Utilization is the share of time in which a kernel ran. SM, tensor and DRAM activity show which parts"
            " of the GPU were busy.",
            [
                PanelQuery(worst_gpus(gpu("gpu_utilization_ratio")), "GPU {{gpu}} utilization"),
                *(
                    PanelQuery(
                        worst_gpus(gpu(f"gpu_{unit}_activity_ratio")),
                        f"GPU {{{{gpu}}}} {unit}",
                        optional=NO_GPM,
                        part="The curves for SM, tensor and DRAM activity",
                    )
                    for unit in ("sm", "tensor", "dram")
                ),
            ],
            "percentunit",
            steps(site, (GREEN, "signature_utilization_ratio"), base=YELLOW),
            "InferenceDocumentedSignature",
            top=1,
        ),
        12,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Power",
            "Power draw and enforced limit. Decoding under KV pressure draws less power than prefill.",
            [
                PanelQuery(worst_gpus(gpu("gpu_power_watts")), "GPU {{gpu}}"),
                PanelQuery(worst_gpus(gpu("gpu_power_limit_watts")), "GPU {{gpu}} limit"),
            ],
            "watt",
            overrides=[dashed("/ limit$/")],
        ),
        8,
        8,
    )
