"""A whole Kubernetes node for tests: API server, kubelet, driver, cgroups, /proc, logs, pods on loopback, and the
exporter.

Everything the exporter touches is real but for the far sides: HTTP and gRPC over sockets, files on disk, the real NVML
binding over a stub library, and the real ``kvpressure serve`` in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.helpers.vllm_pages import text_of
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import GIB, Gpu, World, environment, gpu_uuid, write
from tests.sources.host.podlogs import PodLog
from tests.sources.kubernetes import objects
from tests.sources.kubernetes.apiserver import FakeApi
from tests.sources.kubernetes.kubelet import FakeKubelet, claim

SOURCES = ("pods", "node", "podresources", "procfs", "cgroup", "logs", "engines", "nvidia")
TICK = "0.2"
CPU_STAT = "usage_usec {usage}\nnr_periods {periods}\nnr_throttled {throttled}\n"

Samples = dict[tuple[tuple[str, str], ...], float]


class PodServer:
    """The page of every pod with one address; paths tell pods apart."""

    def __init__(self, address: str, text: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Silence."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients hang up; that is normal."""

        self._server = Server((address, 0), Handler)
        self.address = address
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Node:
    """``with Node(path, library) as node: node.add("vllm-0", 0); node.value("engine_up", pod="vllm-0")``."""

    def __init__(self, where: Path, library: Path, *arguments: str) -> None:
        self.where = where
        self.api = FakeApi()
        self.kubelet = FakeKubelet(where / "kubelet.sock")
        self.cgroup = where / "cgroup"
        self.proc = where / "proc"
        self.logs_root = where / "pods"
        self.world_path = where / "world"
        self.gpus = [Gpu(), Gpu()]
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, PodLog] = {}
        self.extra_environment: dict[str, str] = {}
        self.patience_seconds = 30.0
        self._library = library
        self._arguments = arguments
        text = text_of("d_kv_pressure").encode()
        self.servers = [PodServer(f"127.0.0.{host}", text) for host in range(2, 8)]
        self._exporter: subprocess.Popen[str] | None = None
        self._port = 0
        self.stderr: list[str] = []

    def __enter__(self) -> Node:
        for directory in (self.cgroup, self.proc, self.logs_root):
            directory.mkdir()
        (self.cgroup / "cgroup.controllers").write_text("cpu memory\n")
        (self.where / "token").write_text("token-1")
        self.api.tokens = {"token-1"}
        self.api.__enter__()
        self.kubelet.start()
        self.api.apply(objects.node(MemoryPressure="False", Ready="True"))
        self.write_world()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.kubelet.stop()
        self.api.__exit__()
        for server in self.servers:
            server.close()

    # --- the node -----------------------------------------------------------------------------------------------

    def write_world(self) -> None:
        write(self.world_path, World(gpus=list(self.gpus)))

    def server(self, name: str) -> PodServer:
        return self.servers[sum(name.encode()) % len(self.servers)]

    def document(self, name: str, address_of: str = "", uid: str = "", **fields: Any) -> dict[str, Any]:
        """The API object of a pod whose page is served here. ``address_of``: the name of a pod that has the same
        address, as those on the host's network have after each other.
        """
        server = self.server(address_of or name)
        container = objects.container(ports=[{"containerPort": server.port}])
        document = objects.pod(
            name,
            ip=server.address,
            containers=[container],
            annotations={"prometheus.io/path": f"/{address_of or name}/metrics"},
            host_network=bool(address_of),
            **fields,
        )
        document["metadata"]["uid"] = uid or document["metadata"]["uid"]
        return document

    def add(self, name: str, devices: list[str] | None = None, pids: tuple[int, ...] = (), **fields: Any) -> None:
        document = self.document(name, **fields)
        pod = read_pod(document, Policy())
        assert pod is not None
        directory = self.container_cgroup(pod)
        directory.mkdir(parents=True)
        for file, text in {
            "cpu.max": "800000 100000\n",
            "memory.current": f"{17 * GIB}\n",
            "memory.max": f"{64 * GIB}\n",
            "memory.stat": f"inactive_file {GIB}\n",
        }.items():
            (directory / file).write_text(text)
        self.use_cpu(pod, usage=0, periods=0, throttled=0)
        for pid in pids:
            (self.proc / str(pid)).mkdir()
            (self.proc / str(pid) / "cgroup").write_text(f"0::/{directory.relative_to(self.cgroup)}\n")
        self.logs[name] = PodLog(self.logs_root, pod, restarts=fields.get("restarts", 0))
        if devices:
            self.kubelet.pods.append(claim(name, devices={"nvidia.com/gpu": devices}))
        self.pods[name] = document
        self.api.apply(document)

    def remove(self, name: str) -> None:
        pod = self.pod(name)
        document = self.pods.pop(name)
        directory = self.container_cgroup(pod)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        log = self.logs.pop(name)
        for file in log.directory.iterdir():
            file.unlink()
        log.directory.rmdir()
        log.directory.parent.rmdir()
        self.kubelet.pods = [held for held in self.kubelet.pods if held.name != name]
        self.api.delete(document)

    def pod(self, name: str) -> Pod:
        return read_pod(self.pods[name], Policy())

    def container_cgroup(self, pod: Pod) -> Path:
        """Where the kernel accounts for a pod's container."""
        uid = pod.uid.replace("-", "_")
        return (
            self.cgroup
            / "kubepods.slice"
            / "kubepods-burstable.slice"
            / f"kubepods-burstable-pod{uid}.slice"
            / f"cri-containerd-{pod.engines[0].container_id}.scope"
        )

    def use_cpu(self, pod: Pod, usage: int, periods: int, throttled: int) -> None:
        """Set the CPU counters of a pod's container, as the kernel does: never half written."""
        fresh = self.where / "cpu.stat.new"
        fresh.write_text(CPU_STAT.format(usage=usage, periods=periods, throttled=throttled))
        fresh.replace(self.container_cgroup(pod) / "cpu.stat")

    # --- the exporter -------------------------------------------------------------------------------------------

    def start(self) -> None:
        options = {
            "interval": TICK,
            "web.listen-address": "127.0.0.1:0",
            "node-name": objects.NODE,
            "kube.api-url": self.api.url,
            "kube.token-file": self.where / "token",
            "kubelet.socket": self.kubelet.socket,
            "host.proc": self.proc,
            "host.cgroup": self.cgroup,
            "host.pod-logs": self.logs_root,
        }
        flags = [*(f"--collector.{name}" for name in SOURCES), "--no-collector.amd"]
        flags += [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "kvpressure", "serve", *flags, *self._arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVPRESSURE_")}
        self._exporter = subprocess.Popen(
            command,
            env=environment(self._library, self.world_path, clean | self.extra_environment),
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        until(lambda: self._port, self.patience_seconds)

    def stop(self) -> None:
        if self._exporter is not None:
            self._exporter.terminate()
            self._exporter.wait(self.patience_seconds)
            self._exporter, self._port = None, 0

    def _listen(self) -> None:
        assert self._exporter.stderr is not None
        for line in self._exporter.stderr:
            self.stderr.append(line)
            if found := re.search(r"listening address=127.0.0.1:(\d+)", line):
                self._port = int(found[1])

    @property
    def exporter_pid(self) -> int:
        return self._exporter.pid

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self._exporter.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def samples(self, name: str, **labels: str) -> Samples:
        """All samples of a family that have these labels, by all their labels."""
        found: Samples = {}
        for line in re.findall(rf"^kvpressure_{name}(?:\{{(.*)\}})? (\S+)$", self.scrape(), re.MULTILINE):
            own = tuple(re.findall(r'(\w+)="([^"]*)"', line[0]))
            if labels.items() <= dict(own).items():
                found[own] = float(line[1])
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample with these labels, None when there is none."""
        found = self.samples(name, **labels)
        assert len(found) <= 1, found
        return next(iter(found.values()), None)

    def labels(self, name: str, label: str, **labels: str) -> set[str]:
        return {dict(own)[label] for own in self.samples(name, **labels)}


def uuid(index: int) -> str:
    return gpu_uuid(index)
