"""The dashboard over vLLM's own metrics, for sites without the exporter: it shows what these rules judge."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import KV_FULL, SHARE, Dashboard, DashboardContext, firing
from kvpressure.bundle.dashboards.harm import ORANGE, RED, TOP
from kvpressure.bundle.dashboards.queries import BY_ENGINE, CONTAINER, ENGINE, OF_ENGINE, POD, PanelQuery, at_end

UID: Final = "kvpressure-vllm-only"
PRESENT: Final = "vllm:num_requests_running"
"""The metric that the variables come from; every release of vLLM has it."""
WAITING: Final = "vllm:num_requests_waiting"
KV_CACHE: Final = "engine:vllm_kv_cache_used:max"
PREEMPTIONS: Final = "engine:vllm_preemptions:rate"
FAILED: Final = "pod:vllm_requests_failed:ratio"
NO_FINISHED: Final = "no request finished in the last minutes"
NOT_COUNTED: Final = "this vLLM release does not count preemptions"
VARIABLES: Final = ("cluster", "namespace", "model", "pod")


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    board = Dashboard(
        "kvpressure / vLLM only",
        "KV cache, queue, latency and failures from vLLM's own metrics. Causes and limits need the exporter.",
        site,
        VARIABLES,
        PRESENT,
    )
    board.row("Engines with the longest queues, and what fires")
    _engines(board)
    board.table(
        "What fires",
        "Firing alerts of these rules.",
        [PanelQuery(f"max by (alertname, severity, pod) ({firing(VARIABLES)})", optional="nothing fires")],
        {"alertname": "Alert", "severity": "Severity", "pod": "Pod"},
        order="severity",
        size=(8, 9),
    )
    board.row("KV cache and queue")
    _queue(board)
    board.row("What users feel")
    for phase, title, floor in (
        ("ttft", "Time to first token", "ttft_floor_seconds"),
        ("queue", "Time in the queue", "ttft_floor_seconds"),
        ("inter_token", "Time between tokens", "inter_token_floor_seconds"),
    ):
        board.graph(
            f"{title}, p95",
            "p95 of the last five minutes, computed from vLLM's histogram buckets.",
            [PanelQuery(_largest(_engine(f"engine:vllm_{phase}_seconds:p95")), "", OF_ENGINE, optional=NO_FINISHED)],
            "s",
            [(ORANGE, floor)],
        )
    board.row("Throughput and failures")
    _throughput(board)
    return board


def _engine(metric: str) -> str:
    """A gauge or recording rule of the selected engines, one series per engine."""
    return f"max by ({BY_ENGINE}) ({metric}{{{ENGINE}}})"


def _largest(expr: str) -> str:
    return f"topk({TOP}, {expr})"


def _longest_queues(expr: str) -> str:
    return f"{expr} and on ({BY_ENGINE}) topk({TOP}, {at_end(_engine(WAITING))})"


def _engines(board: Dashboard) -> None:
    values = (
        (WAITING, "Waiting", ""),
        (PRESENT, "Running", ""),
        (KV_CACHE, "KV cache", ""),
        (PREEMPTIONS, "Preempted/s", NOT_COUNTED),
        ("engine:vllm_ttft_seconds:p95", "TTFT p95", NO_FINISHED),
        ("engine:vllm_inter_token_seconds:p95", "Token p95", NO_FINISHED),
    )
    names = {f"Value #{chr(ord('A') + index)}": name for index, (_, name, _) in enumerate(values)}
    board.table(
        "Engines",
        "KV cache usage is the largest value scraped in the last minute. These metrics do not show why requests wait.",
        [PanelQuery(_longest_queues(_engine(metric)), optional=optional) for metric, _, optional in values],
        {"model_name": "Model", "pod": "Pod", "engine": "Engine"} | names,
        {
            "KV cache": [*SHARE, *board.marked((RED, "kv_full_ratio"))],
            "Preempted/s": [("decimals", 2)],
            "TTFT p95": [("unit", "s"), ("decimals", 1)],
            "Token p95": [("unit", "s"), ("decimals", 2)],
        },
        order="Value #A",
        size=(16, 9),
    )


def _queue(board: Dashboard) -> None:
    board.graph(
        "KV cache used",
        "Largest value scraped in the last minute. Peaks between two scrapes are missed.",
        [PanelQuery(_largest(_engine(KV_CACHE)), "", OF_ENGINE)],
        "percentunit",
        KV_FULL,
        top=1,
    )
    board.graph(
        "Requests: waiting, and running (dashed)",
        "Requests waiting and running, as vLLM's scheduler counts them.",
        [
            PanelQuery(_largest(_engine(WAITING)), "waiting", OF_ENGINE),
            PanelQuery(_longest_queues(_engine(PRESENT)), "running", OF_ENGINE),
        ],
        "short",
        dashed="running",
    )
    board.graph(
        "Preemptions",
        "Preemptions per second. vLLM counts a preemption only with the request's next token, which may come"
        " minutes later.",
        [PanelQuery(_largest(_engine(PREEMPTIONS)), "", OF_ENGINE, optional=NOT_COUNTED)],
        "short",
    )


def _rate(metric: str, by: str) -> str:
    return _largest(f"sum by ({by}) (rate({metric}{{{ENGINE}}}[$__rate_interval]))")


def _throughput(board: Dashboard) -> None:
    of_pod = ("cluster", "namespace", "pod")
    board.graph(
        "Tokens/s: generated, and prompt (dashed)",
        "Tokens per second, by pod. Prompt tokens include those found in the prefix cache.",
        [
            PanelQuery(_rate("vllm:generation_tokens_total", POD), "generated", of_pod),
            PanelQuery(_rate("vllm:prompt_tokens_total", POD), "prompt", of_pod),
        ],
        "short",
        dashed="prompt",
    )
    board.graph(
        "Finished requests, by reason",
        "Finished requests per second, over all chosen engines.",
        [PanelQuery(_rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")],
        "reqps",
    )
    board.graph(
        "Failed requests",
        "Share of requests that fail. Two shares are measured, and the larger is shown: requests that end with an"
        " error, and requests answered with 5xx.",
        [
            PanelQuery(
                _largest(f"max by ({POD}) ({FAILED}{{{CONTAINER}}})"), "", of_pod, optional="hardly any request fails"
            )
        ],
        "percentunit",
        [(ORANGE, "rejected_warning_ratio"), (RED, "rejected_critical_ratio")],
    )
