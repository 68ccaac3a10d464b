"""The dashboard over vLLM's own metrics, for sites without the exporter: it shows what these rules judge."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import (
    ORANGE,
    RED,
    Dashboard,
    DashboardContext,
    column,
    dashed,
    steps,
    table,
    timeseries,
)
from kvpressure.bundle.dashboards.first_screen import COLORED, FIRING, RATIO
from kvpressure.bundle.dashboards.queries import BY_ENGINE, CONTAINER, ENGINE, Json, PanelQuery, at_end, some, top

UID: Final = "kvpressure-vllm-only"
PRESENT: Final = "vllm:num_requests_running"
"""The metric that the variables come from; every release of vLLM has it."""
KV_CACHE: Final = "engine:vllm_kv_cache_used:max"
PREEMPTIONS: Final = "engine:vllm_preemptions:rate"
FAILED: Final = "pod:vllm_requests_failed:ratio"
NO_FINISHED: Final = "no request finished in the last minutes"


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    dashboard = Dashboard(
        "kvpressure / vLLM only",
        "KV cache, queue, latency and failures from vLLM's own metrics. Causes and limits need the exporter.",
        source=PRESENT,
        gpus=False,
    )
    dashboard.row("Engines with the longest queues, and what fires")
    dashboard.add(_engines(site), 16, 9)
    dashboard.add(_fires(site), 8, 9)
    dashboard.row("KV cache and queue")
    for panel in (_kv_cache(site), _requests(site), _preemptions(site)):
        dashboard.add(panel, 8, 8)
    dashboard.row("What users feel")
    for panel in (_latency(site, "ttft"), _latency(site, "queue"), _latency(site, "inter_token")):
        dashboard.add(panel, 8, 8)
    dashboard.row("Throughput and failures")
    for panel in (_tokens(site), _finished(site), _failed(site)):
        dashboard.add(panel, 8, 8)
    return dashboard


def _engine(metric: str) -> str:
    """A gauge or recording rule of the selected engines, one series per engine."""
    return f"max by ({BY_ENGINE}) ({metric}{{{ENGINE}}})"


def _longest_queues(expr: str) -> str:
    return top(at_end(_engine("vllm:num_requests_waiting")), expr)


def _engines(site: DashboardContext) -> Json:
    values = (
        ("vllm:num_requests_waiting", "Waiting", ""),
        (PRESENT, "Running", ""),
        (KV_CACHE, "KV cache", ""),
        (PREEMPTIONS, "Preempted/s", "this vLLM release does not count preemptions"),
        ("engine:vllm_ttft_seconds:p95", "TTFT p95", NO_FINISHED),
        ("engine:vllm_inter_token_seconds:p95", "Token p95", NO_FINISHED),
    )
    names = {f"Value #{chr(ord('A') + index)}": name for index, (_, name, _) in enumerate(values)}
    return table(
        site,
        "Engines",
        "KV cache usage is the largest value scraped in the last minute. These metrics do not show why requests wait.",
        [PanelQuery(_longest_queues(_engine(metric)), table=True, optional=optional) for metric, _, optional in values],
        {"model_name": "Model", "pod": "Pod", "engine": "Engine"} | names,
        [
            column("KV cache", *RATIO, ("thresholds", steps(site, (RED, "kv_full_ratio"))), COLORED),
            column("Preempted/s", ("decimals", 2)),
            column("TTFT p95", ("unit", "s"), ("decimals", 1)),
            column("Token p95", ("unit", "s"), ("decimals", 2)),
        ],
        sort="Waiting",
        alert="InferenceKVCachePressure",
    )


def _fires(site: DashboardContext) -> Json:
    return table(
        site,
        "What fires",
        "Firing alerts of these rules.",
        [PanelQuery(f"max by (alertname, severity, pod) ({FIRING})", table=True, optional="nothing fires")],
        {"alertname": "Alert", "severity": "Severity", "pod": "Pod"},
        order="severity",
    )


def _kv_cache(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "KV cache used",
        "Largest value scraped in the last minute. Peaks between two scrapes are missed.",
        [PanelQuery(some(_engine(KV_CACHE)), "{{pod}} {{engine}}")],
        "percentunit",
        steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
        "InferenceKVCachePressure",
        top=1,
    )


def _requests(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Requests: waiting, and running (dashed)",
        "Requests waiting and running, as vLLM's scheduler counts them.",
        [
            PanelQuery(some(_engine("vllm:num_requests_waiting")), "{{pod}} waiting"),
            PanelQuery(_longest_queues(_engine(PRESENT)), "{{pod}} running"),
        ],
        "short",
        alert="InferenceEngineStalled",
        overrides=[dashed("/ running$/")],
    )


def _preemptions(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Preemptions",
        "Preemptions per second. vLLM counts a preemption only with the request's next token, which may come"
        " minutes later.",
        [PanelQuery(some(_engine(PREEMPTIONS)), "{{pod}}", optional="this vLLM release does not count preemptions")],
        "short",
        alert="InferenceKVCachePressure",
    )


_LATENCIES: Final = {
    "ttft": ("Time to first token", "ttft_floor_seconds", "InferenceTimeToFirstTokenHigh"),
    "queue": ("Time in the queue", "ttft_floor_seconds", "InferenceQueueTimeHigh"),
    "inter_token": ("Time between tokens", "inter_token_floor_seconds", "InferenceTokenLatencyHigh"),
}


def _latency(site: DashboardContext, phase: str) -> Json:
    title, threshold, alert = _LATENCIES[phase]
    recording = f"engine:vllm_{phase}_seconds:p95"
    return timeseries(
        site,
        f"{title}, p95",
        "p95 of the last five minutes, computed from vLLM's histogram buckets.",
        [PanelQuery(some(_engine(recording)), "{{pod}}", optional=NO_FINISHED)],
        "s",
        steps(site, (ORANGE, threshold)),
        alert,
    )


def _rate(metric: str, by: str) -> str:
    return some(f"sum by ({by}) (rate({metric}{{{ENGINE}}}[$__rate_interval]))")


def _tokens(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Tokens/s: generated, and prompt (dashed)",
        "Tokens per second, by pod. Prompt tokens include those found in the prefix cache.",
        [
            PanelQuery(_rate("vllm:generation_tokens_total", "namespace, pod"), "{{pod}} generated"),
            PanelQuery(_rate("vllm:prompt_tokens_total", "namespace, pod"), "{{pod}} prompt"),
        ],
        "short",
        alert="InferenceEngineStalled",
        overrides=[dashed("/ prompt$/")],
    )


def _finished(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Finished requests, by reason",
        "Finished requests per second, over all chosen engines.",
        [PanelQuery(_rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")],
        "reqps",
        alert="InferenceRequestsFailing",
    )


def _failed(site: DashboardContext) -> Json:
    return timeseries(
        site,
        "Failed requests",
        "Share of requests that fail. Two shares are measured, and the larger is shown: requests that end with an"
        " error, and requests answered with 5xx.",
        [
            PanelQuery(
                some(f"max by (cluster, namespace, pod) ({FAILED}{{{CONTAINER}}})"),
                "{{pod}}",
                optional="hardly any request fails",
            )
        ],
        "percentunit",
        steps(site, (ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio")),
        "InferenceRequestsFailing",
    )
