"""The dashboard of memory and the KV cache: who holds what, how fast it fills, what is reserved but unused."""

from __future__ import annotations

from kvpressure.bundle.dashboards.builder import (
    BLUE,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    DashboardContext,
    column,
    dashed,
    drill,
    matching,
    neutral,
    stat,
    states,
    steps,
    table,
    texts,
    timeseries,
)
from kvpressure.bundle.dashboards.queries import GPU, TOP, Json, PanelQuery, engine, gpu, lines, top, worst, worst_gpus
from kvpressure.signals.window import QUARTER_MINUTE

NO_PLUGIN = "the plugin inside vLLM is not installed"
NO_FAULT = "no XID event or ECC error has occurred since the exporter started"


def build(site: DashboardContext) -> Dashboard:
    """The dashboard for ``site``."""
    dashboard = Dashboard(
        "kvpressure / Memory and KV cache",
        "What fills the KV cache and the GPUs, how fast they fill, and which memory is reserved but not used.",
    )
    for tile in _tiles(site):
        dashboard.add(tile, 4, 4)
    dashboard.add(_fullest(site), 12, 8)
    dashboard.add(_gpus(site), 12, 8)
    dashboard.row("KV cache")
    _cache(site, dashboard)
    dashboard.row("GPU memory")
    _memory(site, dashboard)
    dashboard.row("Memory high, compute low")
    _score(site, dashboard)
    return dashboard


def _tiles(site: DashboardContext) -> list[Json]:
    return [
        stat(
            site,
            "KV cache",
            "Highest KV cache usage of the last minute.",
            f"max({engine('kv_cache_used_ratio_max')})",
            "percentunit",
            steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
            "InferenceKVCachePressure",
        ),
        stat(
            site,
            "Full in",
            "Shortest time until a KV cache is full at the current rate.",
            f"min({engine('kv_cache_seconds_to_full')})",
            "s",
            steps(site, (YELLOW, "kv_seconds_to_full_warning"), base=RED),
            optional="no cache is filling",
        ),
        stat(
            site,
            "Overcommit",
            "Largest number of KV tokens that the current load can need, divided by KV capacity. Above 1, the KV"
            " cache can"
            " become too small for the load.",
            f"max({engine('kv_overcommit_ratio')})",
            "none",
            steps(site, (ORANGE, 1)),
        ),
        stat(
            site,
            "GPU memory required",
            "Required memory of the fullest GPU: used memory minus the unused part of the KV pool.",
            f"max(kvpressure_gpu_memory_demand_ratio{{{GPU}}})",
            "percentunit",
            steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio")),
            "GpuMemoryHigh",
        ),
        stat(
            site,
            "Reserved, not allocated",
            "Largest difference between reserved and allocated memory in torch's allocator.",
            "max(" + engine("fragmentation_bytes", 'scope="allocator"') + ")",
            "decbytes",
            steps(site, (ORANGE, "fragmentation_warning_bytes")),
            "InferenceMemoryFragmentation",
            optional=NO_PLUGIN,
        ),
        stat(
            site,
            "Preemptions",
            "Requests preempted per second on the worst engine.",
            f"max({engine('preemption_rate')})",
            "reqps",
            neutral(ORANGE),
            "InferenceKVCachePressure",
        ),
    ]


def _fullest(site: DashboardContext) -> Json:
    base = engine("kv_cache_used_ratio_max")
    queries = [
        PanelQuery(f"topk({TOP}, {base})", table=True),
        PanelQuery(top(base, engine("kv_cache_capacity_tokens")), table=True),
        PanelQuery(top(base, engine("kv_cache_used_tokens")), table=True),
        PanelQuery(top(base, engine("kv_overcommit_ratio")), table=True),
        PanelQuery(top(base, engine("preemption_rate")), table=True),
        PanelQuery(top(base, engine("prefix_cache_hit_ratio")), table=True),
    ]
    columns = {
        "model_name": "Model",
        "pod": "Pod",
        "engine": "Engine",
        "Value #A": "KV cache",
        "Value #C": "Tokens held",
        "Value #B": "Capacity",
        "Value #D": "Overcommit",
        "Value #E": "Preempted/s",
        "Value #F": "Prefix hits",
    }
    ratio = (("unit", "percentunit"), ("min", 0), ("max", 1), ("decimals", 0))
    overrides = [
        *(
            column(name, ("custom.width", width))
            for name, width in (
                ("Model", 82),
                ("Engine", 58),
                ("Tokens held", 88),
                ("Capacity", 72),
                ("Prefix hits", 78),
            )
        ),
        column(
            "Pod",
            ("custom.width", 112),
            ("links", [drill("kvpressure-incident", "Incident dashboard of this pod", pod="${__value.raw}")]),
        ),
        column(
            "KV cache",
            *ratio,
            ("thresholds", steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio"))),
            ("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}),
        ),
        column("Tokens held", ("unit", "short")),
        column("Capacity", ("unit", "short")),
        column(
            "Overcommit",
            ("decimals", 2),
            ("thresholds", steps(site, (ORANGE, 1))),
            ("custom.cellOptions", {"type": "color-text"}),
        ),
        column("Preempted/s", ("decimals", 2)),
        column("Prefix hits", *ratio),
    ]
    return table(
        site,
        "Fullest KV caches",
        f"The {TOP} engines with the highest KV cache usage in the last minute.",
        queries,
        columns,
        overrides,
        sort="KV cache",
        alert="InferenceKVCachePressure",
    )


def _gpus(site: DashboardContext) -> Json:
    needed = f"topk({TOP}, {gpu('gpu_memory_demand_ratio')})"
    queries = [
        PanelQuery(needed, table=True),
        PanelQuery(f"{gpu('gpu_memory_used_ratio')} and on (cluster, uuid) {needed}", table=True),
        PanelQuery(f"{gpu('gpu_memory_total_bytes')} and on (cluster, uuid) {needed}", table=True),
        PanelQuery(f"{gpu('gpu_utilization_ratio')} and on (cluster, uuid) {needed}", table=True),
    ]
    columns = {
        "gpu": "GPU",
        "uuid": "UUID",
        "Value #A": "Required",
        "Value #B": "Used",
        "Value #C": "Memory",
        "Value #D": "Utilization",
    }
    ratio = (("unit", "percentunit"), ("min", 0), ("max", 1), ("decimals", 0))
    gauge = ("custom.cellOptions", {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"})
    overrides = [
        *(column(name, ("custom.width", width)) for name, width in (("GPU", 48), ("UUID", 260))),
        column(
            "Required",
            *ratio,
            gauge,
            ("thresholds", steps(site, (ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio"))),
        ),
        column("Used", *ratio),
        column("Memory", ("unit", "decbytes")),
        column("Utilization", *ratio),
        column("UUID", ("links", [drill("kvpressure-memory", "Only this GPU", gpu="${__value.raw}")])),
    ]
    return table(
        site,
        "Fullest GPUs",
        f"The {TOP} GPUs with the highest required memory. Used memory alone means little, because the KV pool is"
        " reserved at start.",
        queries,
        columns,
        overrides,
        sort="Required",
        alert="GpuMemoryHigh",
    )


def _cache(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "KV cache used",
            "KV cache usage now, and the highest of the last minute, including peaks between two scrapes.",
            [
                PanelQuery(lines("kv_cache_used_ratio"), "{{pod}} {{engine}}"),
                PanelQuery(lines("kv_cache_used_ratio_max"), "{{pod}} {{engine}} max"),
            ],
            "percentunit",
            steps(site, (ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio")),
            "InferenceKVCachePressure",
            top=1,
            overrides=[dashed("/ max$/")],
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
            "Overcommit",
            "Largest number of KV tokens that the current load can need, divided by KV capacity.",
            [PanelQuery(lines("kv_overcommit_ratio"), "{{pod}} {{engine}}")],
            "none",
            steps(site, (ORANGE, 1)),
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Tokens in the cache",
            "Token slots in occupied blocks, and all token slots.",
            [
                PanelQuery(lines("kv_cache_used_tokens"), "{{pod}} held"),
                PanelQuery(lines("kv_cache_capacity_tokens"), "{{pod}} capacity"),
            ],
            "short",
            overrides=[dashed("/ capacity$/")],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Preemptions, and recomputed tokens (right)",
            "Requests preempted per second; tokens recomputed per second (estimate).",
            [
                PanelQuery(lines("preemption_rate"), "{{pod}} preemptions"),
                PanelQuery(lines("recomputed_tokens_estimate_rate"), "{{pod}} tokens again"),
            ],
            "reqps",
            None,
            "InferenceKVCachePressure",
            overrides=[
                matching("/ tokens again$/", ("unit", "short"), ("custom.axisPlacement", "right")),
                dashed("/ tokens again$/"),
            ],
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Prefix cache hits",
            "Share of looked-up prompt tokens that were in the prefix cache, over five minutes. Evictable prefix blocks"
            " count as free in KV usage.",
            [PanelQuery(lines("prefix_cache_hit_ratio"), "{{pod}} {{engine}}")],
            "percentunit",
            None,
            top=1,
        ),
        8,
        8,
    )


def _memory(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Required and used",
            "Required and used memory; the gap between the lines is the unused part of the KV pool.",
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
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "What the memory is for",
            "Device memory of each engine by component, as reported by its log and its metrics.",
            [PanelQuery(lines("memory_component_bytes", by="component"), "{{pod}} {{component}}")],
            "decbytes",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Reserved minus allocated",
            'Lines: "allocator" is memory that PyTorch keeps unused, "kv_pool" is free KV blocks, and "kv_block" is'
            " unused slots in occupied blocks.",
            [
                PanelQuery(lines("fragmentation_bytes", 'scope!="allocator"', by="scope"), "{{pod}} {{scope}}"),
                PanelQuery(
                    lines("fragmentation_bytes", 'scope="allocator"', by="scope"),
                    "{{pod}} {{scope}}",
                    optional=NO_PLUGIN,
                    part='Line "allocator"',
                ),
            ],
            "decbytes",
            steps(site, (ORANGE, "fragmentation_warning_bytes")),
            "InferenceMemoryFragmentation",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Processes",
            "Device memory of the processes on each GPU, by pod. A line without a pod shows processes"
            " that belong to no pod.",
            [
                PanelQuery(
                    worst_gpus(
                        f"max by (cluster, uuid, gpu, namespace, pod) (kvpressure_gpu_process_memory_bytes{{{GPU}}})"
                    ),
                    "GPU {{gpu}} {{pod}}",
                    optional="the driver does not report memory by process",
                )
            ],
            "decbytes",
        ),
        8,
        8,
    )
    dashboard.add(
        states(
            site,
            "Memory conditions that hold",
            "Memory conditions of the engines over time: memory leak while idle, KV blocks held without load, or"
            " fragmentation. Also: more device memory used than configured, host memory near its limit, container"
            " OOM-killed, or engine out of GPU memory.",
            [
                PanelQuery(
                    worst(
                        engine(
                            "finding",
                            'finding=~"memory_leak_idle|kv_held_without_load|allocator_fragmentation|baseline_too_high|'
                            'host_memory_near_limit|host_oom_killed|gpu_out_of_memory"',
                            by="finding",
                        )
                        + " == 1"
                    ),
                    "{{pod}} {{finding}}",
                    optional="no condition holds",
                )
            ],
            texts(v1=("holds", ORANGE)),
            alert="InferenceMemoryHeld",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Driver events",
            "XID events and ECC errors in the time range shown.",
            [
                PanelQuery(
                    f"sum by (gpu, uuid, xid) (increase(kvpressure_gpu_xid_errors_total{{{GPU}}}[$__rate_interval]))",
                    "GPU {{gpu}} XID {{xid}}",
                    optional=NO_FAULT,
                ),
                PanelQuery(
                    f"sum by (gpu, uuid, kind) (increase(kvpressure_gpu_ecc_errors_total{{{GPU}}}[$__rate_interval]))",
                    "GPU {{gpu}} ECC {{kind}}",
                    optional=NO_FAULT,
                ),
            ],
            "short",
            None,
            "GpuXidError",
        ),
        8,
        8,
    )


def _score(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "Score and its factors",
            "The score is the product of three factors: memory demand is high, GPU activity is low, requests are"
            " present.",
            [
                PanelQuery(lines("memory_high_compute_low_score"), "{{pod}} score"),
                PanelQuery(lines("score_factor", by="factor"), "{{pod}} {{factor}}"),
            ],
            "percentunit",
            None,
            "InferenceDocumentedSignature",
            top=1,
        ),
        12,
        8,
    )
    level = worst(engine("score_evidence_level", by="level") + " == 1")
    dashboard.add(
        states(
            site,
            "Evidence behind the compute factor",
            "Source of GPU activity: profiling counters, power or estimated FLOPs. NVML utilization is only weak"
            " evidence.",
            [PanelQuery(level, "{{pod}} {{level}}")],
            texts(v1=("in use", "text")),
            [matching("/./", ("color", {"mode": "fixed", "fixedColor": BLUE}))],
        ),
        12,
        8,
    )
