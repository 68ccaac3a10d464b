"""Scraping: what the monitors and the examples make of the labels, in a real Prometheus; and who may reach the pods."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

from deploy.chart import DEPLOY, ROOT, Json, of_kind, only, render
from deploy.test_daemonset import container_of, pods
from kvpressure.demo.stack import Child

EXAMPLES = sorted((DEPLOY / "prometheus").glob("*.yml"))
PAGE = b"""# TYPE kvpressure_gpu_up gauge
kvpressure_gpu_up{uuid="GPU-1"} 1
# TYPE kvpressure_engine_up gauge
kvpressure_engine_up{namespace="inference",pod="chat-0"} 1
"""
OF_THE_POD = {"__meta_kubernetes_pod_node_name": "node-1", "__meta_kubernetes_pod_container_port_name": "metrics",
              "__meta_kubernetes_pod_label_app_kubernetes_io_name": "kvpressure"}
"""What service discovery knows about the exporter's pod."""
BY_OPERATOR = {"namespace": "kvpressure", "pod": "kvpressure-nvidia-x", "container": "kvpressure", "service": "kvpressure",
               "endpoint": "metrics"}
"""Labels that the operator puts on a target before the monitor's own relabelings."""
DISCOVERY = [{"role": "pod", "namespaces": {"names": ["kvpressure"]},
              "selectors": [{"role": "pod", "label": "app.kubernetes.io/name=kvpressure"}]}]
"""Where the example looks for the exporters; a selector has to name the role that it is for."""


@pytest.fixture
def exporter() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def scraped(scrape: Json, folder: Path) -> dict[str, dict[str, str]]:
    """Metric name -> labels, after a scrape by a real Prometheus."""
    config = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    prometheus = Child("prometheus", folder, lambda address: [
        "prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"],
        threading.Event())
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            query = quote('{__name__=~"kvpressure_.*|up"}')
            with urlopen(f"{prometheus.url}/api/v1/query?query={query}", timeout=5) as answer:
                series = [item["metric"] for item in json.load(answer)["data"]["result"]]
            if len(series) == 3:
                return {labels.pop("__name__"): labels for labels in series}
            time.sleep(0.05)
    finally:
        prometheus.stop()
    raise AssertionError(f"not scraped: {series}")


def snake(endpoint: Json) -> list[Json]:
    """Relabelings of a monitor as the operator writes them into Prometheus' configuration."""
    return [{re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", key): value for key, value in rule.items()}
            for rule in endpoint["relabelings"]]


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_monitor_keeps_the_engines_labels_and_drops_the_exporters(kind: str, exporter: str, tmp_path: Path) -> None:
    spec = only(render({"monitor": {"kind": kind, "cluster": "eu-1"}}), kind)["spec"]
    endpoint, = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True  # also where somebody adds such labels to the target again
    found = scraped({"job_name": "kvpressure", "honor_labels": endpoint["honorLabels"], "relabel_configs": snake(endpoint),
                     "static_configs": [{"targets": [exporter], "labels": {**OF_THE_POD, **BY_OPERATOR}}]}, tmp_path)
    own = {"job": "kvpressure", "instance": "node-1", "node": "node-1", "cluster": "eu-1"}
    assert found == {"up": own, "kvpressure_gpu_up": {**own, "uuid": "GPU-1"},
                     "kvpressure_engine_up": {**own, "namespace": "inference", "pod": "chat-0"}}


def test_the_example_for_a_cluster_does_the_same(exporter: str, tmp_path: Path) -> None:
    scrape, = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    del scrape["kubernetes_sd_configs"]
    assert scrape["honor_labels"] is True
    scrape["static_configs"] = [{"targets": [exporter], "labels": OF_THE_POD},
                                {"targets": ["127.0.0.1:1"], "labels": {**OF_THE_POD, "__meta_kubernetes_pod_container_port_name": "x"}}]
    found = scraped(scrape, tmp_path)
    own = {"job": "kvpressure", "instance": "node-1", "node": "node-1"}
    assert found == {"up": own, "kvpressure_gpu_up": {**own, "uuid": "GPU-1"},
                     "kvpressure_engine_up": {**own, "namespace": "inference", "pod": "chat-0"}}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_promtool_takes_the_examples(path: Path, tmp_path: Path) -> None:
    """Debian's Prometheus is built without discovery in Kubernetes, so that block is compared instead."""
    document = yaml.safe_load(path.read_text())
    document["rule_files"] = [str(ROOT / "alerts" / Path(name).name) for name in document["rule_files"]]
    scrape, = document["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs", DISCOVERY) == DISCOVERY
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    checked = subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_monitor_selects_the_pods_and_their_port(kind: str) -> None:
    documents = render({"monitor": {"kind": kind}, "config": {"web.telemetry-path": "/gpu"}, "port": 9900})
    spec = only(documents, kind)["spec"]
    pod = only(documents, "DaemonSet")["spec"]["template"]
    service = only(documents, "Service")
    target = pod if kind == "PodMonitor" else service
    assert spec["selector"]["matchLabels"].items() <= target["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    endpoint, = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    port, = container_of(pod["spec"])["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/gpu")
    assert [(item["name"], item["port"], item["targetPort"]) for item in service["spec"]["ports"]] == [("metrics", 9900, "metrics")]
    assert target["metadata"]["labels"][spec["jobLabel"]] == "kvpressure"


def test_the_network_policy_lets_in_the_scrape_and_out_the_questions() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    documents = render({"networkPolicy": {"enabled": True, "ingressFrom": peers}, "namespaces": ["chat"]})
    spec = only(documents, "NetworkPolicy")["spec"]
    labels = only(documents, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": "metrics"}], "from": peers}]
    api, engines = spec["egress"]
    assert [port["port"] for port in api["ports"]] == [443, 6443]
    assert engines["to"][0]["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["chat"]}]


def test_without_the_api_the_network_policy_does_not_allow_it() -> None:
    off = dict.fromkeys(("pods", "node", "procfs", "cgroup", "logs"), False)
    spec = only(render({"networkPolicy": {"enabled": True}, "sources": off}), "NetworkPolicy")["spec"]
    assert [set(rule) for rule in spec["egress"]] == [{"to"}]
    assert of_kind(render({"networkPolicy": {"enabled": True, "restrictEgress": False}}), "NetworkPolicy")[0]["spec"]["policyTypes"] == ["Ingress"]
    assert pods({"sources": off})[0]["automountServiceAccountToken"] is False
