"""What each failure reason means and what to do, for the triage page and ``docs/reference/failure-reasons.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kvpressure.advice.wording import switches
from kvpressure.engines.other_software import SOFTWARE
from kvpressure.model.gpu_faults import LOST
from kvpressure.sources.kubernetes.discovery import NO_TARGET


@dataclass(frozen=True, slots=True)
class Meaning:
    """Reasons with the same meaning, in Markdown. ``see``: a page of ``docs/`` with more, "" = none."""

    reasons: tuple[str, ...]
    means: str
    do: str
    see: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Reasons of some sources (names in the catalog); () = of any source."""

    title: str
    sources: tuple[str, ...]
    rows: tuple[Meaning, ...]


def _meaning(reasons: str, means: str, do: str, see: str = "") -> Meaning:
    return Meaning(tuple(reasons.split()), means, do, see)


def _unscraped(reason: str, do: str, see: str = "") -> Meaning:
    """A reason of discovery, with discovery's own explanation."""
    return Meaning((reason,), NO_TARGET[reason], do, see)


_SWITCHES: Final = re.sub(r"--\S+\w", r"`\g<0>`", switches())

_TARGET_LIMIT: Final = _unscraped("target_limit", "raise `--engine.max-targets`, or find whose targets are of no use")
_SCRAPES: Final = (
    _meaning(
        "refused unreachable reset",
        "nothing listens on the port, or the connection was closed",
        "check whether the pod is still loading its model, the port, and network policies",
    ),
    _meaning(
        "timeout",
        "no complete answer in time; the verdict uses this as evidence",
        "check the CPU of the engine's API server: it is busy or hangs",
    ),
    _meaning(
        "dns tls",
        "the name or the certificate could not be verified",
        "check whether a network policy blocks DNS; use targets by address, or `--kube.engine-tls insecure` for"
        " self-signed certificates",
    ),
    _meaning(
        "unauthorized",
        "a login is in front of the engine (HTTP 401 or 403)",
        "scrape the pod, not its route, or exempt the metrics path from the login",
    ),
    _meaning(
        "redirect http_404 http_4xx",
        "a proxy is in front of the engine, the metrics have another path, or the server's metrics are switched off",
        f"scrape the pod, not its route; start {_SWITCHES}",
    ),
    _meaning(
        "http_5xx",
        "the engine answers with an error",
        "check its log; vLLM answers 500 for some seconds after its engine has died",
    ),
    _meaning(
        "html json empty invalid_utf8 bad_encoding protocol",
        "the answer is not Prometheus text",
        "check path and port; a router does not publish engine metrics",
    ),
    _meaning(
        "bad_timestamps",
        "every sample has a timestamp more than two minutes from the exporter's clock (federation, OpenTelemetry)",
        "compare the clocks; check that the Prometheus behind the endpoint still scrapes",
    ),
    _meaning(
        "series_collide",
        "several series have the same name and differ in a label that kvpressure does not know, so it is unknown which"
        " one is meant",
        "scrape each server at its own port; report the labels of the series",
    ),
    _meaning(
        "no_engine_metrics",
        "Prometheus text without the series of a supported engine",
        f"start {_SWITCHES}; else use another port",
    ),
    *(_meaning(name, software.title, software.advice) for name, software in SOFTWARE.items()),
    _meaning(
        "several_servers",
        "several servers answer at one address in turn (a Service with replicas), so their counters are mixed",
        "use one target for each pod",
    ),
    _meaning("same_server", "this server is already scraped at another address", "remove one of the targets"),
    _TARGET_LIMIT,
    _meaning(
        "too_large crowded",
        "the metrics are larger than the memory limit for scrapes",
        "look for labels with ever new values",
        "operations.md#sizing",
    ),
    _meaning("internal", "a bug in the exporter", "report it with the exporter's log, which names the place"),
)
_ANY: Final = (
    _meaning(
        "impossible",
        "a driver, a cgroup or an API object returned an impossible value; only that value is absent",
        "if it continues, report it with the driver's version",
    ),
    _meaning(
        "internal",
        "a bug in the exporter; only the pod, container, GPU or file that caused it is not read",
        "report it with the exporter's log, which names both and the place",
    ),
    _meaning("timeout", "the source did not answer before its deadline", "wait: its data is absent until it answers"),
)
_GPUS: Final = (
    _meaning(
        "library_missing driver_missing",
        "no NVML or no driver in the container",
        "in Kubernetes, set the runtime class; on a host, install the driver with its NVML library",
        "platforms.md#no-pods-or-no-gpus-nvidias-runtime",
    ),
    _meaning(
        "library_mismatch",
        "the driver was upgraded while the exporter ran",
        "nothing: the exporter restarts once and loads the new library",
    ),
    _meaning(
        "no_permission blocked",
        "the driver or a device cgroup refuses the call",
        "nothing, unless you want profiling counters (GPM) or AMD processes",
        "gpus.md#amd",
    ),
    _meaning(
        "partitions_unseen",
        "a GPU is split and KFD is not shown, so its engines count as sharing it",
        "give the container the partitions' render nodes",
    ),
    _meaning(
        " ".join(sorted(LOST)),
        "the GPU is defective",
        "drain the node",
        "runbooks/GpuLost.md",
    ),
    _meaning(
        "uninitialized not_ready in_use out_of_memory busy io_error unknown",
        "the driver is temporarily unavailable",
        "wait: it is retried; if it persists, check the driver's log (`dmesg`)",
    ),
    _meaning("timeout", "a call hangs", "if it persists, the driver hangs: reboot the node"),
    _meaning(
        "invalid_data insufficient_size invalid_argument",
        "an impossible answer; the value is absent",
        "report driver and GPU",
    ),
    _meaning("not_supported old_driver not_found no_devices", "a healthy driver without this feature", "nothing"),
    _meaning(
        "amdsmi_failed",
        "AMD's library answers with errors; its values are absent",
        "check the driver's log (`dmesg`)",
        "gpus.md#amd",
    ),
)
_KUBERNETES: Final = (
    _meaning("not_in_cluster", "no service account", "outside Kubernetes: `--engine.target` and `--no-collector.pods`"),
    _meaning(
        "api_forbidden api_unauthorized",
        "missing rights or an invalid token",
        "use the chart's Role; `--kube.namespaces` where there is no ClusterRole",
        "platforms.md#what-the-pods-may-do",
    ),
    _meaning(
        "api_unreachable api_timeout api_tls api_throttled api_gone api_error api_bad_answer api_not_found",
        "the Kubernetes API server fails; targets are kept, restarts and OOMKilled are absent",
        "check the Kubernetes API server",
    ),
    _unscraped("no_pod_ip", "wait until the pod runs"),
    _unscraped("port_not_declared", "declare the port in `ports`"),
    _unscraped("port_of_the_node", "correct the annotation `kvpressure.io/port`"),
    _unscraped("bad_path", "correct the annotations of the path and the scheme"),
    _unscraped("port_unknown", "name the port with `kvpressure.io/port`"),
    _unscraped("port_of_a_sidecar", "name the server's own port with `kvpressure.io/port`"),
    _unscraped("bad_port", "name a port number; on the host network, one that the pod declares"),
    _unscraped("unix_socket", "make the server listen on a TCP port"),
    _unscraped(
        "loopback_of_container",
        "make the server listen on the address of its pod, or annotate the port of the proxy in front of it",
    ),
    _unscraped("metrics_off", "switch the server's metrics on", "engines.md#see-what-was-found"),
    _unscraped("annotated_container_missing", "correct the name"),
    _unscraped(
        "same_address",
        "declare each port, name the engine with `kvpressure.io/container`, or exclude the pod with"
        ' `kvpressure.io/scrape: "false"`',
    ),
    _unscraped("ranks_not_known", "write `--data-parallel-size-local` as a number; only the first rank is scraped"),
    _unscraped("too_many_ranks", "run at most 64 ranks in a container"),
    _meaning(
        "command_cut",
        "a container's command line or script is too long to be read as a whole; its limits may be unknown",
        "put a long script into a file",
    ),
    _unscraped("too_many_pods", "delete ended pods, or set `--kube.selector`"),
)
_KUBELET: Final = (
    _meaning(
        "no_socket permission_denied",
        "the pod-resources socket is not mounted, or its file mode refuses access",
        "set `sources.podresources`; run as uid 0 without capabilities; SELinux: `spc_t`",
    ),
    _meaning(
        "unavailable unimplemented throttled bad_answer error timeout too_large",
        "the kubelet refused or failed; GPUs are mapped by process until then",
        "check the kubelet's log",
    ),
    _meaning(
        "unknown_device too_many_devices",
        "a device that matches no known GPU",
        "check the GPU source; a device plugin may use its own ids",
    ),
)
_FILES: Final = (
    _meaning(
        "no_proc no_cgroup_tree no_log_directory",
        "the mount is missing",
        "set the chart's `sources.*` and `host.*`, or switch the collector off",
    ),
    _meaning(
        "not_host_proc not_cgroup_v2",
        "the mount is the container's own, or cgroup v1",
        "mount the host's; cgroup v1 is not read",
    ),
    _meaning(
        "permission_denied",
        "the mount exists, but its file mode refuses access",
        "run as uid 0 without capabilities, as the chart does; SELinux: `spc_t`",
    ),
    _meaning("pods_unknown", "the source `pods` has not succeeded yet", "check the source `pods`"),
    _meaning(
        "no_cgroup no_log",
        "the container was not found: the runtime uses other paths",
        "set `host.cgroup` or `host.logTargets`",
    ),
    _meaning(
        "unreadable skipped too_many_lines too_many_containers",
        "some lines could not be read, or there were too many: they are counted and skipped",
        "nothing; a log of megabytes a second loses lines",
    ),
)
_WEB: Final = (
    _meaning(
        "address connections answers",
        "too many connections of one address, or in all, or too many answers under way; the slowest client is closed",
        "find the clients in the node's network; restrict access with a NetworkPolicy",
    ),
    _meaning("descriptors", "the process has no file descriptor left", "raise the limit of open files"),
    _meaning(
        "handshake_timeout request_timeout answer_timeout",
        "a client did not finish the TLS handshake, its request or taking its answer",
        "nothing, unless it is your Prometheus",
    ),
    _meaning(
        "passwords",
        "too many password checks were waiting",
        "find who guesses passwords",
    ),
)
_EVENTS: Final = (
    _meaning("connecting", "no batch has come yet", "wait"),
    _meaning("shared_endpoint", "another target has the same endpoint", "give each engine its own in `kv-events`"),
    _meaning(
        "silent",
        "the engine has filled blocks for a minute, and no batch came",
        "check `enable_kv_cache_events`, and that the endpoint is this engine's",
    ),
    _meaning(
        "late gap",
        "batches were sent before the exporter connected, or were lost, and no replay endpoint has them",
        "wait until the cache has turned over, or set `replay_endpoint` in `--kv-events-config`",
        "engines.md#who-holds-the-prefix-cache",
    ),
    _meaning("bad_events", "a batch could not be decoded, or was larger than 3 MiB", "report the engine's version"),
    _meaning(
        "flood",
        "the events of all engines took more than a tenth of a core, and this engine's most of it; it is followed anew"
        " after a minute",
        "report the rate",
    ),
    _meaning(
        "hybrid_groups",
        "a hybrid model whose events name no kinds of cache groups, or no group with full attention",
        "use vLLM 0.23 or later",
    ),
    _meaning("not_installed", "the library for KV events is missing", "install `kvpressure[events]`"),
)
SCRAPES: Final = Section("Scrapes of engines", (), _SCRAPES)
ANY: Final = Section("Any source", (), _ANY)
SECTIONS: Final = (
    Section("GPUs", ("nvidia", "amd"), _GPUS),
    Section("Kubernetes", ("pods", "node"), _KUBERNETES),
    Section("The kubelet", ("podresources",), _KUBELET),
    Section("The node's files", ("processes", "procfs", "cgroup", "logs"), _FILES),
    Section("Targets", ("engines",), (_TARGET_LIMIT,)),
)
WEB: Final = Section("The web server", (), _WEB)
EVENTS: Final = Section("KV events", (), _EVENTS)


def action(source: str, reason: str) -> str:
    """What to do when a source fails for a reason; "" = unknown."""
    sections = (*(one for one in SECTIONS if source in one.sources), ANY)
    return next((row.do.replace("`", "") for one in sections for row in one.rows if reason in row.reasons), "")


def render_failure_reasons() -> str:
    """``docs/reference/failure-reasons.md``."""
    lines = [
        "# Failure reasons",
        "",
        "Generated from `exporter/kvpressure/publish/failure_reasons.py`; the triage page shows the same advice.",
        "Reasons are labels of `kvpressure_target_errors_total` (engines), `kvpressure_kv_events_complete`,",
        "`kvpressure_source_errors_total` (sources) and `kvpressure_web_refused_total` (web requests).",
    ]
    for section in (SCRAPES, EVENTS, ANY, *SECTIONS, WEB):
        names = ", ".join(f"`{name}`" for name in section.sources)
        lines += ["", f"## {section.title}", "", *([f"Sources: {names}.", ""] if names else [])]
        lines += ["| reason | means | do |", "|---|---|---|"]
        lines += [_line(list(rows)) for _, rows in groupby(section.rows, lambda row: (row.do, row.see))]
    return "\n".join(lines) + "\n"


def _line(rows: Sequence[Meaning]) -> str:
    """Rows with the same advice, as one."""
    do, see = rows[0].do, rows[0].see
    more = f" ([docs/{see.partition('#')[0]}](../{see}))" if see else ""
    reasons = ", ".join(f"`{reason}`" for row in rows for reason in row.reasons)
    return f"| {reasons} | {'; '.join(row.means for row in rows)} | {do}{more} |"
