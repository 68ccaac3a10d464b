"""Settings: flags and a YAML file name the same things, in that order of precedence.

A field of ``Settings`` declared with ``option(...)`` *is* the setting: its flag (``--web.max-requests``), its key in
the file (``web.max-requests``, nested or dotted), its help and its reference all come from that one line. Each source
of the registry adds its switch, ``collector.<name>``.

Anything unknown, of the wrong type or contradictory raises ``InputError`` with one line: where, what, allowed.
"""

# ruff: noqa: RUF009  (option() makes a dataclass field; that is how one line declares a setting)

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpressure.settings import thresholds as thresholds_model
from kvpressure.settings.checks import check_together, runs
from kvpressure.settings.groups import COMMON, grouped
from kvpressure.settings.kinds import (
    ANY_PATH,
    API_URL,
    BOOL,
    COUNT,
    DIRECTORY,
    FILE,
    HOST_NAME,
    LISTEN_ADDRESS,
    NAMESPACE,
    PAGES_URL,
    SECONDS,
    SIZE,
    TARGET,
    TEXT,
    THRESHOLDS_FILE,
    WHOLE,
    ListenAddress,
    one_of,
)
from kvpressure.settings.load import GivenValue, from_file, from_flags
from kvpressure.settings.options import Option, collector_options, option
from kvpressure.sources.catalog import USUAL_TICK, CollectorSettings, registry
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery

if TYPE_CHECKING:
    from kvpressure.settings.thresholds import Thresholds
    from kvpressure.sources.scrape.targets import Target


__all__ = ["Option", "Settings", "add_arguments", "from_args", "options"]


def _gpu_resources() -> tuple[str, ...]:
    return tuple(name for spec in registry().values() if spec.gpus is not None for name in spec.gpus.resources)


@dataclass(frozen=True)
class Settings:
    """All settings, checked. Adding one is adding a line here."""

    listen_addresses: tuple[ListenAddress, ...] = option(
        "web.listen-address",
        LISTEN_ADDRESS,
        (ListenAddress("", 9846),),
        "Address to serve on; repeat for several. Port 0 selects a free port and logs it.",
        repeat=True,
    )
    engine_labels: str = option(
        "web.engine-labels",
        one_of("plain", "prefixed"),
        "plain",
        "Labels of the engine's namespace and pod. prefixed: engine_namespace and engine_pod, for scrapers that set"
        " namespace and pod themselves.",
    )
    web_config_file: Path | None = option(
        "web.config.file",
        FILE,
        None,
        "Web configuration file in the format of exporter-toolkit: TLS, client certificates, basic auth.",
    )
    health_addresses: tuple[ListenAddress, ...] = option(
        "web.health-listen-address",
        LISTEN_ADDRESS,
        (),
        "Address that serves only /-/healthy and /-/ready, in plain HTTP even if web.config.file asks for TLS; "
        "for kubelet probes. Repeat for several.",
        repeat=True,
    )
    max_requests: int = option(
        "web.max-requests",
        WHOLE,
        20,
        "Maximum number of concurrent requests. If one more arrives, the exporter aborts the slowest. 0 = no limit.",
    )
    runbook_url: str | None = option(
        "web.runbook-url",
        PAGES_URL,
        None,
        "Base address of the runbooks, for links on the triage page.",
    )
    allowed_hosts: tuple[str, ...] = option(
        "web.allowed-hosts",
        HOST_NAME,
        (),
        "Host name under which browsers may open the exporter, such as that of an ingress; .example.com allows all"
        " names below it. Addresses, names without a dot, *.svc, cluster.local and the node's name are always allowed."
        " Repeat for several.",
        repeat=True,
    )
    dashboard_url: str | None = option(
        "web.dashboard-url",
        PAGES_URL,
        None,
        "Base address of Grafana, for links to the dashboards on the triage page.",
    )
    interval_seconds: float = option(
        "interval", SECONDS, USUAL_TICK, "Time between two ticks, each of which publishes a new state."
    )
    engine_targets: tuple[Target, ...] = option(
        "engine.target",
        TARGET,
        (),
        "Engine to scrape beside those that are found; repeat for several.",
        repeat=True,
    )
    engine_model_configs: Path | None = option(
        "engine.model-configs",
        DIRECTORY,
        None,
        "Directory with config.json files of models that kvpressure does not know (read at start). Files: NAME.json,"
        " NAME/config.json, or a Hugging"
        " Face cache.",
    )
    engine_max_targets: int = option("engine.max-targets", COUNT, 64, "Maximum number of engines to scrape.")
    engine_timeout_seconds: float = option(
        "engine.timeout", SECONDS, 3.0, "Time limit for one whole scrape of an engine."
    )
    engine_pace: str = option(
        "engine.pace",
        one_of("adaptive", "fixed"),
        "adaptive",
        "How often engines are scraped. fixed: in each tick; adaptive: the same, but calm engines less often.",
    )
    nvidia_gpm: bool = option(
        "nvidia.gpm", BOOL, False, "Read SM, tensor and DRAM activity (Hopper and newer; may need privileges)."
    )
    host_sys: Path = option("host.sys", DIRECTORY, Path("/sys"), "Directory of the host's sysfs.")
    kube_selector: str | None = option("kube.selector", TEXT, None, "Label selector of the pods to watch.", shown="all")
    kube_namespaces: tuple[str, ...] = option(
        "kube.namespaces",
        NAMESPACE,
        (),
        "Namespace of the pods to watch; repeat for several.",
        shown="all",
        repeat=True,
    )
    kube_api_url: str | None = option(
        "kube.api-url", API_URL, None, "Address of the Kubernetes API server.", shown="this cluster's"
    )
    kube_token_file: Path = option(
        "kube.token-file",
        ANY_PATH,
        Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        "File with the token for the Kubernetes API server; the file is read again for every request.",
    )
    kube_ca_file: Path = option(
        "kube.ca-file",
        ANY_PATH,
        Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
        "File with the certificates to trust for the Kubernetes API server.",
    )
    kube_engine_tls: str = option(
        "kube.engine-tls",
        one_of("verify", "insecure"),
        "verify",
        "Whether to verify the certificates of engines that serve https.",
    )
    kubelet_socket: Path = option(
        "kubelet.socket",
        ANY_PATH,
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        "Path of the kubelet's PodResources socket.",
    )
    kubelet_resources: tuple[str, ...] = option(
        "kubelet.resources",
        TEXT,
        _gpu_resources,
        "Resource name of GPUs, or its prefix; repeat for several. Some device plugins use other names, such as"
        " volcano.sh/.",
        shown=" ".join(_gpu_resources()),
        repeat=True,
    )
    host_proc: Path = option("host.proc", ANY_PATH, Path("/proc"), "Path of the host's /proc.")
    host_cgroup: Path = option("host.cgroup", ANY_PATH, Path("/sys/fs/cgroup"), "Path of the host's cgroup v2 tree.")
    host_pod_logs: Path = option(
        "host.pod-logs", ANY_PATH, Path("/var/log/pods"), "Path of the log files of pods on the host."
    )
    record_directory: Path | None = option(
        "record.directory",
        ANY_PATH,
        None,
        "Directory for a rotating recording of all readings (flight recorder).",
    )
    record_max_bytes: int = option(
        "record.max-size", SIZE, 64 * 2**20, "Maximum size of one recording file.", shown="64MiB"
    )
    record_keep: int = option("record.keep", COUNT, 8, "Number of recording files to keep.")
    thresholds: Thresholds = option(
        "thresholds",
        THRESHOLDS_FILE,
        thresholds_model.builtin,
        'File of lines "name: value" that override built-in thresholds.',
        shown="built-in",
    )
    node_name: str = option(
        "node-name",
        TEXT,
        lambda: os.environ.get("NODE_NAME") or os.uname().nodename,  # as a pod's manifest sets it
        "Name of this node.",
        shown="$NODE_NAME or the host name",
    )
    log_level: str = option(
        "log.level", one_of("debug", "info", "warning", "error"), "info", "Lowest severity that is logged."
    )
    log_format: str = option("log.format", one_of("logfmt", "json"), "logfmt", "Format of the log lines on stderr.")
    collectors: Mapping[str, CollectorSettings] = field(
        default_factory=lambda: {name: spec.pace(spec.default, USUAL_TICK) for name, spec in registry().items()}
    )
    keep_exposition: bool = False  # set by commands that record; no flag
    shared: SharedDiscovery = field(
        default_factory=SharedDiscovery, compare=False
    )  # what sources tell each other; no flag


def options() -> dict[str, Option]:
    """Every option by name: the fields of ``Settings``, then the sources' switches."""
    own = (item.metadata["option"] for item in fields(Settings) if "option" in item.metadata)
    return {option.name: option for option in (*own, *collector_options())}


def add_arguments(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add the flags to ``parser`` by groups: all of them, or those whose names are in ``only``, and ``--config``."""
    wanted = [entry for entry in options().values() if only is None or entry.name in only]
    for title, text, members in grouped(wanted):
        section = parser.add_argument_group(title, text)
        if title == COMMON:
            section.add_argument("--config", metavar="FILE", default=None, help="YAML file of settings")
        for entry in members:
            _add_flag(section, entry)


def _add_flag(section: argparse._ArgumentGroup, entry: Option) -> None:
    default = f"default {entry.default}" if entry.default else "no default"
    allowed = "" if entry.kind is BOOL else f"; allowed: {entry.kind.allowed}"
    text = f"{entry.help} ({default}{allowed})".replace("%", "%%")
    how: dict[str, Any] = {"action": "append", "metavar": entry.kind.metavar}
    if entry.kind is BOOL:
        how = {"action": argparse.BooleanOptionalAction}
    section.add_argument(f"--{entry.name}", dest=entry.name, default=None, help=text, **how)


def from_args(args: argparse.Namespace) -> Settings:
    """Settings from parsed flags and the file they name.

    Raises ``InputError`` with one line for anything unknown, of a wrong type or contradictory.
    """
    table = options()
    config = getattr(args, "config", None)
    given = {**dict(from_file(config, table) if config else ()), **dict(from_flags(args, table))}
    check_together(given)
    return _build(given)


def _build(given: Mapping[str, GivenValue]) -> Settings:
    named = {item.name: item.metadata["option"].name for item in fields(Settings) if "option" in item.metadata}
    values = {attribute: given[name].value for attribute, name in named.items() if name in given}
    tick = values.get("interval_seconds", USUAL_TICK)
    collectors = {name: spec.pace(runs(name, given), tick) for name, spec in registry().items()}
    return Settings(**values, collectors=collectors)
