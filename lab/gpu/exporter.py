"""The real exporter as a process, and a page that looks like an idle vLLM for it to find."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from lab.gpu import privileges
from lab.gpu.children import ROOT, ChildError, environment, module

POD: Final = ("inference", "vllm-0")
START_SECONDS: Final = 60.0
PAGE: Final = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="none"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="none"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="none"} 0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="none"} 0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="none"} 0
"""

_LISTENING: Final = re.compile(r"listening address=(\S+)")


class Exporter:
    """``kvpressure serve`` in an identity. Use as a context manager; raises ``ChildError`` when it does not start."""

    def __init__(self, identity: str, *flags: str) -> None:
        # The program drops and then becomes the exporter, so the pid is the exporter's.
        command = [
            sys.executable,
            "-m",
            "kvpressure",
            "serve",
            "--web.listen-address",
            "127.0.0.1:0",
            "--node-name",
            "gpu-check",
            "--no-collector.amd",
            "--nvidia.gpm",
            *flags,
        ]
        if identity != privileges.AS_IS:
            command = module("privileges", identity, *command)
        self._command = command
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115  (closed with the block)
        self.address = ""
        self.pid = 0

    def __enter__(self) -> Exporter:
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=environment(), stderr=self._log, text=True)
        self.pid = self._process.pid
        end = time.monotonic() + START_SECONDS
        while not self.address:
            said = Path(self._log.name).read_text()
            if found := _LISTENING.search(said):
                self.address = f"http://{found[1]}"
            elif self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise ChildError(f"the exporter did not start: {said.strip()[-300:]}")
            else:
                time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def page(self) -> str:
        """``/metrics`` now; empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.address}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


def value(page: str, name: str, *labels: str) -> float | None:
    """First sample of ``kvpressure_<name>`` whose line has all ``labels``."""
    start = f"kvpressure_{name}"
    for line in page.splitlines():
        if line.startswith((start + "{", start + " ")) and all(label in line for label in labels):
            return float(line.rsplit(" ", 1)[1])
    return None


def plugin_registry(directory: Path) -> CollectorRegistry:
    """What the plugin reports through this ``PROMETHEUS_MULTIPROC_DIR``, as vLLM would serve it."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]  # prometheus_client has no types for it
    return registry


@contextmanager
def idle_engine(plugin: Path) -> Iterator[str]:
    """Serves ``PAGE`` and the plugin's reports through the directory ``plugin``; yields the exporter's flag that makes
    it an engine of ``POD``.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = PAGE.encode() + generate_latest(plugin_registry(plugin))
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"--engine.target={POD[0]}/{POD[1]}=http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
