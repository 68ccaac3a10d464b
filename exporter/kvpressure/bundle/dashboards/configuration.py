"""The dashboard of configuration and health: limits, pods, and the exporter itself."""

from __future__ import annotations

from typing import Final

from kvpressure.bundle.dashboards.builder import (
    GREEN,
    LOG_EVENTS,
    NOT_A_POD,
    ORANGE,
    RED,
    YELLOW,
    Dashboard,
    DashboardContext,
    column,
    neutral,
    stat,
    states,
    steps,
    table,
    texts,
    timeseries,
)
from kvpressure.bundle.dashboards.queries import BY_ENGINE, CONTAINER, ENGINE, GPU, Json, PanelQuery, engine

NODE: Final = 'cluster=~"$cluster"'
_COLORED: Final = ("custom.cellOptions", {"type": "color-text"})


def build(site: DashboardContext) -> Dashboard:
    """The dashboard for ``site``."""
    dashboard = Dashboard(
        "kvpressure / Configuration and exporter health",
        "Limits in force and recommended limits, the pods around the engines, and whether kvpressure can read all its"
        " sources.",
    )
    for tile in _tiles(site):
        dashboard.add(tile, 4, 4)
    dashboard.add(_limits(site), 14, 9)
    dashboard.add(_versions(site), 10, 9)
    dashboard.row("Limits over time")
    _limits_over_time(site, dashboard)
    dashboard.row("Pods around the engines")
    _pods(site, dashboard)
    dashboard.row("Exporter: sources")
    _sources(site, dashboard)
    dashboard.row("Exporter: process")
    _process(site, dashboard)
    return dashboard


def _tiles(site: DashboardContext) -> list[Json]:
    none = steps(site, (ORANGE, 1))
    return [
        stat(
            site,
            "Limits not set",
            "Number of limits that the chosen engines leave at their default. Defaults change between engine versions.",
            f"count({engine('limit_explicit', by='limit')} == 0) or vector(0)",
            "short",
            none,
        ),
        stat(
            site,
            "gpu_memory_utilization",
            "Largest share of device memory that an engine reserves. Yellow: the share recommended for long contexts is"
            " reached or exceeded. Orange: the usually recommended share is reached or exceeded.",
            "max(" + engine("limit", 'limit="gpu_memory_utilization"') + ")",
            "none",
            steps(
                site, (YELLOW, "gpu_memory_utilization_long_context"), (ORANGE, "gpu_memory_utilization_recommended")
            ),
        ),
        stat(
            site,
            "Engines not read",
            "Engines whose metrics cannot be scraped.",
            f"count({engine('engine_up')} == 0) or vector(0)",
            "short",
            none,
            "InferenceCapacityLost",
        ),
        stat(
            site,
            "Sources down",
            "Number of sources whose last reading failed, over all exporters.",
            f"count(kvpressure_source_up{{{NODE}}} == 0) or vector(0)",
            "short",
            none,
            "KvpressureExporterImpaired",
        ),
        stat(
            site,
            "GPUs not read",
            "GPUs that a driver counts but that did not answer.",
            f"sum(max by (cluster, node, vendor) (kvpressure_gpus_expected{{{NODE}}} - kvpressure_gpus_seen{{{NODE}}}))"
            " or vector(0)",
            "short",
            none,
            "GpuLost",
        ),
        stat(
            site,
            "Exporters",
            "Number of exporters that Prometheus scrapes successfully.",
            f"count(kvpressure_build_info{{{NODE}}})",
            "short",
            neutral(),
            "KvpressureExportersDown",
        ),
    ]


def _limits(site: DashboardContext) -> Json:
    queries = [
        PanelQuery(engine("limit", by="limit"), table=True),
        PanelQuery(engine("limit_explicit", by="limit"), table=True),
        PanelQuery(engine("limit_recommended", by="limit"), table=True, optional="no engine needs other limits"),
    ]
    columns = {
        "model_name": "Model",
        "pod": "Pod",
        "engine": "Engine",
        "limit": "Limit",
        "Value #A": "In force",
        "Value #B": "Set",
        "Value #C": "Recommended",
    }
    overrides = [
        column("Limit", ("custom.width", 205)),
        column("Engine", ("custom.width", 60)),
        column("Set", ("mappings", texts(v0=("default", ORANGE), v1=("yes", GREEN))), _COLORED),
        column("Recommended", ("thresholds", neutral(ORANGE)), _COLORED),
    ]
    return table(
        site,
        "Limits",
        "Each limit of each engine: the value in force, whether it was set or is a default, and the value to set"
        " instead.",
        queries,
        columns,
        overrides,
        order="pod",
    )


def _versions(site: DashboardContext) -> Json:
    columns = {"pod": "Pod", "container": "Container", "version": "vLLM", "flavour": "Engine", "target": "Metrics page"}
    return table(
        site,
        "What runs",
        "Version and address of every engine.",
        [
            PanelQuery(
                f"max by ({BY_ENGINE}, container, version, flavour, target) (kvpressure_engine_info{{{ENGINE}}})",
                table=True,
            )
        ],
        columns,
        alert="InferenceCapacityLost",
    )


def _limits_over_time(site: DashboardContext, dashboard: Dashboard) -> None:
    dashboard.add(
        timeseries(
            site,
            "gpu_memory_utilization",
            "Share of device memory that the engine reserves at start.",
            [PanelQuery(engine("limit", 'limit="gpu_memory_utilization"'), "{{pod}} {{engine}}")],
            "none",
            steps(
                site, (YELLOW, "gpu_memory_utilization_long_context"), (ORANGE, "gpu_memory_utilization_recommended")
            ),
            top=1,
        ),
        12,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "max_num_seqs",
            "max_num_seqs in force, and the value recommended during KV pressure.",
            [
                PanelQuery(engine("limit", 'limit="max_num_seqs"'), "{{pod}} in force"),
                PanelQuery(
                    engine("limit_recommended", 'limit="max_num_seqs"'),
                    "{{pod}} recommended",
                    optional="no engine is under KV pressure",
                    part='Line "recommended"',
                ),
            ],
            "short",
        ),
        12,
        8,
    )


def _pods(site: DashboardContext, dashboard: Dashboard) -> None:
    by = "by (namespace, pod, container)"
    dashboard.add(
        timeseries(
            site,
            "Restarts",
            "Restarts of each container since its pod was created.",
            [
                PanelQuery(
                    f"max {by} (kvpressure_container_restarts_total{{{CONTAINER}}})", "{{pod}}", optional=NOT_A_POD
                )
            ],
            "short",
            steps(site, (RED, "crash_loop_restarts")),
            "InferenceCrashLoop",
        ),
        8,
        8,
    )
    dashboard.add(
        table(
            site,
            "Last termination of each container",
            "Reason and exit code from the kubelet. OOMKilled (137): the memory limit was reached.",
            [
                PanelQuery(
                    "max by (namespace, pod, container, reason, exit_code)"
                    f" (kvpressure_container_last_termination_info{{{CONTAINER}}})",
                    table=True,
                    optional="no container of an engine has terminated",
                )
            ],
            {"pod": "Pod", "container": "Container", "reason": "Reason", "exit_code": "Exit code"},
            alert="InferenceOOMKilled",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "CPU",
            "Used share of the CPU limit, and share of CFS periods throttled. vLLM's API server sends no tokens"
            " while its container is throttled.",
            [
                PanelQuery(
                    f"max {by} (kvpressure_container_cpu_used_ratio{{{CONTAINER}}})", "{{pod}} used", optional=NOT_A_POD
                ),
                PanelQuery(
                    f"max {by} (kvpressure_container_cpu_throttled_ratio{{{CONTAINER}}})",
                    "{{pod}} throttled",
                    optional=NOT_A_POD,
                ),
            ],
            "percentunit",
            steps(site, (YELLOW, "cpu_throttled_ratio"), (ORANGE, "container_limit_ratio")),
            "InferenceHostBound",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Memory of the container",
            "Working set divided by the container's memory limit. Host memory, not GPU memory.",
            [
                PanelQuery(
                    f"max {by} (kvpressure_container_memory_used_ratio{{{CONTAINER}}})",
                    "{{pod}}",
                    optional="no container has a memory limit",
                )
            ],
            "percentunit",
            steps(site, (ORANGE, "container_limit_ratio")),
            "InferenceHostMemoryNearLimit",
            top=1,
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Log events",
            "Log lines per minute that report problems: failed allocations, killed workers, preemptions, dead engines.",
            [
                PanelQuery(
                    "60 * sum by (pod, event)"
                    f' (rate(kvpressure_log_events_total{{{CONTAINER},event=~"{LOG_EVENTS}"}}[$__rate_interval]))',
                    "{{pod}} {{event}}",
                    optional="no log line reported a problem",
                )
            ],
            "cpm",
            None,
            "InferenceAllocationFailure",
        ),
        8,
        8,
    )
    dashboard.add(
        states(
            site,
            "Node conditions that hold",
            "Conditions that signal a problem, such as MemoryPressure. Such conditions make an incident worse, but do"
            " not cause KV pressure.",
            [
                PanelQuery(
                    f'max by (cluster, node, condition) (kvpressure_node_condition{{{NODE},condition!="Ready"}}) == 1',
                    "{{node}} {{condition}}",
                    optional="no node has such a condition",
                )
            ],
            texts(v1=("holds", ORANGE)),
        ),
        8,
        8,
    )


def _sources(site: DashboardContext, dashboard: Dashboard) -> None:
    mappings = texts(v0=("down", RED), v1=("up", GREEN))
    dashboard.add(
        states(
            site,
            "Sources",
            "Whether each source's last reading succeeded. While a source is down, its values are absent, never 0.",
            [PanelQuery(f"min by (node, source) (kvpressure_source_up{{{NODE}}})", "{{node}} {{source}}")],
            mappings,
            alert="KvpressureExporterImpaired",
            shown="auto",
        ),
        12,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Failures by reason",
            "Failed readings of sources (such as GPU driver, kubelet or logs) and failed scrapes of targets (engines),"
            " per second.",
            [
                PanelQuery(
                    f"sum by (source, reason) (rate(kvpressure_source_errors_total{{{NODE}}}[$__rate_interval]))",
                    "{{source}} {{reason}}",
                    optional="no source has failed",
                    part="The curves for sources",
                ),
                PanelQuery(
                    f"sum by (target, reason) (rate(kvpressure_target_errors_total{{{NODE}}}[$__rate_interval]))",
                    "{{target}} {{reason}}",
                    optional="no target has failed",
                    part="The curves for targets",
                ),
            ],
            "reqps",
            None,
            "KvpressureExporterImpaired",
        ),
        12,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Age of the last success",
            "Seconds since each source was last read successfully.",
            [
                PanelQuery(
                    f"time() - max by (node, source) (kvpressure_source_last_success_timestamp_seconds{{{NODE}}})",
                    "{{node}} {{source}}",
                )
            ],
            "s",
            None,
            "KvpressureExporterImpaired",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Duration of readings",
            "Slowest reading of each source, and slowest scrape of each engine.",
            [
                PanelQuery(f"max by (source) (kvpressure_source_duration_seconds{{{NODE}}})", "{{source}}"),
                PanelQuery(f"max by (target) (kvpressure_target_scrape_seconds{{{NODE}}})", "{{target}}"),
            ],
            "s",
        ),
        8,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Lines that could not be read",
            "Lines of engines' metrics that could not be parsed.",
            [PanelQuery(f"max by (target) (kvpressure_page_bad_lines{{{NODE}}})", "{{target}}")],
            "short",
            None,
            "KvpressureExporterImpaired",
        ),
        8,
        8,
    )


def _process(site: DashboardContext, dashboard: Dashboard) -> None:
    job = f'{NODE},job=~".*{site.values.exporter_job}.*"'  # as the rules find it: by a part of the name
    dashboard.add(
        timeseries(
            site,
            "Ticks",
            "Rounds (ticks) of the main loop per second, and how late the last tick was.",
            [
                PanelQuery(f"rate(kvpressure_ticks_total{{{NODE}}}[$__rate_interval])", "{{node}} ticks"),
                PanelQuery(f"kvpressure_tick_lag_seconds{{{NODE}}}", "{{node}} late"),
            ],
            "short",
            None,
            "KvpressureExporterImpaired",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "CPU of the exporter",
            "CPU cores that the exporter uses.",
            [PanelQuery(f"rate(process_cpu_seconds_total{{{job}}}[$__rate_interval])", "{{node}}")],
            "percentunit",
        ),
        6,
        8,
    )
    dashboard.add(
        timeseries(
            site,
            "Memory of the exporter",
            "Resident memory of the exporter.",
            [PanelQuery(f"process_resident_memory_bytes{{{job}}}", "{{node}}")],
            "decbytes",
        ),
        6,
        8,
    )
    dashboard.add(
        table(
            site,
            "GPUs and drivers",
            "Every GPU with its name and driver.",
            [PanelQuery(f"max by (node, gpu, uuid, name, driver) (kvpressure_gpu_info{{{GPU}}})", table=True)],
            {"node": "Node", "gpu": "GPU", "name": "Name", "driver": "Driver"},
            alert="GpuLost",
        ),
        6,
        8,
    )
