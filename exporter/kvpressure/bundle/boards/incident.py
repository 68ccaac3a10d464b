"""The incident board: the first row answers who, why, what fires and what to do; the timelines below show since when."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.boards.builder import (
    BLUE,
    BY_ENGINE,
    CONTAINER,
    ENGINE,
    GPU,
    GREEN,
    LOG_EVENTS,
    NO_BASELINE,
    ORANGE,
    PURPLE,
    RED,
    WINE,
    YELLOW,
    Board,
    Json,
    Query,
    Site,
    column,
    drill,
    engine,
    gpu,
    matching,
    neutral,
    stat,
    states,
    steps,
    table,
    texts,
    timeseries,
)

_VERDICTS: Final = texts(
    idle=("idle", BLUE), healthy=("healthy", GREEN), kv_pressure=("KV pressure", RED),
    concurrency_limited=("concurrency limited", ORANGE), compute_bound=("compute bound", ORANGE),
    host_bound=("host bound", ORANGE), stalled=("stalled", WINE), unknown=("unknown", PURPLE),
)
_STAGES: Final = texts(building=("building", YELLOW), saturated=("saturated", ORANGE), thrashing=("thrashing", RED),
                       failing=("failing", WINE))
_VERDICT_COLORS: Final = (("healthy", GREEN), ("idle", BLUE), ("kv_pressure", RED), ("stalled", WINE),
                          ("(concurrency_limited|compute_bound|host_bound)", ORANGE), ("unknown", PURPLE))
_COLORED: Final = ("custom.cellOptions", {"type": "color-text"})
_FIRING: Final = ('ALERTS{alertstate="firing",kvpressure_family=~".+",severity!="info",cluster=~"$cluster",'
                  'namespace=~"$namespace|",model_name=~"$model|",pod=~"$pod|"}')


def build(site: Site) -> Board:
    """The board for ``site``."""
    board = Board("kvpressure / Incident", "First five minutes of an incident: is it the KV cache, what fires, what to do.")
    board.add(_engines(site), 13, 8)
    board.add(_fires(site), 6, 8)
    board.add(_advice(site), 5, 8)
    for tile in _tiles(site):
        board.add(tile, 3, 4)
    board.row("Verdict and alerts")
    board.add(_verdicts(site), 12, 7)
    board.add(_alert_states(site), 12, 7)
    board.add(_evidence(site), 12, 7)
    board.add(_signature(site), 12, 7)
    board.row("Memory, KV cache, queue")
    _memory_kv_queue(site, board)
    board.row("What users feel")
    _users(site, board)
    board.row("Compute and batching")
    _compute(site, board)
    board.row("What is being sent, and the pod around the engine")
    _requests_and_pod(site, board)
    return board


def _board(uid: str, title: str) -> tuple[str, list[Json]]:
    return ("links", [drill(uid, title, pod="${__data.fields.Pod}")])


def _memory(metric: str) -> str:
    """``metric`` of the fullest GPU of each engine, with that GPU's labels."""
    joined = (f"kvpressure_engine_gpu_info{{{ENGINE},uuid=~\"$gpu\"}} * on (cluster, uuid) group_left (gpu) "
              f"max by (cluster, uuid, gpu) ({metric})")
    return f"topk by ({BY_ENGINE}) (1, max by ({BY_ENGINE}, uuid, gpu) ({joined}))"


def _engines(site: Site) -> Json:
    queries = [
        Query(engine("verdict", by="verdict") + " == 1", table=True),
        Query(engine("pressure_stage", by="stage") + " == 1", table=True, optional="no engine is under KV pressure"),
        Query(engine("verdict_confidence"), table=True),
        Query(engine("kv_cache_used_ratio_max"), table=True),
        Query(_memory("gpu:kvpressure_memory_needed:ratio"), table=True),
        Query(engine("requests_waiting", 'reason="all"'), table=True),
        Query(engine("requests_running"), table=True),
        Query(engine("documented_signature_met"), table=True),
    ]
    columns = {"model_name": "Model", "namespace": "Namespace", "pod": "Pod", "engine": "Engine", "gpu": "GPU",
               "verdict": "Verdict", "stage": "Stage", "Value #C": "Confidence", "Value #D": "KV cache", "Value #E": "GPU memory needed",
               "Value #F": "Waiting", "Value #G": "Running", "Value #H": "Documented signature"}
    gauge = ("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"})
    kv_steps = steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio"))
    memory_steps = steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio"))
    ratio = (("unit", "percentunit"), ("min", 0), ("max", 1), ("decimals", 0))
    overrides = [
        *(column(name, ("custom.width", width)) for name, width in (("Model", 95), ("Namespace", 85), ("Pod", 130), ("Engine", 60), ("GPU", 45))),
        column("Verdict", ("custom.width", 120), ("mappings", _VERDICTS), ("custom.cellOptions", {"type": "color-background", "mode": "basic"})),
        column("Stage", ("mappings", _STAGES), _COLORED),
        column("Confidence", *ratio, ("thresholds", steps(site, (GREEN, "confident"), base=YELLOW)), _COLORED),
        column("KV cache", *ratio, ("thresholds", kv_steps), gauge, _board("kvpressure-memory", "Memory and KV cache of this pod")),
        column("GPU memory needed", *ratio, ("thresholds", memory_steps), gauge,
               _board("kvpressure-memory", "Memory and KV cache of this pod")),
        column("Waiting", ("thresholds", steps(site, (ORANGE, "traffic_min_requests"))), _COLORED,
               _board("kvpressure-workload", "Workload of this pod")),
        column("Documented signature", ("mappings", texts(v0=("not met", GREEN), v1=("met", ORANGE))), _COLORED),
        column("Pod", ("links", [drill("kvpressure-incident", "Only this pod", pod="${__value.raw}")])),
    ]
    about = ("Every engine: model, pod, its fullest GPU, the verdict with stage and confidence, KV cache against GPU memory against "
             "queue, and the documented signature beside the verdict. GPU memory is what is really needed: an engine "
             "reserves its pool at start, so used memory says nothing.")
    return table(site, "Who, and is it the KV cache?", about, queries, columns, overrides, empty="-",
                 sort="Waiting", alert="VllmKVCachePressure")


def _fires(site: Site) -> Json:
    columns = {"alertname": "Alert", "severity": "Severity", "page": "Page", "pod": "Pod"}
    levels = texts(critical=("critical", RED), warning=("warning", ORANGE), info=("info", BLUE))
    overrides = [
        column("Alert", ("custom.width", 220), ("links", [{"title": "Runbook", "url": f"{site.values.runbook_base_url}/${{__value.raw}}.md", "targetBlank": True}])),
        column("Severity", ("mappings", levels), _COLORED),
        column("Page", ("custom.width", 55), ("mappings", texts(true=("yes", RED), false=("no", "text"))), _COLORED),
    ]
    return table(site, "What fires", "Firing alerts of this bundle for the chosen engines, and those about GPUs and the exporter. "
                 "A click opens the runbook.", [Query(f"max by (alertname, severity, page, pod) ({_FIRING})", table=True, optional="nothing fires")], columns, overrides)


def _advice(site: Site) -> Json:
    queries = [Query(engine("limit_recommended", by="limit"), table=True, optional="no engine needs other limits"),
               Query(f"{engine('limit', by='limit')} and on ({BY_ENGINE}, limit) kvpressure_limit_recommended{{{ENGINE}}}", table=True,
                     optional="no engine needs other limits")]
    columns = {"pod": "Pod", "limit": "Limit", "Value #B": "Now", "Value #A": "Set to"}
    return table(site, "What to do", "Limits to change: in force now and the value to set, computed for each engine. Order of the mitigation: cap "
                 "tokens at the edge, max_num_seqs down, max_num_batched_tokens down, gpu_memory_utilization down, restart last.",
                 queries, columns, [column("Pod", ("custom.width", 120)), column("Limit", ("custom.width", 160)), column("Set to", ("thresholds", neutral()), _COLORED)])


def _tiles(site: Site) -> list[Json]:
    ratio = "percentunit"
    return [
        stat(site, "KV cache", "Fullest KV cache of the last minute of samples. Full is not a fault; full with a queue is.",
             f"max({engine('kv_cache_used_ratio_max')})", ratio,
             steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")), "VllmKVCachePressure"),
        stat(site, "GPU memory needed", "Memory really needed: used minus the empty part of the KV pool.",
             f"max({_memory('gpu:kvpressure_memory_needed:ratio')})", ratio,
             steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio")), "GpuMemoryHigh"),
        stat(site, "GPU memory used", "Used share of device memory. Reserved at start, high with and without pressure: no judgement.",
             f"max({gpu('gpu_memory_used_ratio')})", ratio, neutral()),
        stat(site, "Waiting", "Requests waiting, all reasons.", "sum(" + engine("requests_waiting", 'reason="all"') + ")", "short",
             steps(site, (ORANGE, "traffic_min_requests"))),
        stat(site, "Concurrency", "Requests in flight against the smallest known limit.", f"max({engine('concurrency_ratio')})",
             ratio, steps(site, (ORANGE, "concurrency_warning_ratio")), "VllmConcurrencyNearLimit"),
        stat(site, "Latency vs baseline", "Worst p95 latency against the engine's own baseline, any phase.",
             f"max({engine('latency_baseline_ratio', by='phase')})", "none",
             steps(site, (YELLOW, "latency_rising_ratio"), (RED, "latency_multiplied_ratio")), optional=NO_BASELINE),
        stat(site, "Preemptions", "Requests pushed out of the batch per second for want of KV blocks.",
             f"max({engine('preemption_rate')})", "reqps", neutral(ORANGE), "VllmKVCachePressure"),
        stat(site, "Documented signature", "Whether most of the documented conditions hold on any chosen engine.",
             f"max({engine('documented_signature_met')})", "none", neutral(), "VllmDocumentedSignature",
             mappings=texts(v0=("not met", GREEN), v1=("met", ORANGE))),
    ]


def _verdicts(site: Site) -> Json:
    queries = [Query(engine("verdict", by="verdict") + " == 1", "{{pod}} {{engine}} {{verdict}}")]
    overrides = [matching(f"/ {pattern}$/", ("color", {"mode": "fixed", "fixedColor": color})) for pattern, color in _VERDICT_COLORS]
    return states(site, "Verdict over time", "One bar for each engine and verdict, while it stands.", queries,
                  texts(v1=("stands", "text")), overrides)


def _alert_states(site: Site) -> Json:
    queries = [Query(f"max by (alertname, severity, pod) ({_FIRING})", "{{severity}} {{alertname}} {{pod}}")]
    overrides = [matching(f"/^{severity} /", ("color", {"mode": "fixed", "fixedColor": color}))
                 for severity, color in (("critical", RED), ("warning", ORANGE))]
    return states(site, "Alerts over time", "Firing alerts of this bundle, information left out.", queries,
                  texts(v1=("fires", "text")), overrides)


def _evidence(site: Site) -> Json:
    colors = [matching("/./", ("color", {"mode": "fixed", "fixedColor": ORANGE}))]
    return states(site, "Why: evidence that holds", "Named evidence behind the verdict, while it is true; what is true of every working engine is left out.",
                  [Query(engine("evidence", 'evidence!~"page_fresh|work_present|tokens_flow|tokens_lately"', by="evidence") + " == 1", "{{pod}} {{evidence}}")], texts(v1=("true", "text")), colors)


def _signature(site: Site) -> Json:
    about = ("Each documented condition exactly as the guides state it, while it holds. It stands beside the verdict, not in place of "
             "it: device memory is high on a healthy engine, and utilization stays high under real pressure.")
    colors = [matching("/./", ("color", {"mode": "fixed", "fixedColor": YELLOW}))]
    return states(site, "Documented signature: conditions that hold", about,
                  [Query(engine("documented_signature", by="condition") + " == 1", "{{pod}} {{condition}}")],
                  texts(v1=("holds", "text")), colors, "VllmDocumentedSignature")


def _memory_kv_queue(site: Site, board: Board) -> None:
    board.add(timeseries(
        site, "KV cache used", "Used share of the KV cache: samples and the maximum of the last minute.",
        [Query(engine("kv_cache_used_ratio"), "{{pod}} {{engine}}"), Query(engine("kv_cache_used_ratio_max"), "{{pod}} {{engine}} max")],
        "percentunit", steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")), "VllmKVCachePressure", top=1), 8, 8)
    board.add(timeseries(
        site, "GPU memory: needed and used", "Needed is used minus the empty part of the KV pool; the gap between the lines is the pool's free room.",
        [Query(f"gpu:kvpressure_memory_needed:ratio{{{GPU}}} and on (cluster, uuid) kvpressure_engine_gpu_info{{{ENGINE}}}", "GPU {{gpu}} needed"),
         Query(gpu("gpu_memory_used_ratio"), "GPU {{gpu}} used")],
        "percentunit", steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio")), "GpuMemoryHigh", top=1), 8, 8)
    board.add(timeseries(
        site, "Queue", "Requests waiting by reason, and running.",
        [Query(engine("requests_waiting", by="reason"), "{{pod}} waiting {{reason}}"), Query(engine("requests_running"), "{{pod}} running")],
        "short"), 8, 8)
    board.add(timeseries(
        site, "In flight against the limit", "Requests in flight and the most that can run at once, by where the limit comes from.",
        [Query(engine("requests_in_flight"), "{{pod}} in flight"), Query(engine("max_concurrent_requests", by="source"), "{{pod}} limit {{source}}")],
        "short", None, "VllmConcurrencyNearLimit"), 8, 8)
    board.add(timeseries(
        site, "Preemptions", "Requests pushed out of the batch per second, counted or seen at once.",
        [Query(engine("preemption_rate"), "{{pod}} {{engine}}")], "reqps", None, "VllmKVCachePressure"), 8, 8)
    board.add(timeseries(
        site, "Reserved minus allocated", "Allocator: torch's caching allocator (needs the plugin). kv_pool: free KV blocks. kv_block: waste inside blocks.",
        [Query(engine("fragmentation_bytes", by="scope"), "{{pod}} {{scope}}")], "decbytes",
        steps(site, (ORANGE, "fragmentation_warning_bytes")), "VllmMemoryFragmentation"), 8, 8)


def _users(site: Site, board: Board) -> None:
    def phase(name: str, title: str, about: str) -> None:
        board.add(timeseries(site, title, about, [
            Query(engine("latency_seconds", f'phase="{name}",quantile="{quantile}"'), f"{{{{pod}}}} p{percent}")
            for quantile, percent in (("0.5", 50), ("0.95", 95), ("0.99", 99))], "s"), 8, 8)

    phase("ttft", "Time to first token", "Quantiles over the last minute.")
    phase("inter_token", "Time between tokens", "Quantiles over the last minute.")
    phase("queue", "Time in the queue", "Quantiles over the last minute.")
    board.add(timeseries(
        site, "p95 latency against the engine's baseline", "1 is normal for this engine.",
        [Query(engine("latency_baseline_ratio", by="phase"), "{{pod}} {{phase}}", optional=NO_BASELINE)], "none",
        steps(site, (YELLOW, "latency_rising_ratio"), (RED, "latency_multiplied_ratio"))), 8, 8)
    board.add(timeseries(
        site, "Throughput", "Tokens per second over the last half minute.",
        [Query(engine("tokens_per_second", by="kind"), "{{pod}} {{kind}}")], "short"), 8, 8)
    board.add(timeseries(
        site, "Finished and rejected", "Requests per second by how they ended, and refused ones.",
        [Query(f"sum by (pod, reason) (rate(kvpressure_requests_finished_total{{{ENGINE}}}[$__rate_interval]))", "{{pod}} {{reason}}"),
         Query(f"sum by (pod, reason) (rate(kvpressure_requests_rejected_total{{{ENGINE}}}[$__rate_interval]))", "{{pod}} rejected {{reason}}")],
        "reqps"), 8, 8)


def _compute(site: Site, board: Board) -> None:
    board.add(timeseries(
        site, "Effective batch size", "p95 of requests running, and the mean number of decoding requests.",
        [Query(engine("effective_batch_size", 'quantile="0.95"'), "{{pod}} p95"), Query(engine("effective_batch_size_mean"), "{{pod}} mean")],
        "short", steps(site, (GREEN, "signature_batch_size"), base=ORANGE), "VllmBatchCollapse"), 8, 8)
    board.add(timeseries(
        site, "GPU activity", "Utilization is the share of time in which some kernel ran, not an occupancy; tensor and DRAM activity only where the card gives them.",
        [Query(gpu("gpu_utilization_ratio"), "GPU {{gpu}} utilization"), Query(gpu("gpu_tensor_activity_ratio"), "GPU {{gpu}} tensor"),
         Query(gpu("gpu_dram_activity_ratio"), "GPU {{gpu}} DRAM")],
        "percentunit", steps(site, (GREEN, "signature_utilization_ratio"), base=YELLOW), "VllmDocumentedSignature", top=1), 8, 8)
    board.add(timeseries(
        site, "Memory high, compute low", "The score and its three factors; absent where a factor cannot be known.",
        [Query(engine("memory_high_compute_low_score"), "{{pod}} score"), Query(engine("score_factor", by="factor"), "{{pod}} {{factor}}")],
        "percentunit", None, top=1), 8, 8)


def _requests_and_pod(site: Site, board: Board) -> None:
    board.add(timeseries(
        site, "Context length", "Longest context of five minutes, and the mean.",
        [Query(engine("context_length_tokens", by="stat"), "{{pod}} {{stat}}")], "short"), 6, 8)
    board.add(timeseries(
        site, "Request shape, p95", "Prompt and output tokens, and the max_tokens that clients ask for.",
        [Query(engine("request_tokens", 'quantile="0.95"', by="kind"), "{{pod}} {{kind}}")], "short"), 6, 8)
    board.add(timeseries(
        site, "Log events", "Failed allocations and other lines that tell of trouble, per minute.",
        [Query(f"sum by (pod, event) (rate(kvpressure_log_events_total{{{CONTAINER},event=~\"{LOG_EVENTS}\"}}[$__rate_interval])) * 60", "{{pod}} {{event}}", optional="no such line came")],
        "cpm"), 6, 8)
    board.add(timeseries(
        site, "Restarts and CPU throttling", "Restarts since start; share of CFS periods throttled.",
        [Query(f"max by (pod, container) (kvpressure_container_restarts_total{{{CONTAINER}}})", "{{pod}} restarts"),
         Query(f"max by (pod, container) (kvpressure_container_cpu_throttled_ratio{{{CONTAINER}}})", "{{pod}} throttled")],
        "short"), 6, 8)
