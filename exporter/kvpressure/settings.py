"""Settings: flags, ``KVPRESSURE_*`` environment and a YAML file name the same things, in that order of precedence.

A field of ``Settings`` declared with ``option(...)`` *is* the setting: its flag (``--web.max-requests``), its
variable (``KVPRESSURE_WEB_MAX_REQUESTS``), its key in the file (``web.max-requests``, nested or dotted), its help
and its reference all come from that one line. Each source of the registry adds three more:
``collector.<name>``, ``collector.<name>.interval`` and ``collector.<name>.deadline``.

Anything unknown, of the wrong type or contradictory raises ``SettingsError`` with one line: where, what, allowed.
"""

# ruff: noqa: RUF009  (option() makes a dataclass field; that is how one line declares a setting)

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpressure import thresholds as thresholds_model
from kvpressure import yaml_nodes
from kvpressure.settings_kinds import (
    ANY_PATH,
    API_URL,
    BOOL,
    COUNT,
    DIRECTORY,
    FILE,
    LISTEN_ADDRESS,
    NAMESPACE,
    SECONDS,
    SIZE,
    TARGET,
    TELEMETRY_PATH,
    TEXT,
    THRESHOLDS_FILE,
    WHOLE,
    Kind,
    ListenAddress,
    one_of,
)
from kvpressure.sources.shared import Shared

if TYPE_CHECKING:
    from kvpressure.sources.vllm.targets import Target
    from kvpressure.thresholds import Thresholds
    from kvpressure.yaml_nodes import Node

ENV_PREFIX: Final = "KVPRESSURE_"
RESERVED_PATHS: Final = ("/", "/api/v1/diagnosis", "/-/healthy", "/-/ready")

# Kubernetes puts variables into every pod for each Service of the namespace; one named "kvpressure" must not
# stop the start.
_SERVICE_LINK: Final = re.compile(
    r"KVPRESSURE(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class SettingsError(ValueError):
    """A setting is wrong. The text is one line: where it stands, what is wrong, what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. ``name`` is the flag without dashes and the key in the file; ``fallback_env`` is a variable
    without the prefix that counts when nothing else is given.
    """

    name: str
    kind: Kind
    help: str
    default: str
    repeat: bool = False
    fallback_env: str = ""

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + re.sub(r"[.-]", "_", self.name).upper()

    def check(self, raw: object, where: str) -> Any:
        """The value of what was written at ``where``. Raises ``SettingsError``."""
        if not self.repeat:
            return self._one(raw, where)
        return tuple(self._one(item, where) for item in (raw if isinstance(raw, list) else [raw]))

    def _one(self, raw: object, where: str) -> Any:
        try:
            return self.kind.parse(raw)
        except ValueError as error:
            detail = " ".join(str(error).split()) or f"{_shown(raw)} is not allowed"
            allowed = "" if "; allowed: " in detail else f"; allowed: {self.kind.allowed}"
            raise SettingsError(f"{where}: {detail}{allowed}") from error


def option(name: str, kind: Kind, default: Any, help: str, *, shown: str | None = None, repeat: bool = False,
           fallback_env: str = "") -> Any:
    """A field of ``Settings`` with its option. ``default`` may be a function; ``shown`` is how help prints it."""
    text = _default_text(default) if shown is None else shown
    metadata = {"option": Option(name, kind, help, text, repeat, fallback_env)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _default_text(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default)
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 100 else f"{text[:97]}..."


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Whether a source runs, how often it reads, and after how many seconds a read counts as hanging."""

    enabled: bool
    interval_seconds: float
    deadline_seconds: float


def _default_collectors() -> Mapping[str, CollectorSettings]:
    return {name: CollectorSettings(spec.default, spec.interval_seconds, spec.deadline_seconds)
            for name, spec in _registry().items()}


def _registry() -> Mapping[str, Any]:
    from kvpressure.sources.base import registry

    return registry()


@dataclass(frozen=True)
class Settings:
    """All settings, checked. Adding one is adding a line here."""

    listen_addresses: tuple[ListenAddress, ...] = option(
        "web.listen-address", LISTEN_ADDRESS, (ListenAddress("", 9846),),
        "Address to serve on; repeat for several. Port 0 takes a free one and logs it.", repeat=True)
    telemetry_path: str = option("web.telemetry-path", TELEMETRY_PATH, "/metrics", "Path of the metrics page.")
    web_config_file: Path | None = option(
        "web.config.file", FILE, None, "exporter-toolkit web configuration: TLS, client certificates, basic auth.")
    max_requests: int = option(
        "web.max-requests", WHOLE, 20, "Requests answered at the same time; more get 503. 0 = no limit.")
    interval_seconds: float = option(
        "interval", SECONDS, 1.0, "Time between two ticks: how often readings become a published state.")
    vllm_targets: tuple[Target, ...] = option(
        "vllm.target", TARGET, (), "vLLM server to scrape when no Kubernetes discovery finds it; repeat for several.",
        repeat=True)
    vllm_max_targets: int = option("vllm.max-targets", COUNT, 64, "Most vLLM servers that are read.")
    vllm_timeout_seconds: float = option("vllm.timeout", SECONDS, 3.0, "Total time one scrape of an engine may take.")
    nvidia_mig: bool = option("nvidia.mig", BOOL, True, "Read the MIG instances of a GPU.")
    nvidia_gpm: bool = option(
        "nvidia.gpm", BOOL, False, "Read SM, tensor and DRAM activity (Hopper and newer; may need privileges).")
    nvidia_release_between_readings: bool = option(
        "nvidia.release-between-readings", BOOL, False,
        "Close the driver library between readings, so that the driver can be unloaded.")
    amd_backend: str = option(
        "gpu.amd.backend", one_of("auto", "sysfs", "amdsmi"), "auto",
        "Where AMD figures come from: files of the driver, AMD's library, or the files and then the library for gaps.")
    host_sys: Path = option("host.sys", DIRECTORY, Path("/sys"), "The host's sysfs.")
    kube_selector: str | None = option("kube.selector", TEXT, None, "Label selector of the pods to look at.", shown="all")
    kube_namespaces: tuple[str, ...] = option(
        "kube.namespaces", NAMESPACE, (), "Namespace of the pods to look at; repeat for several.", shown="all",
        repeat=True)
    kube_api_url: str | None = option(
        "kube.api-url", API_URL, None, "API server.", shown="that of the cluster this runs in")
    kube_token_file: Path = option(
        "kube.token-file", ANY_PATH, Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        "Token for the API server; read again for every request.")
    kube_ca_file: Path = option(
        "kube.ca-file", ANY_PATH, Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
        "Certificates to trust for the API server.")
    kube_engine_tls: str = option(
        "kube.engine-tls", one_of("verify", "insecure"), "verify", "Certificates of engines that serve https.")
    kubelet_socket: Path = option(
        "kubelet.socket", ANY_PATH, Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        "The kubelet's PodResources socket.")
    kubelet_resources: tuple[str, ...] = option(
        "kubelet.resources", TEXT, ("nvidia.com/", "amd.com/"),
        "Resource name, or its beginning, that stands for GPUs; repeat for several.", repeat=True)
    host_proc: Path = option("host.proc", ANY_PATH, Path("/proc"), "The host's /proc.")
    host_cgroup: Path = option("host.cgroup", ANY_PATH, Path("/sys/fs/cgroup"), "The host's cgroup v2 tree.")
    host_pod_logs: Path = option("host.pod-logs", ANY_PATH, Path("/var/log/pods"), "The host's log files of pods.")
    log_positions: Path | None = option(
        "log-positions", ANY_PATH, None, "File that keeps how far the pods' logs were read.", shown="not kept")
    record_directory: Path | None = option(
        "record.directory", ANY_PATH, None, "Keep a rotating recording of what is read here (flight recorder).",
        shown="not kept")
    record_max_bytes: int = option("record.max-size", SIZE, 64 * 2**20, "Largest size of one recording file.", shown="64MiB")
    record_keep: int = option("record.keep", COUNT, 8, "Recording files that are kept, the newest.")
    recording_file: Path | None = option("recording.file", FILE, None, "Recording that the source plays.", shown="none")
    thresholds: Thresholds = option(
        "thresholds", THRESHOLDS_FILE, thresholds_model.builtin, "File of lines \"name: value\" over the built-in ones.",
        shown="built-in")
    node_name: str = option(
        "node-name", TEXT, lambda: os.uname().nodename, "Name of this node.", shown="$NODE_NAME or the host name",
        fallback_env="NODE_NAME")
    log_level: str = option(
        "log.level", one_of("debug", "info", "warning", "error"), "info", "Least severity that is logged.")
    log_format: str = option("log.format", one_of("logfmt", "json"), "logfmt", "Form of the log lines on stderr.")
    collectors: Mapping[str, CollectorSettings] = field(default_factory=_default_collectors)
    keep_exposition: bool = False  # set by commands that record; no flag
    shared: Shared = field(default_factory=Shared, compare=False)  # what sources tell each other; no flag


def static_options() -> dict[str, str]:
    """Option name -> field of ``Settings``."""
    return {item.metadata["option"].name: item.name for item in fields(Settings) if "option" in item.metadata}


def options() -> dict[str, Option]:
    """Every option by name: the fields of ``Settings``, then three for each source."""
    table = {item.metadata["option"].name: item.metadata["option"] for item in fields(Settings)
             if "option" in item.metadata}
    for name, spec in _registry().items():
        for entry in (
            Option(f"collector.{name}", BOOL, f"Source: {spec.help}.", str(spec.default).lower()),
            Option(f"collector.{name}.interval", SECONDS, f"Time between two readings of {name}.",
                   f"{spec.interval_seconds:g}"),
            Option(f"collector.{name}.deadline", SECONDS, f"Time after which a reading of {name} counts as hanging.",
                   f"{spec.deadline_seconds:g}"),
        ):
            table[entry.name] = entry
    return table


def add_arguments(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add the flags to ``parser``: all of them, or those whose names are in ``only``, and ``--config``."""
    group = parser.add_argument_group("settings", "each also as an environment variable and as a key of --config FILE")
    group.add_argument("--config", metavar="FILE", default=None,
                       help=f"YAML file of settings (environment: {ENV_PREFIX}CONFIG)")
    for entry in options().values():
        if only is not None and entry.name not in only:
            continue
        default = f"default {entry.default}; " if entry.default else ""
        text = f"{entry.help} ({default}environment: {entry.env})".replace("%", "%%")
        if entry.kind is BOOL:
            group.add_argument(f"--{entry.name}", dest=entry.name, action=argparse.BooleanOptionalAction, default=None,
                               help=text)
        else:
            group.add_argument(f"--{entry.name}", dest=entry.name, action="append", default=None,
                               metavar=entry.kind.metavar, help=text)


def from_args(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from parsed flags, the environment and the file they name.

    Raises ``SettingsError`` with one line for anything unknown, of a wrong type or contradictory.
    """
    environ = os.environ if environ is None else environ
    table = options()
    given: dict[str, Given] = {}
    for name, entry in table.items():
        if entry.fallback_env and environ.get(entry.fallback_env):
            raw = environ[entry.fallback_env]
            given[name] = Given(entry.check(raw, entry.fallback_env), entry.fallback_env)
    config = getattr(args, "config", None) or environ.get(ENV_PREFIX + "CONFIG")
    for found in (_from_file(config, table) if config else (), _from_environment(environ, table),
                  _from_flags(args, table)):
        given.update(found)
    _check_together(given, table)
    return _build(given)


@dataclass(frozen=True, slots=True)
class Given:
    """A checked value and where it was written (``--flag``, a variable or ``file:line: key``)."""

    value: Any
    where: str


_Found = Iterable[tuple[str, Given]]


def _from_flags(args: argparse.Namespace, table: Mapping[str, Option]) -> _Found:
    for name, entry in table.items():
        raw = getattr(args, name, None)
        if raw is None:
            continue
        where = f"--{name}"
        if isinstance(raw, list) and not entry.repeat:
            if len(raw) > 1:
                raise SettingsError(f"{where}: given {len(raw)} times; allowed: once")
            raw = raw[0]
        yield name, Given(entry.check(raw, where), where)


def _from_environment(environ: Mapping[str, str], table: Mapping[str, Option]) -> _Found:
    by_variable = {entry.env: name for name, entry in table.items()}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable == ENV_PREFIX + "CONFIG":
            continue
        if variable not in by_variable:
            if _SERVICE_LINK.fullmatch(variable):
                continue
            raise SettingsError(f"{variable}: unknown environment variable{_similar(variable, by_variable)}")
        entry = table[by_variable[variable]]
        raw: str | list[str] = environ[variable]
        if entry.repeat:
            raw = [line.strip() for line in environ[variable].splitlines() if line.strip()]
        yield entry.name, Given(entry.check(raw, variable), variable)


def _from_file(path: str, table: Mapping[str, Option]) -> _Found:
    try:
        root = yaml_nodes.read(path)
    except yaml_nodes.YamlError as error:
        raise SettingsError(str(error)) from error
    if root.children is None:
        raise SettingsError(f"{root.where}: the file is no mapping; allowed: keys and values")
    return _walk(root.children, "", table).items()


def _walk(nodes: Mapping[str, Node], prefix: str, table: Mapping[str, Option]) -> dict[str, Given]:
    """Options of a mapping; ``web: {max-requests: 5}`` and ``web.max-requests: 5`` say the same."""
    found: dict[str, Given] = {}
    for key, node in nodes.items():
        name = prefix + key
        if node.children is not None and any(other.startswith(f"{name}.") for other in table):
            inner = _walk(node.children, f"{name}.", table)
        elif name in table:
            where = f"{node.where}: {name}"
            inner = {name: Given(table[name].check(node.value, where), where)}
        else:
            raise SettingsError(f"{node.where}: unknown key {_shown(name)}{_similar(name, table)}")
        for again in found.keys() & inner.keys():
            raise SettingsError(f"{inner[again].where}: given twice; allowed: once")
        found.update(inner)
    return found


def _similar(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"


def _check_together(given: Mapping[str, Given], table: Mapping[str, Option]) -> None:
    """Contradictions between settings that are each fine alone."""
    def clash(name: str, text: str) -> SettingsError:
        return SettingsError(f"{given[name].where}: {text}")

    def enabled(source: str) -> bool:
        name = f"collector.{source}"
        return bool(given[name].value) if name in given else table[name].default == "true"

    sources = sorted(_registry())
    path = given.get("web.telemetry-path")
    if path and path.value in RESERVED_PATHS:
        raise clash("web.telemetry-path", f"{path.value!r} is taken by the exporter; allowed: any other path")
    addresses = given.get("web.listen-address")
    fixed = [item for item in addresses.value if item.port] if addresses else []
    if len(set(fixed)) < len(fixed):
        raise clash("web.listen-address", "the same address twice; allowed: each once")
    if not any(enabled(source) for source in sources):
        raise clash(f"collector.{sources[0]}", "every source is switched off; allowed: at least one on")
    for source in sources:
        for setting in ("interval", "deadline"):
            name = f"collector.{source}.{setting}"
            if name in given and not enabled(source):
                raise clash(name, f"the source is switched off; allowed: with --collector.{source}")
    tick = given["interval"].value if "interval" in given else float(table["interval"].default)
    for source in sources:
        name = f"collector.{source}.interval"
        if name in given and given[name].value < tick:
            raise clash(name, f"{given[name].value:g} s is shorter than a tick; allowed: {tick:g} s (interval) or more")
    _check_vllm(given, table, enabled("vllm"), clash)


def _check_vllm(given: Mapping[str, Given], table: Mapping[str, Option], enabled: bool, clash: Any) -> None:
    for name in ("vllm.target", "vllm.timeout"):
        if name in given and not enabled:
            raise clash(name, "the vllm source is switched off; allowed: with --collector.vllm")

    names = [target.name for target in given["vllm.target"].value] if "vllm.target" in given else []
    if len(set(names)) < len(names):
        raise clash("vllm.target", "the same URL twice; allowed: each once")

    def seconds(name: str) -> float:
        return float(given[name].value) if name in given else float(table[name].default)

    timeout, deadline = seconds("vllm.timeout"), seconds("collector.vllm.deadline")
    if timeout > deadline:
        name = "vllm.timeout" if "vllm.timeout" in given else "collector.vllm.deadline"
        raise clash(name, f"a scrape may take {timeout:g} s (vllm.timeout) but the source only {deadline:g} s "
                          f"(collector.vllm.deadline); allowed: timeout no longer than deadline")


def _build(given: Mapping[str, Given]) -> Settings:
    values = {attribute: given[name].value for name, attribute in static_options().items() if name in given}
    tick = values.get("interval_seconds", 0.0)
    collectors = {}
    for name, spec in _registry().items():
        def pick(suffix: str, default: Any, name: str = name) -> Any:
            entry = given.get(f"collector.{name}{suffix}")
            return default if entry is None else entry.value

        # A source whose interval nobody set keeps up with a slower tick instead of reading what nobody takes.
        collectors[name] = CollectorSettings(pick("", spec.default),
                                             pick(".interval", max(spec.interval_seconds, tick)),
                                             pick(".deadline", spec.deadline_seconds))
    return Settings(**values, collectors=collectors)
