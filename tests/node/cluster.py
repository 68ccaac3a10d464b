"""A cluster of one node as its user sees it: GPUs, images, Helm, vLLM servers, the exporter's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python import Chart, Config
from prometheus_client.parser import text_string_to_metric_families

from tests.api_server import cluster as programs
from tests.deploy.chart import ROOT, Json
from tests.helpers.waiting import until
from tests.node import images
from tests.node.device_plugin import DevicePlugin
from tests.node.machine import NAME, WORLD, Machine
from tests.sources.gpu.nvml_stub import GIB, Gpu, World, gpu_uuid

EXPORTERS: Final = "kvpressure"
ENGINES: Final = "inference"
CHART: Final = ROOT / "deploy" / "helm" / "kvpressure"
GPUS: Final = 3
PATIENCE: Final = 180.0  # seconds for what takes a few on a machine that does nothing else
RUNTIME_CLASS: Final = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}


class Node(Machine):
    """``Machine`` with GPUs and images."""

    def __init__(self, where: Path, image: Path) -> None:
        super().__init__(where)
        self._image = image
        self._plugin: DevicePlugin | None = None

    def __enter__(self) -> Node:
        super().__enter__()
        for archive in (
            images.pause(self.where),
            images.exporter(self.where, self._image),
            images.vllm(self.where, self._image),
        ):
            self.image(archive)
            archive.unlink()
        self.gpus(World(gpus=[Gpu(memory_free=8 * GIB) for _ in range(GPUS)]))
        self._offer_gpus()
        assert self.ask("POST", "/apis/node.k8s.io/v1/runtimeclasses", body=RUNTIME_CLASS).status_code == 201
        if folder := os.environ.get(programs.DEFINITIONS):
            self.define(Path(folder))
        for name, level in ((EXPORTERS, "privileged"), (ENGINES, "")):
            self.run("create", "namespace", name)
            if level:  # as docs/deploy.md labels it
                self.run("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._plugin is not None:
            self._plugin.stop()
        super().__exit__()

    def _offer_gpus(self) -> None:
        self._plugin = DevicePlugin(
            self.root / "var/lib/kubelet/device-plugins", [gpu_uuid(index) for index in range(GPUS)]
        )
        self._plugin.start()
        until(lambda: self.get("node", NAME)["status"]["allocatable"].get("nvidia.com/gpu") == str(GPUS), PATIENCE)

    # --- as a user with kubectl ---------------------------------------------------------------------------------

    def run(self, *arguments: str, text: str | None = None) -> str:
        """What a ``kubectl`` command prints that must succeed."""
        status, out, problem = self.kubectl(*arguments, text=text)
        assert status == 0, (arguments, out, problem)
        return out

    def get(self, kind: str, name: str, namespace: str = "default") -> Json:
        """One object."""
        found: Json = json.loads(self.run("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def pods(self, namespace: str, selector: str = "") -> list[Json]:
        """The pods of a namespace."""
        asked = ["get", "pods", "-n", namespace, "-o", "json", *(["-l", selector] if selector else [])]
        found: list[Json] = json.loads(self.run(*asked))["items"]
        return found

    def tool(self, *words: str) -> tuple[int, str, str]:
        """Exit status and output of ``kvpressure``, which reads the cluster through kubectl."""
        done = subprocess.run(
            [sys.executable, "-m", "kvpressure", *words],
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout, done.stderr

    # --- vLLM servers -------------------------------------------------------------------------------------------

    def serve(self, name: str, *words: str, memory: str = "192Mi") -> None:
        """A Deployment of one vLLM server as vLLM's documents write it."""
        container = {
            "name": "vllm",
            "image": images.VLLM,
            "args": ["meta-llama/Llama-2-13b-chat-hf", *words],
            "ports": [{"containerPort": 8000}],
            "resources": {"limits": {"nvidia.com/gpu": "1", "memory": memory}},
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 2},
        }
        labels = {"app": name}
        spec = {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        }
        metadata = {"name": name, "namespace": ENGINES}
        self.run(
            "apply",
            "-f",
            "-",
            text=yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}),
        )
        self.run("rollout", "status", f"deploy/{name}", "-n", ENGINES, f"--timeout={PATIENCE:.0f}s")

    # --- the exporter -------------------------------------------------------------------------------------------

    def helm(self) -> Config:
        """Helm's engine, connected to the API server."""
        return Config(kubeconfig_path=str(self.kubeconfig), namespace=EXPORTERS)

    def values(self, **more: Any) -> Json:
        """Those of docs/deploy.md; the custom resources where their definitions were given. The stand-in for the
        driver wants to know where its world lies.
        """
        chosen: Json = {
            "image": {"repository": images.EXPORTER.rpartition(":")[0]},
            "extraEnv": [{"name": "NVML_STUB_WORLD", "value": WORLD}],
        }
        if os.environ.get(programs.DEFINITIONS):
            labels = {"release": "kube-prometheus-stack"}
            chosen |= {
                "monitor": {"kind": "PodMonitor", "labels": labels},
                "prometheusRule": {"enabled": True, "labels": labels},
                "dashboards": {"enabled": True},
            }
        return chosen | more

    def install(self) -> None:
        """``helm install`` and wait until every pod is ready."""
        with Chart.load(CHART) as chart, self.helm() as helm:
            helm.install(chart, "kvpressure", self.values(), wait="watcher", timeout=int(PATIENCE))

    def exporter(self) -> Json:
        """The exporter's pod."""
        (pod,) = [one for one in self.pods(EXPORTERS) if "deletionTimestamp" not in one["metadata"]]
        return pod

    def page(self) -> str:
        """What Prometheus gets, at the address that its discovery gives it."""
        address = self.exporter()["status"]["podIP"]
        with urllib.request.urlopen(f"http://{address}:9846/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Samples of a metric that have these labels."""
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(self.page())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def seen(self, name: str, wanted: Callable[[float], bool] = lambda _: True, **labels: str) -> dict[str, str]:
        """Wait for a sample with these labels and such a value; its labels."""
        found: list[dict[str, str]] = []

        def there() -> bool:
            found[:] = [own for own, value in self.samples(name, **labels) if wanted(value)]
            return bool(found)

        until(there, PATIENCE)
        return found[0]

    def gone(self, name: str, **labels: str) -> None:
        """Wait until no sample has these labels."""
        until(lambda: not self.samples(name, **labels), PATIENCE)
