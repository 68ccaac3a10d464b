"""The dashboard of details: configuration, the traffic's shape, memory, and the exporter itself."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import (
    COLORED,
    MEMORY_FULL,
    OF_ENGINES,
    SHARE,
    UP,
    Dashboard,
    DashboardContext,
    texts,
)
from kvpressure.bundle.dashboards.harm import (
    BLUE,
    ORANGE,
    TOP,
    YELLOW,
    line,
    worst,
)
from kvpressure.bundle.dashboards.queries import (
    BY_ENGINE,
    CLUSTER,
    ENGINE,
    EXPORTER,
    OF_ENGINE,
    OF_EXPORTER,
    PanelQuery,
    engine,
)

NO_TIER: Final = "the engine has no KV tier, or does not report it in tokens"


def build(site: DashboardContext) -> Dashboard:
    """The dashboard, panel by panel."""
    board = Dashboard(
        "kvpressure / Detail",
        "How engines are configured, what is sent to them, what their memory is for, and how well the exporter works.",
        site,
        OF_ENGINES,
    )
    board.row("Configuration")
    _configuration(board)
    board.row("Traffic")
    _traffic(board)
    board.row("Memory")
    _memory(board)
    board.row("Exporter")
    _exporter(board)
    return board


def _configuration(board: Dashboard) -> None:
    board.table(
        "Limits",
        "Each limit of each engine: the value in force, whether it was set or is a default (which changes between"
        " releases), and the value to set instead.",
        [
            PanelQuery(worst(engine("limit", by="limit")), named=OF_ENGINE),
            PanelQuery(worst(engine("limit_explicit", by="limit")), named=OF_ENGINE),
            PanelQuery(
                worst(engine("limit_recommended", by="limit")), named=OF_ENGINE, optional="no engine needs other limits"
            ),
        ],
        {"series": "Engine", "limit": "Limit", "Value #A": "In force", "Value #B": "Set", "Value #C": "Recommended"},
        {
            "Limit": [("custom.width", 205)],
            "Set": [("mappings", texts(v0=("default", ORANGE), v1=("yes", "text"))), COLORED],
            "Recommended": [("thresholds", board.steps((), BLUE)), COLORED],
        },
        order="series",
        size=(11, 9),
    )
    info = f"max by ({BY_ENGINE}, version, flavour, target) (kvpressure_engine_info{{{ENGINE}}})"
    utilization = (YELLOW, "gpu_memory_utilization_long_context"), (ORANGE, "gpu_memory_utilization_recommended")
    board.table(
        "What runs",
        'Version and address of each engine. Column "Reserved" is gpu_memory_utilization: yellow from the share'
        ' recommended for long contexts, orange from the usually recommended share. Column "Overcommit": KV tokens that'
        ' the load can need, divided by capacity. Column "Prompts": whether one server gets short and long prompts.',
        [
            PanelQuery(worst(info), named=OF_ENGINE),
            PanelQuery(worst(engine("limit", 'limit="gpu_memory_utilization"')), named=OF_ENGINE),
            PanelQuery(worst(engine("kv_overcommit_ratio")), named=OF_ENGINE),
            PanelQuery(worst(engine("prompt_lengths_bimodal")), named=OF_ENGINE),
        ],
        {
            "series": "Engine",
            "flavour": "Server",
            "version": "Version",
            "target": "Metrics",
            "Value #B": "Reserved",
            "Value #C": "Overcommit",
            "Value #D": "Prompts",
        },
        {
            "Server": [("custom.width", 64)],
            "Version": [("custom.width", 76)],
            "Reserved": [("custom.width", 76), *SHARE, *board.marked(*utilization)],
            "Overcommit": [("custom.width", 90), ("decimals", 2), *board.marked((ORANGE, 1))],
            "Prompts": [
                ("custom.width", 110),
                ("mappings", texts(v0=("alike", "text"), v1=("short and long", ORANGE))),
                COLORED,
            ],
        },
        order="series",
        size=(13, 9),
    )


def _quantiles(metric: str, more: str = "", by: str = "") -> list[PanelQuery]:
    """p95 and p50, each a line."""
    return [
        line(metric, f"p{100 * float(one):.0f}", f'quantile="{one}"' + (f",{more}" if more else ""), by)
        for one in ("0.95", "0.5")
    ]


def _traffic(board: Dashboard) -> None:
    board.graph(
        "Tokens of a request: p95, and p50 (dashed)",
        "Prompt tokens and output tokens of a request, and the max_tokens that clients ask for, over five minutes.",
        _quantiles("request_tokens", by="kind"),
        "short",
        dashed="p50",
    )
    board.graph(
        "Finished and rejected",
        "Finished requests per second by finish reason, and rejected requests per second.",
        [
            PanelQuery(
                worst(
                    f"sum by ({BY_ENGINE}, reason)"
                    f" (rate(kvpressure_requests_{kind}_total{{{ENGINE}}}[$__rate_interval])) > 0"
                ),
                f"{kind}: {{{{reason}}}}",
                OF_ENGINE,
                optional=why,
                part=f"The curves for {kind} requests",
            )
            for kind, why in (("finished", "no request finished"), ("rejected", "no request was rejected"))
        ],
        "reqps",
    )
    board.graph(
        "Context spike, and bursts (dashed)",
        "Longest request of the last five minutes divided by the mean; arrival rate of the busiest ten seconds divided"
        " by the five-minute mean.",
        [line("context_length_spike_ratio"), line("arrival_burst_ratio", "burst")],
        "none",
        [(ORANGE, "context_spike_ratio")],
        dashed="burst",
        size=(6, 8),
    )
    board.graph(
        "In flight against the limit",
        "Requests in flight divided by the smallest known limit on running requests.",
        [line("concurrency_ratio")],
        "percentunit",
        [(ORANGE, "concurrency_warning_ratio")],
        size=(6, 8),
    )
    board.graph(
        "Throughput against its best",
        "Throughput of the last minute divided by the best minute of the last fifteen.",
        [line("throughput_trend_ratio", optional="there is little history, or demand fell")],
        "percentunit",
        top=1,
        size=(6, 8),
    )
    board.graph(
        "Outside the engine",
        "Mean time that a finished request spent in the tokenizer, the API server and the network.",
        [line("outside_engine_seconds")],
        "s",
        size=(6, 8),
    )
    board.graph(
        "Prefix cache hits now, and with so many times the KV memory",
        "Share of looked-up prompt tokens that were in the prefix cache, over five minutes; and the share that more KV"
        " memory would give, predicted from KV events.",
        [line("prefix_hit_ratio", "×", by="capacity")],
        "percentunit",
        top=1,
        size=(24, 8),
    )


def _memory(board: Dashboard) -> None:
    board.graph(
        "Tokens in the KV cache, and capacity (dashed)",
        "Token slots in occupied blocks, and all token slots; those of a KV tier in host memory beside them.",
        [
            line("kv_cache_used_tokens"),
            line("kv_cache_capacity_tokens", "capacity"),
            line("kv_tier_capacity_tokens", "tier capacity", optional=NO_TIER, part="Line of the tier"),
        ],
        "short",
        dashed="capacity",
    )
    board.graph(
        "Prompt tokens found in caches, and KV stored in a tier (dashed)",
        "Prompt tokens per second that were not computed, by where they were found: the GPU's KV cache (device), host"
        " memory, disk, another server. Tokens per second copied to each tier. Much stored and little found: the tier"
        " is too small, or never matched.",
        [
            line("prompt_tokens_cached_per_second", "found", by="source", optional=NO_TIER),
            line("kv_tier_tokens_per_second", "stored", 'direction="stored"', "tier", NO_TIER),
        ],
        "short",
        dashed="stored",
    )
    board.graph(
        "Who holds the prefix cache",
        "Share of the blocks in the prefix cache by LoRA adapter and by cache salt, mean of a minute (needs KV events)."
        " A salt is a number that changes when the exporter restarts.",
        [
            PanelQuery(
                worst(engine("kv_held_ratio", by="by, holder")),
                "{{by}} {{holder}}",
                OF_ENGINE,
                optional="no KV events are read, or no request had an adapter or a salt",
            )
        ],
        "percentunit",
        top=1,
    )
    board.graph(
        "Reserved minus allocated",
        'Lines: "allocator" is memory that PyTorch keeps unused, "kv_pool" is free KV blocks, and "kv_block" is unused'
        " slots in occupied blocks.",
        [
            line("fragmentation_bytes", more='scope!="allocator"', by="scope"),
            line(
                "fragmentation_bytes",
                more='scope="allocator"',
                by="scope",
                optional="the plugin inside vLLM is not installed",
                part='Line "allocator"',
            ),
        ],
        "decbytes",
        [(ORANGE, "fragmentation_warning_bytes")],
    )
    board.graph(
        "What the memory is for",
        "Device memory of each engine by component, as reported by its log and its metrics.",
        [line("memory_component_bytes", by="component")],
        "decbytes",
    )
    board.graph(
        "Processes on the GPUs",
        "Device memory of the processes on each GPU, by pod. Without a pod: processes that belong to no pod.",
        [
            PanelQuery(
                f"topk({TOP}, max by ({EXPORTER}, gpu, uuid, namespace, pod)"
                f' (kvpressure_gpu_process_memory_bytes{{{CLUSTER},uuid=~"$gpu"}}))',
                "GPU {{gpu}}",
                (*OF_EXPORTER, "namespace", "pod"),
                optional="the driver does not report memory by process",
            )
        ],
        "decbytes",
    )
    by, of_gpus = f"{EXPORTER}, gpu, uuid", f'{CLUSTER},uuid=~"$gpu"'
    known = f"topk({TOP}, max by ({by}, name, driver) (kvpressure_gpu_info{{{of_gpus}}}))"
    values = {
        "gpu_memory_total_bytes": "Memory",
        "gpu_memory_demand_ratio": "Required",
        "gpu_power_watts": "Power",
        "gpu_power_limit_watts": "Limit",
    }
    board.table(
        "GPUs and drivers",
        "Name, driver, memory, required memory, power draw and power limit of each GPU.",
        [PanelQuery(known)]
        + [PanelQuery(f"max by ({by}) (kvpressure_{metric}{{{of_gpus}}}) and on ({by}) {known}") for metric in values],
        {"node": "Node", "gpu": "GPU", "name": "Name", "driver": "Driver"}
        | {f"Value #{ref}": heading for ref, heading in zip("BCDE", values.values(), strict=True)},
        {
            "GPU": [("custom.width", 50)],
            "Memory": [("unit", "decbytes")],
            "Required": [*SHARE, *board.marked(*MEMORY_FULL)],
            "Power": [("unit", "watt")],
            "Limit": [("unit", "watt")],
        },
        order="node",
        size=(16, 8),
    )


def _exporter(board: Dashboard) -> None:
    def seconds(legend: str, metric: str, *by: str) -> PanelQuery:
        labels = (*OF_EXPORTER, *by)
        expr = f"topk({TOP}, max by ({', '.join(labels)}) (kvpressure_{metric}{{{CLUSTER}}}))"
        return PanelQuery(expr, legend, labels)

    sources = f"min by ({EXPORTER}, source) (kvpressure_source_up{{{CLUSTER}}})"
    board.states(
        "Sources",
        "Whether each source's last reading succeeded. While a source is down, its values are absent, never 0.",
        [PanelQuery(sources, named=(*OF_EXPORTER, "source"))],
        UP,
        size=(12, 8),
        shown="auto",
    )
    board.graph(
        "Failures by reason",
        "Failed readings of sources (such as GPU driver, kubelet or logs) and failed scrapes of targets (engines), per"
        " second.",
        [
            PanelQuery(
                f"topk({TOP}, sum by ({EXPORTER}, {kind}, reason)"
                f" (rate(kvpressure_{kind}_errors_total{{{CLUSTER}}}[$__rate_interval])))",
                "",
                (*OF_EXPORTER, kind, "reason"),
                optional=f"no {kind} has failed",
                part=f"The curves for {kind}s",
            )
            for kind in ("source", "target")
        ],
        "reqps",
        size=(12, 8),
    )
    board.graph(
        "Lateness, and durations of readings (dashed)",
        "How late the last tick was; the slowest reading of a source and scrape of an engine.",
        [
            seconds("", "tick_lag_seconds"),
            seconds("reading", "source_duration_seconds", "source"),
            seconds("reading", "target_scrape_seconds", "target"),
        ],
        "s",
        dashed="reading",
        size=(12, 8),
    )
    job = f'{CLUSTER},job=~".*{board.site.values.exporter_job}.*"'  # as the rules find it: by a part of the name
    board.graph(
        "CPU, and memory (right) of the exporter",
        "CPU cores that the exporter uses, and its resident memory.",
        [
            PanelQuery(f"topk({TOP}, rate(process_cpu_seconds_total{{{job}}}[$__rate_interval]))", "", OF_EXPORTER),
            PanelQuery(f"topk({TOP}, process_resident_memory_bytes{{{job}}})", "memory", OF_EXPORTER),
        ],
        "none",
        dashed="memory",
        right="decbytes",
        size=(12, 8),
    )
