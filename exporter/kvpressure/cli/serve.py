"""``kvpressure serve``: settings -> sources -> monitor -> web server, until a signal or a fatal source."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpressure import __version__
from kvpressure.errors import InputError, refused_file, shown
from kvpressure.publish.links import Links
from kvpressure.publish.metrics import PREFIXED
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.routes import Site
from kvpressure.publish.web.hosts import Hosts
from kvpressure.publish.web.server import ListenError, Server
from kvpressure.publish.web.webconfig import WebConfigFile
from kvpressure.runtime import process_tuning as runtime
from kvpressure.runtime.logging import configure, with_fields
from kvpressure.runtime.monitor import Monitor, monitor_of
from kvpressure.runtime.signal_flag import SignalFlag
from kvpressure.settings import settings
from kvpressure.sources.catalog import registry

if TYPE_CHECKING:
    from kvpressure.model.state import State
    from kvpressure.recording.recorder import BackgroundRecorder

log = logging.getLogger(__name__)

FATAL_STATUS = 3
WAIT_SECONDS: Final = 0.2  # between two looks whether a signal came


_EXAMPLES: Final = """\
examples:
  kvpressure serve                                               # on a host: its GPUs and its vLLM and SGLang servers
  kvpressure serve --collector.pods --collector.podresources       # on a Kubernetes node: its pods and their servers
  kvpressure serve --engine.target http://10.0.0.5:8000            # a server of another host, too
  kvpressure serve --web.listen-address 127.0.0.1:9400 --thresholds mine.yaml

Each setting is a flag (--web.max-requests 5) and a key of the file given with --config (web.max-requests: 5). Flags
win over the file.

Exit status: 0 ended by SIGTERM or SIGINT, 2 the settings cannot be used, 3 the exporter needs a new process (a supervisor should restart it).
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting."""
    parser.usage, parser.epilog = "%(prog)s [setting ...]", _EXAMPLES
    settings.add_arguments(parser)


def _report_crashes() -> None:
    """Print where a driver's library crashed on standard error, if there is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable(all_threads=True)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT (0) or until a source needs a new process (3)."""
    chosen = settings.from_args(args)
    configure(chosen.log_level, chosen.log_format)
    runtime.limit_malloc_arenas()
    _report_crashes()
    recorder = _recorder(chosen)
    if recorder is not None:
        chosen = replace(chosen, keep_exposition=True)
    monitor = monitor_of(chosen)
    if recorder is not None:
        monitor.add_listener(recorder)
        monitor.recorder = recorder.health
    around = ViewContext(chosen.thresholds, links=Links(chosen.runbook_url or "", chosen.dashboard_url or ""))
    site = Site(
        lambda: monitor.state,
        why_unhealthy=monitor.why_unhealthy,
        why_not_ready=monitor.why_not_ready,
        node_name=chosen.node_name,
        around=around,
        hosts=Hosts((*chosen.allowed_hosts, chosen.node_name, socket.gethostname())),
        renamed=PREFIXED if chosen.engine_labels == "prefixed" else None,
        rendering=chosen.shared.rendering,
    )
    server = _server(chosen, site)
    monitor.web_refused = lambda: server.refused
    stopping, hung_up = SignalFlag(), SignalFlag()
    stopping.follow((signal.SIGTERM, signal.SIGINT))
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        hung_up.follow((signal.SIGHUP,))
    _listen(server, chosen)
    if not _finds_engines(chosen):
        log.warning(
            "no engines to scrape: set --engine.target http://HOST:PORT, --collector.processes, or in Kubernetes"
            " --collector.pods"
        )
    runtime.tune_gc()
    monitor.start()
    try:
        _wait(monitor, stopping, hung_up, lambda: _check_gpus(chosen, monitor.state))
    finally:
        server.stop()
        monitor.stop()
        if recorder is not None:
            recorder.close(timeout=2.0)
    if monitor.fatal is not None:
        print(
            f"kvpressure serve: stopped because a source needs a new process to recover ({monitor.fatal});"
            " start kvpressure serve again",
            file=sys.stderr,
        )
        return FATAL_STATUS
    log.info("stopped")
    return 0


def _finds_engines(chosen: settings.Settings) -> bool:
    """Whether a target or a source names engines, or none is wanted."""
    on = {name for name, one in chosen.collectors.items() if one.enabled}
    return bool(chosen.engine_targets) or "engines" not in on or bool(on & {"pods", "processes"})


def _listen(server: Server, chosen: settings.Settings) -> None:
    try:
        addresses = server.start()
    except ListenError as error:
        name = "web.health-listen-address" if error.address in chosen.health_addresses else "web.listen-address"
        raise InputError(f"--{name}: {error}; allowed: a free address of this machine") from error
    for address in addresses:
        log.info(
            "listening",
            extra=with_fields(address=str(address), version=__version__, node=chosen.node_name),
        )


def _server(chosen: settings.Settings, site: Any) -> Server:
    try:
        web = WebConfigFile(chosen.web_config_file)
    except InputError as error:
        raise InputError(f"--web.config.file: {error}") from error
    return Server(chosen.listen_addresses, site, web, chosen.max_requests, chosen.health_addresses)


def _recorder(chosen: settings.Settings) -> BackgroundRecorder | None:
    """The flight recorder; None if it is off."""
    if chosen.record_directory is None:
        return None
    from kvpressure.recording.format import Header
    from kvpressure.recording.recorder import BackgroundRecorder, Recorder

    header = Header(chosen.interval_seconds, chosen.node_name, f"kvpressure {__version__} serve")
    try:
        recorder = Recorder(
            f"{chosen.record_directory}/", header, max_bytes=chosen.record_max_bytes, keep=chosen.record_keep
        )
    except OSError as error:
        give = "a directory that this process may write to"
        raise InputError(refused_file(f"--record.directory: {error.filename}", error, give)) from error
    return BackgroundRecorder(recorder)


def _check_gpus(chosen: settings.Settings, state: State) -> bool:
    """Raise ``InputError`` for a GPU named by hand that does not exist; False as long as a source has not looked yet.
    Where a source of GPUs fails, or one of its GPUs cannot be read, it may exist.
    """
    sources = [name for name, spec in registry().items() if spec.gpus and chosen.collectors[name].enabled]
    looked = [state.health[name] for name in sources if name in state.health]
    known = {gpu.reading.uuid: gpu.reading.parent_uuid for gpu in state.gpus}
    if len(looked) < len(sources) or any(one.up is None and one.reason is None for one in looked):
        return False
    unreadable = sum(state.expected_gpus.values()) - list(known.values()).count(None)
    if not sources or unreadable > 0 or any(one.up is False for one in looked):
        return True
    for target in chosen.engine_targets:
        if (unknown := next((uuid for uuid in target.gpus if uuid not in known), None)) is not None:
            allowed = ", ".join(known) or "no gpus=, because this host has no GPU"
            raise InputError(f"--engine.target {target.name}: GPU {shown(unknown)} is not here; allowed: {allowed}")
    return True


def _wait(
    monitor: Monitor,
    stopping: SignalFlag,
    hung_up: SignalFlag,
    check: Callable[[], bool],
) -> None:
    """Wait for a signal or a fatal source. ``check``: called until it is true."""
    tidy_at, checked = time.monotonic() + runtime.TIDY_SECONDS, False
    while not stopping.is_set() and not monitor.wait(WAIT_SECONDS):
        checked = checked or check()
        if time.monotonic() >= tidy_at:
            runtime.collect_garbage()
            tidy_at = time.monotonic() + runtime.TIDY_SECONDS
        if hung_up.is_set():
            hung_up.clear()
            log.warning(
                "SIGHUP reloads nothing: web.config.file is read again when it changes, all else at the start only"
            )
