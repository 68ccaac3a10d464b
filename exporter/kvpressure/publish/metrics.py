"""Every metric this exporter publishes.

A signal's metric is declared on the signal's field (``model.signals``), all others here. The collector renders from
this table, rules and dashboards may use only its names, and ``docs/reference/metrics.md`` is generated from it. Names
are a contract (frozen by ``tests/golden/metric_names.txt``): a rename keeps the old name for a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model.signals import CONTAINER, ENGINE, GPU, GROUPS, PREFIX, Kind, Metric, metrics_of

__all__ = ["BY_NAME", "CONTAINER", "ENGINE", "GPU", "METRICS", "PREFIX", "Kind", "Metric"]


def _m(name: str, kind: Kind, help: str, labels: tuple[str, ...] = (), absent: str = "") -> Metric:
    return Metric(name, kind, help, labels, absent)


PREFIXED: Final[Mapping[str, str]] = {"namespace": "engine_namespace", "pod": "engine_pod"}
"""Names of labels where the scraper owns theirs."""

IN_POOL: Final = (*ENGINE, "pool", "role")
"""Labels of what alerts begin with, so that every alert about an engine names its pool."""
CONTAINER_IN_POOL: Final = (*CONTAINER, "model_name", "pool")
POD: Final = ("namespace", "pod", "pool")

_SPLIT = "on a GPU that is split by MIG, or into partitions that report their own memory"

METRICS: Final[tuple[Metric, ...]] = (
    # --- device ---------------------------------------------------------------------------------------------
    _m("gpu_info", "info", "Identity of a GPU; value is always 1.", (*GPU, "name", "driver")),
    _m("gpu_up", "gauge", "1 if the GPU answered the last reading, 0 if a known GPU could not be read.", GPU),
    _m("gpu_memory_total_bytes", "gauge", "Total device memory.", GPU, f"on a unified-memory GPU; {_SPLIT}"),
    _m(
        "gpu_memory_used_bytes",
        "gauge",
        "Device memory in use: total minus free, driver reservation included.",
        GPU,
        _SPLIT,
    ),
    _m(
        "gpu_memory_used_ratio",
        "gauge",
        "Used share of device memory, 0-1. High values do not show KV pressure: engines preallocate the KV pool.",
        GPU,
        "on a GPU that is split by MIG or into partitions",
    ),
    _m(
        "gpu_memory_demand_ratio",
        "gauge",
        "Share of device memory in real use, 0-1: used memory minus the unused part of the KV pools on this GPU."
        " On a GPU without an engine, all used memory counts.",
        GPU,
        "an engine on this GPU has a KV pool of unknown size, is not scraped, or is on another node",
    ),
    _m(
        "gpu_memory_floor_ratio",
        "gauge",
        "Share of device memory in use outside the KV pools on this GPU, 0-1: what is required without a request.",
        GPU,
        "no engine is on this GPU, or the size of a KV pool is unknown",
    ),
    _m(
        "gpu_utilization_ratio",
        "gauge",
        "Share of time in which a kernel was running, 0-1: a duty cycle, not occupancy.",
        GPU,
        "not supported on MIG instances",
    ),
    _m("gpu_sm_activity_ratio", "gauge", "Share of SM time with a resident warp, 0-1.", GPU, "needs GPM (Hopper+)"),
    _m("gpu_tensor_activity_ratio", "gauge", "Share of time the tensor pipes were active, 0-1.", GPU, "needs GPM"),
    _m("gpu_power_watts", "gauge", "Power draw.", GPU),
    _m("gpu_power_limit_watts", "gauge", "Enforced power limit.", GPU),
    _m(
        "gpu_throttled",
        "gauge",
        "1 while the driver reports clocks reduced for the reason in the label.",
        (*GPU, "reason"),
    ),
    _m(
        "gpu_xid_errors_total",
        "counter",
        "XID events since the exporter started. other: numbers that NVIDIA's catalogue does not have. Class: reset (the"
        " GPU fails until it is reset), check, or application (the GPU is healthy).",
        (*GPU, "xid", "class", "meaning", "action"),
    ),
    _m("gpu_xid_last_timestamp_seconds", "gauge", "Time of the last event with this XID.", (*GPU, "xid")),
    _m(
        "faulty_gpu_info",
        "info",
        "GPU with a fault, and an engine that is on it, or was within five minutes. fault: lost (the GPU does not"
        " answer) or xid (the driver has reported XID events since the exporter started).",
        (*GPU, "fault", "namespace", "pod", "model_name", "pool"),
        "the GPU answers, and the driver has reported no XID event",
    ),
    _m(
        "gpu_process_memory_bytes",
        "gauge",
        "Device memory of processes on this GPU by owning pod; an empty pod label means processes that belong to no"
        " pod.",
        (*GPU, "namespace", "pod"),
        "the driver does not report per-process memory",
    ),
    _m(
        "gpu_pod_info",
        "info",
        "Container that owns a GPU; a shared GPU has a series for each of its containers.",
        ("uuid", "namespace", "pod", "container", "shared"),
    ),
    _m(
        "worker_gpu_info",
        "info",
        "GPU of a worker pod whose engine is on another node. To find the engine, look up the series of"
        ' kvpressure_engine_group_info with the same "group".',
        ("uuid", "namespace", "pod", "group"),
        "the engine is on the same node",
    ),
    _m("gpus_expected", "gauge", "GPUs that the driver counts on this node.", ("vendor",)),
    _m("gpus_seen", "gauge", "GPUs that answered the last reading.", ("vendor",)),
    # --- engine ---------------------------------------------------------------------------------------------
    _m(
        "engine_up",
        "gauge",
        "1 if the last scrape of the engine succeeded, else 0. A single timeout is tolerated. revision: of the template"
        " that its pod was made from.",
        (*IN_POOL, "revision"),
    ),
    _m(
        "engine_info",
        "info",
        "Identity of the engine; value is always 1.",
        (*ENGINE, "version", "flavour", "container", "target"),
    ),
    _m("engine_gpu_info", "info", "GPU that belongs to this engine's pod.", (*IN_POOL, "uuid")),
    _m(
        "engine_group_info",
        "info",
        "Pods that form this engine, perhaps on several nodes: a LeaderWorkerSet, Ray cluster or KAITO workspace.",
        (*ENGINE, "group"),
        "the engine is one pod",
    ),
    _m(
        "engine_pool_info",
        "info",
        "Workload and role of the engine: prefill, decode, both; empty if none or unknown. pair: what prefill and"
        " decode of one deployment have in common. source: of the role, else of the pool: label, args, name or owner.",
        (*IN_POOL, "pair", "source"),
    ),
    _m("requests_finished_total", "counter", "Finished requests by reason.", (*ENGINE, "reason")),
    _m(
        "requests_rejected_total",
        "counter",
        "Requests refused: admission limits (503) and 4xx answers.",
        (*ENGINE, "reason"),
    ),
    # --- what the signals publish ---------------------------------------------------------------------------
    *metrics_of(GROUPS),
    # --- diagnosis ------------------------------------------------------------------------------------------
    _m("verdict", "gauge", "1 for the current verdict, 0 for every other verdict (state set).", (*ENGINE, "verdict")),
    _m(
        "verdict_confidence",
        "gauge",
        "Confidence of the current verdict, 0-1; 0.7 and above counts as confident. One series for each engine: its "
        "labels are the verdict and the stage (empty without one).",
        (*ENGINE, "verdict", "stage"),
    ),
    _m(
        "cause_info",
        "gauge",
        "The cause, and the first action with the argument to set. Value: confidence of the verdict, 0-1.",
        (*ENGINE, "verdict", "stage", "cause", "action"),
    ),
    _m("verdict_since_timestamp_seconds", "gauge", "Time at which the current verdict began.", ENGINE),
    _m(
        "engine_trouble",
        "gauge",
        "Sort key of engines, higher is worse: rank of the verdict (1 idle to 8 stalled) plus a fraction that grows"
        " with the queue.",
        ENGINE,
    ),
    _m(
        "verdict_reason",
        "gauge",
        "Measured value behind a reason for the verdict; docs/verdicts.md describes each reason.",
        (*ENGINE, "reason"),
        "the reason does not support the verdict, or the number is unknown",
    ),
    _m(
        "harm",
        "gauge",
        "What users feel, while it lasts: slow (p95 seconds of the phase that is furthest from its baseline; if too few"
        " requests finish for a p95, requests waiting divided by the finish rate over 5 minutes), losing_requests"
        " (kvpressure_requests_lost_ratio), stuck (kvpressure_no_progress_seconds) or answers_suspect (reads of freed"
        " KV blocks in 5 minutes), with that value; or another finding that raises an alert, 1. said: what the alert"
        " says, in numbers of one or two digits.",
        (*IN_POOL, "harm", "level", "said"),
        "there is no harm of this level, or it is unknown",
    ),
    _m(
        "documented_number",
        "gauge",
        "A number that the guides set a threshold for: concurrency (requests in flight / the limit) and context"
        " (longest / average) while requests wait, batch (p95) while several requests leave most of a batch unused,"
        " fragmentation (bytes), memory_warning and memory_critical (required share of a GPU, where less than that"
        " level is in use outside KV pools), signature (1 while it is met under load and the verdict is in doubt).",
        (*IN_POOL, "number"),
        "its condition does not hold or is unknown, or a confident verdict names a cause",
    ),
    _m(
        "finding",
        "gauge",
        "Finding about an engine, 1 true or 0 false.",
        (*IN_POOL, "finding"),
        "the finding is unknown",
    ),
    _m(
        "limit",
        "gauge",
        "Value of a limit in force.",
        (*ENGINE, "limit"),
        "the limit is unknown, or an assumed default",
    ),
    _m(
        "limit_explicit",
        "gauge",
        "1 if the limit was set, 0 if it is a default.",
        (*ENGINE, "limit"),
        "the arguments are not visible",
    ),
    _m(
        "limit_recommended",
        "gauge",
        "Value to set for a limit, computed for this engine.",
        (*ENGINE, "limit"),
        "there is no value to recommend, or too little data to compute it",
    ),
    # --- service-level objectives ---------------------------------------------------------------------------
    _m(
        "objective_requests_total",
        "counter",
        "Requests (ttft, e2e, availability) or tokens (inter_token) that count for a service-level objective.",
        (*IN_POOL, "objective"),
        "the objective is not set (thresholds objective_*_ratio)",
    ),
    _m(
        "objective_good_requests_total",
        "counter",
        "Requests that met the objective: their latency is at most kvpressure_objective_bound_seconds or, for"
        " availability, they got an answer.",
        (*IN_POOL, "objective"),
        "the objective is not set",
    ),
    _m(
        "objective_target_ratio",
        "gauge",
        "Target share of requests that meet the objective, 0-1.",
        (*ENGINE, "objective"),
        "the objective is not set",
    ),
    _m(
        "objective_bound_seconds",
        "gauge",
        "Requests up to this latency count as good: the objective, rounded down to a bucket bound of the"
        " engine's latency histogram.",
        (*ENGINE, "objective"),
        "the objective is not set, or the objective is availability",
    ),
    # --- the pod around the engine --------------------------------------------------------------------------
    _m(
        "pod_answers",
        "gauge",
        "1 if the engines of the pod answer; 0 if one refuses (connection refused or cut, HTTP 5xx, connected and no"
        " answer), its container does not run, or its readiness probe fails and no request reaches it.",
        POD,
        "the pod starts, is being deleted, or no connection came about, which says nothing about it",
    ),
    _m(
        "pool_answers",
        "gauge",
        "1 while an engine of the pool on this node answers, in a pod that does (kvpressure_pod_answers is not 0).",
        ("namespace", "pool", "model_name", "role", "revision"),
        "no engine of the pool answers on this node",
    ),
    _m(
        "pod_starting",
        "gauge",
        "1 while the pod starts for the first time, within the time that this may take: twice the longest of the last"
        " starts of its pool on this node.",
        (*POD, "revision"),
        "the pod has answered, its container failed or was restarted, or the start takes too long",
    ),
    _m(
        "pod_answers_since_timestamp_seconds",
        "gauge",
        "Time of the first answer in the present run of the pod's container.",
        POD,
        "the pod does not answer, or already answered when the exporter started, and has no readiness probe",
    ),
    _m(
        "start_usual_seconds",
        "gauge",
        "Longest of the last starts of a pool on this node, from scheduling to the first answer.",
        ("namespace", "pool"),
        "no start was seen on this node",
    ),
    _m(
        "down_info",
        "info",
        "Pod that is down, and why: by its log, the state of its container, or the answer of its host. A pod that"
        " served and is gone stays for five minutes, unless kube-state-metrics counts the replicas of its workload.",
        (*POD, "reason"),
        "the pod answers or starts",
    ),
    _m("container_restarts_total", "counter", "Restarts of the container.", CONTAINER_IN_POOL),
    _m(
        "out_of_memory_timestamp_seconds",
        "gauge",
        "Time when memory ran out, last. what: host (OOMKilled), sigkill (exit code 137, not OOMKilled), host_limit"
        " (nearly), gpu, kv_blocks or load. level: lost (the container was killed, or an engine that served does not"
        " answer) or sign.",
        (*CONTAINER_IN_POOL, "what", "level"),
        "memory did not run out",
    ),
    _m(
        "container_last_termination_info",
        "info",
        "Last termination of the container.",
        (*CONTAINER, "reason", "exit_code"),
    ),
    _m(
        "container_alerts_info",
        "info",
        "The pod's annotation or label kvpressure.io/alerts: off (no alerts) or ticket (alerts, but no pages).",
        (*CONTAINER_IN_POOL, "alerts"),
        "the pod has no such annotation or label",
    ),
    _m(
        "container_cpu_throttled_ratio",
        "gauge",
        "Share of CFS periods that were throttled over the last minute, 0-1.",
        CONTAINER,
    ),
    _m("container_cpu_used_ratio", "gauge", "CPU used divided by the CPU limit over the last minute.", CONTAINER),
    _m("container_memory_used_ratio", "gauge", "Working set divided by the memory limit.", CONTAINER),
    _m("log_events_total", "counter", "Events recognised in the container's log.", (*CONTAINER, "event")),
    _m(
        "container_discovery_info",
        "gauge",
        "Containers that have a GPU or look like an inference server; always 1. Label result: engine"
        " (scraped), no_target (an engine that is not scraped) or not_engine. Label reason: how the engine was"
        " recognised, or why it is not scraped.",
        (*CONTAINER, "result", "reason"),
    ),
    # --- the exporter itself --------------------------------------------------------------------------------
    _m(
        "source_up",
        "gauge",
        "1 if the source's last reading succeeded, else 0. A failed scrape of one engine shows in kvpressure_engine_up,"
        " not here.",
        ("source",),
    ),
    _m("source_duration_seconds", "gauge", "Duration of the source's last reading.", ("source",)),
    _m("source_errors_total", "counter", "Failed readings of a source, by reason.", ("source", "reason")),
    _m(
        "isolated_failures_total",
        "counter",
        "Internal failures of the exporter that affected one item only (kind: engine, GPU, container, target, source or"
        " node), by stage (tick = readings, signals, diagnosis; render = metrics, page, JSON) and reason. The failed"
        " item has no values; all other items are complete.",
        ("kind", "name", "stage", "reason"),
        "nothing has failed",
    ),
    _m("target_errors_total", "counter", "Failed scrapes of an engine by reason.", ("target", "reason")),
    _m("target_scrape_seconds", "gauge", "Duration of the last scrape of an engine.", ("target",)),
    _m(
        "page_bad_lines",
        "gauge",
        "Relevant lines of the last scrape that could not be parsed or had an impossible value (negative, not finite,"
        " too large).",
        ("target",),
    ),
    _m(
        "page_cut",
        "gauge",
        "Number of engines, series, lines or samples of the target's last scrape that the exporter did not use, by"
        " reason. Reason"
        ' "engines": the node\'s targets have over 64 engines in all, and this target has more than its share.'
        ' Reason "series": a scrape or histogram has too many series. Reason "plugin": the plugin\'s report had'
        ' too many lines; the value is always 1. Reason "new_engines": new engine names came too fast; 64 are'
        ' allowed at once, then one a minute. Reason "collisions": several series claimed the same metric of the'
        ' same engine. Reason "timestamps": the time of a sample differed from the node\'s clock by more than two'
        " minutes.",
        ("target", "reason"),
        "nothing was left out",
    ),
    _m(
        "recorder_up",
        "gauge",
        "1 if the flight recorder keeps up, 0 if it fails or drops ticks.",
        (),
        "the flight recorder is off",
    ),
    _m("recorder_errors_total", "counter", "Ticks that the flight recorder failed to record, by reason.", ("reason",)),
    _m(
        "web_refused_total",
        "counter",
        "Connections closed and requests refused by the web server because of a limit, by reason.",
        ("reason",),
        "nothing was refused",
    ),
    _m("ticks_total", "counter", "Completed rounds (ticks) of the main loop."),
    _m("tick_lag_seconds", "gauge", "How late the last tick was."),
    _m("build_info", "info", "Build of the exporter; value is always 1.", ("version", "python")),
)

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}
