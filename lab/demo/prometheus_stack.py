"""Real Prometheus and Alertmanager beside the demo, on loopback, with a receiver for what they send."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import yaml

from kvpressure.runtime.signal_flag import SignalFlag
from lab.demo import alerting
from lab.demo.beats import Beats, counted, rule_evaluations

PROMETHEUS: Final = ("prometheus",)
ALERTMANAGER: Final = ("prometheus-alertmanager", "alertmanager")  # Debian's name, upstream's name
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
_ATTEMPTS: Final = 3  # another process may take a free port before the child does

OnAlerts = Callable[[str, list[dict[str, Any]]], None]


class StackError(Exception):
    """Prometheus or Alertmanager does not start, or no longer answers; the text is one line."""


def installed() -> tuple[str, str] | None:
    """Paths of both programs, or ``None`` when one is missing."""
    found = [
        next((path for name in names if (path := shutil.which(name))), None) for names in (PROMETHEUS, ALERTMANAGER)
    ]
    return (found[0], found[1]) if found[0] and found[1] else None


class Interrupted(Exception):
    """The start was called off."""


class Receiver:
    """Takes webhooks of Alertmanager and passes ``(receiver, alerts)`` to ``on_alerts`` in a thread of its own."""

    def __init__(self, on_alerts: OnAlerts) -> None:
        class _Webhook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Take one notification."""
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    on_alerts(self.path.strip("/"), json.loads(body)["alerts"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Webhook)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="receiver", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to send."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Stop taking."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Child:
    """A server process of its own session, so that Ctrl-C in the terminal reaches only the demo, which then
    stops it.
    """

    def __init__(self, name: str, folder: Path, command: Callable[[str], list[str]], called_off: SignalFlag) -> None:
        self._name = name
        self._called_off = called_off
        self._log = folder / f"{name}.log"
        for attempt in range(1, _ATTEMPTS + 1):
            self.address = _free_address()
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*_ends_with_us(), *command(self.address)],
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            try:
                self.wait_for("/-/ready", lambda _: True, "was not ready")
                return
            except BaseException as error:
                self.stop()
                if not isinstance(error, StackError) or attempt == _ATTEMPTS:
                    raise

    @property
    def url(self) -> str:
        """Its web page."""
        return f"http://{self.address}"

    def stop(self) -> None:
        """End the process, by force if it takes too long."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def reload(self) -> None:
        """Have it read its files again."""
        self._process.send_signal(signal.SIGHUP)

    def wait_for(self, path: str, expected: Callable[[str], bool], what: str) -> None:
        """Wait until the page at ``path`` is as ``expected``. Raises ``StackError`` with ``what`` is missing."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise StackError(f"{self._name} ended with status {self._process.returncode}: {self._last_words()}")
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}{path}", timeout=2) as answer:
                if expected(answer.read().decode(errors="replace")):
                    return
            time.sleep(0.05)
            if self._called_off.is_set():
                raise Interrupted
        raise StackError(f"{self._name} {what} after {START_SECONDS:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def _ends_with_us() -> list[str]:
    """A prefix that ends the child even when the demo is killed and cannot; empty without util-linux."""
    program = shutil.which("setpriv")
    return [program, "--pdeathsig", "TERM", "--"] if program else []


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Stack:
    """Prometheus scraping ``exporter`` and ``engines``, Alertmanager behind it, notifications to ``on_alerts``. Files
    go to ``folder``.

    ``by`` shortens the waiting times of rules and routes. The constructor starts everything, or leaves nothing running
    and raises ``StackError``, or ``Interrupted`` when ``called_off`` is set meanwhile.
    """

    def __init__(
        self,
        programs: tuple[str, str],
        folder: Path,
        exporter: str,
        by: float,
        scrape_seconds: float,
        on_alerts: OnAlerts,
        called_off: SignalFlag,
        engines: Sequence[str] = (),
    ) -> None:
        prometheus, alertmanager = programs
        self._scrape_seconds = scrape_seconds
        self._stops = contextlib.ExitStack()
        try:
            receiver = Receiver(on_alerts)
            self._stops.callback(receiver.stop)
            _write(folder / "alertmanager.yaml", alerting.alertmanager(by, receiver.url))
            self.alertmanager = Child(
                "alertmanager",
                folder,
                lambda address: [
                    alertmanager,
                    "--config.file=alertmanager.yaml",
                    "--storage.path=alertmanager",
                    f"--web.listen-address={address}",
                    "--cluster.listen-address=",
                    "--log.level=warn",
                ],
                called_off,
            )
            self._stops.callback(self.alertmanager.stop)
            _write(
                folder / "prometheus.yaml",
                alerting.prometheus("rules.yaml", exporter, engines, self.alertmanager.address, scrape_seconds),
            )
            self.prometheus = Child(
                "prometheus",
                folder,
                lambda address: [
                    prometheus,
                    "--config.file=prometheus.yaml",
                    "--storage.tsdb.path=data",
                    f"--web.listen-address={address}",
                    "--log.level=warn",
                    "--rules.alert.resend-delay=1s",
                ],
                called_off,
            )  # what fires before Alertmanager is known is not lost for a minute
            self._stops.callback(self.prometheus.stop)
            self._load_rules(folder, by, scrape_seconds)
            self._began = time.monotonic()
        except BaseException:
            self.stop()
            raise

    def _load_rules(self, folder: Path, by: float, scrape_seconds: float) -> None:
        """Give Prometheus its rules once it has seen the exporter: with waiting times shortened to less than a scrape,
        rules that ask for absent series would fire before the first one.
        """
        self.prometheus.wait_for(
            "/api/v1/query?query=kvpressure_build_info",
            lambda page: '"metric":{' in page,
            "had not scraped the exporter",
        )
        _write(folder / "rules.yaml", alerting.rules(by, scrape_seconds))
        self.prometheus.reload()
        self.prometheus.wait_for(
            "/api/v1/rules", lambda page: "KvpressureExportersDown" in page, "had not loaded its rules"
        )

    def active_alerts(self) -> set[str]:
        """Fingerprints of the alerts that Alertmanager knows as active, muted ones included. Raises ``StackError``."""
        page = _asked("alertmanager", f"{self.alertmanager.url}/api/v2/alerts?active=true&inhibited=true")
        try:
            return {alert["fingerprint"] for alert in json.loads(page)}
        except ValueError as error:
            raise StackError(f"alertmanager no longer answers: {error}") from error

    def beats(self) -> list[Beats]:
        """Rule evaluations and scrapes of the exporter since the rules were loaded. Raises ``StackError``."""
        seconds = max(1, int(time.monotonic() - self._began))
        came = quote(f'sum_over_time(up{{job="kvpressure"}}[{seconds}s])')
        found = json.loads(_asked("prometheus", f"{self.prometheus.url}/api/v1/query?query={came}"))["data"]["result"]
        scrapes = float(found[0]["value"][1]) if found else 0.0
        return [
            rule_evaluations(_asked("prometheus", f"{self.prometheus.url}/metrics")),
            counted("scrapes", seconds // self._scrape_seconds, scrapes),
        ]

    def stop(self) -> None:
        """Stop everything that was started."""
        self._stops.close()


def _asked(name: str, url: str) -> str:
    try:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise StackError(f"{name} no longer answers: {error}") from error


def _write(path: Path, document: Any) -> None:
    path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
