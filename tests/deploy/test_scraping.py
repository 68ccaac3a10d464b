"""Scraping: what the monitors and the examples make of the labels, in a real Prometheus; and who may reach the pods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

from tests.deploy.chart import DEPLOY, ROOT, Json, helm_test_objects, of_kind, only, render
from tests.deploy.test_daemonset import container_of, pods
from tests.helpers.prometheus import accepted, prometheus
from tests.helpers.waiting import until
from tests.helpers.web import serving_pages

pytestmark = pytest.mark.live

EXAMPLES = sorted((DEPLOY / "prometheus").glob("*.yml"))
PAGE = b"""# TYPE kvpressure_gpu_up gauge
kvpressure_gpu_up{uuid="GPU-1"} 1
# TYPE kvpressure_engine_up gauge
kvpressure_engine_up{namespace="inference",pod="chat-0"} 1
"""
OF_THE_POD = {
    "__meta_kubernetes_pod_node_name": "node-1",
    "__meta_kubernetes_pod_container_port_name": "metrics",
    "__meta_kubernetes_pod_label_app_kubernetes_io_name": "kvpressure",
    "__meta_kubernetes_namespace": "kvpressure",
    "__meta_kubernetes_pod_controller_name": "kvpressure-nvidia",
    "__meta_kubernetes_pod_phase": "Running",
}
"""What service discovery knows about the exporter's pod."""
BY_OPERATOR = {
    "namespace": "kvpressure",
    "pod": "kvpressure-nvidia-x",
    "container": "kvpressure",
    "service": "kvpressure",
    "endpoint": "metrics",
}
"""Labels that the operator puts on a target before the monitor's own relabelings."""
DISCOVERY = [
    {
        "role": "pod",
        "namespaces": {"names": ["kvpressure"]},
        "selectors": [{"role": "pod", "label": "app.kubernetes.io/name=kvpressure"}],
    }
]
"""Where the example looks for the exporters; a selector has to name the role that it is for."""
INSTANCE = "node-1/kvpressure/kvpressure-nvidia"


@pytest.fixture
def exporter() -> Iterator[str]:
    with serving_pages(lambda _: PAGE) as address:
        yield address.removeprefix("http://")


def scraped(scrape: Json, folder: Path) -> dict[str, dict[str, str]]:
    """Metric name -> labels, after a scrape of one target by a real Prometheus."""
    return {labels.pop("__name__"): labels for labels in all_scraped(scrape, folder, exporters=1)}


def all_scraped(scrape: Json, folder: Path, exporters: int) -> list[dict[str, str]]:
    """The labels of every series, after a real Prometheus scraped as many targets as it finds."""
    config = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": [scrape]}
    with prometheus(folder, config) as url:
        return until(lambda: stored(url, exporters))


def stored(url: str, exporters: int) -> list[dict[str, str]]:
    """The series that Prometheus has, once it has read all of the exporters."""
    query = quote('{__name__=~"kvpressure_.*|up"}')
    with urlopen(f"{url}/api/v1/query?query={query}", timeout=5) as answer:
        series: list[dict[str, str]] = [item["metric"] for item in json.load(answer)["data"]["result"]]
    with urlopen(f"{url}/api/v1/targets?state=active", timeout=5) as answer:
        targets = [item for item in json.load(answer)["data"]["activeTargets"] if item["health"] != "unknown"]
    assert (len(targets), len(series)) == (exporters, 3 * exporters), series
    return series


def snake(endpoint: Json) -> list[Json]:
    """Relabelings of a monitor as the operator writes them into Prometheus' configuration."""
    return [
        {re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", key): value for key, value in rule.items()}
        for rule in endpoint["relabelings"]
    ]


def example() -> Json:
    """The job of the example for a cluster, without the discovery that Debian's Prometheus cannot do."""
    scrape: Json
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    del scrape["kubernetes_sd_configs"]
    return scrape


def by_operator(documents: list[Json], kind: str) -> tuple[Json, dict[str, str]]:
    """The job that the operator makes of a monitor, and the labels it puts on a target."""
    monitor = only(documents, kind)
    spec = monitor["spec"]
    (endpoint,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True  # also where somebody adds such labels to the target again
    template = only(documents, "DaemonSet")["spec"]["template"]["metadata"]
    job = {"job": template["labels"][spec["jobLabel"]]} if "jobLabel" in spec else {}
    scrape = {
        "job_name": f"{kind.lower()}/kvpressure/{monitor['metadata']['name']}/0",
        "honor_labels": True,
        "relabel_configs": snake(endpoint),
    }
    return scrape, {**BY_OPERATOR, **job}


@pytest.mark.parametrize("scraper", ["PodMonitor", "ServiceMonitor", "example"])
def test_the_engines_labels_are_kept_and_the_exporters_dropped(scraper: str, exporter: str, tmp_path: Path) -> None:
    scrape, labels, own = example(), OF_THE_POD, {"job": "kvpressure", "instance": INSTANCE, "node": "node-1"}
    if scraper != "example":
        scrape, more = by_operator(render({"monitor": {"kind": scraper, "cluster": "eu-1"}}), scraper)
        labels, own = {**labels, **more}, {**own, "cluster": "eu-1"}
    assert scrape["honor_labels"] is True
    scrape["static_configs"] = [{"targets": [exporter], "labels": labels}]
    assert scraped(scrape, tmp_path) == {
        "up": own,
        "kvpressure_gpu_up": {**own, "uuid": "GPU-1"},
        "kvpressure_engine_up": {**own, "namespace": "inference", "pod": "chat-0"},
    }


def test_the_example_leaves_out_other_ports_and_pods_that_have_ended(exporter: str, tmp_path: Path) -> None:
    """As the operator does: an evicted pod has the labels of its successor, and ``up`` of both would be one series."""
    others = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {**OF_THE_POD, f"__meta_kubernetes_pod_{name}": value}}
        for port, (name, value) in enumerate(
            (("phase", "Failed"), ("phase", "Succeeded"), ("container_port_name", "x")), start=1
        )
    ]
    scrape = {**example(), "static_configs": [{"targets": [exporter], "labels": OF_THE_POD}, *others]}
    assert len(all_scraped(scrape, tmp_path, exporters=1)) == 3


def daemonset_names(values: Json, **release: str) -> list[tuple[str, str]]:
    return [
        (item["metadata"]["namespace"], item["metadata"]["name"])
        for item in of_kind(render(values, **release), "DaemonSet")
    ]


BOTH_VENDORS: Json = {"amd": {"enabled": True}}
NEIGHBOURS = {
    *daemonset_names(BOTH_VENDORS),
    *daemonset_names(BOTH_VENDORS, name="canary"),
    *daemonset_names(BOTH_VENDORS, namespace="canary"),
}
"""Exporters of both vendors, two releases and two namespaces."""


@pytest.mark.parametrize("scraper", ["PodMonitor", "ServiceMonitor", "example"])
def test_exporters_on_a_node_stay_apart(scraper: str, exporter: str, tmp_path: Path) -> None:
    """Else ``up`` of both is one series, and a counter jumps between those of two processes."""
    scrape, labels = (example(), {})
    if scraper != "example":
        scrape, labels = by_operator(render({"monitor": {"kind": scraper}}), scraper)
    own = {**OF_THE_POD, **labels}
    scrape["static_configs"] = [
        {
            "targets": [exporter],
            "labels": {
                **own,
                "__meta_kubernetes_namespace": namespace,
                "__meta_kubernetes_pod_controller_name": name,
            },
        }
        for namespace, name in NEIGHBOURS
    ]
    found = all_scraped(scrape, tmp_path, exporters=len(NEIGHBOURS))
    assert {labels["instance"] for labels in found} == {f"node-1/{namespace}/{name}" for namespace, name in NEIGHBOURS}
    assert {labels["node"] for labels in found} == {"node-1"}


@pytest.mark.parametrize(("kind", "override"), [("PodMonitor", "nameOverride"), ("ServiceMonitor", "fullnameOverride")])
def test_the_rules_find_the_monitors_job_whatever_the_release_is_called(
    kind: str, override: str, exporter: str, tmp_path: Path
) -> None:
    documents = render({"monitor": {"kind": kind}, "prometheusRule": {"enabled": True}, override: "gpu-kv"})
    down = next(
        rule["expr"]
        for group in only(documents, "PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "KvpressureExportersDown"
    )
    scrape, labels = by_operator(documents, kind)
    scrape["static_configs"] = [{"targets": [exporter], "labels": {**OF_THE_POD, **labels}}]
    wanted = re.search(r'job=~"([^"]+)"', down)
    assert wanted is not None
    assert re.fullmatch(wanted[1], scraped(scrape, tmp_path)["up"]["job"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_promtool_takes_the_examples(path: Path, tmp_path: Path) -> None:
    """Debian's Prometheus is built without discovery in Kubernetes, so that block is compared instead."""
    document = yaml.safe_load(path.read_text())
    document["rule_files"] = [str(ROOT / "alerts" / Path(name).name) for name in document["rule_files"]]
    (scrape,) = document["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs", DISCOVERY) == DISCOVERY
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    accepted("promtool", "check", "config", "prometheus.yml", folder=tmp_path)


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_monitor_selects_the_pods_and_their_port(kind: str) -> None:
    documents = render({"monitor": {"kind": kind}, "port": 9900})
    spec = only(documents, kind)["spec"]
    pod = only(documents, "DaemonSet")["spec"]["template"]
    service = only(documents, "Service")
    target = pod if kind == "PodMonitor" else service
    assert spec["selector"]["matchLabels"].items() <= target["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    (port,) = container_of(pod["spec"])["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert [(item["name"], item["port"], item["targetPort"]) for item in service["spec"]["ports"]] == [
        ("metrics", 9900, "metrics")
    ]


def test_the_network_policy_lets_in_the_scrape_and_out_the_questions() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    documents = render({"networkPolicy": {"enabled": True, "ingressFrom": peers}, "namespaces": ["chat"]})
    spec = only(documents, "NetworkPolicy")["spec"]
    labels = only(documents, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (scrape,) = spec["ingress"]
    assert scrape["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    *others, tester = scrape["from"]
    assert others == peers
    assert set(tester) == {"podSelector"}  # in the release's own namespace alone
    (test,) = helm_test_objects()
    assert tester["podSelector"]["matchLabels"]
    assert tester["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()
    assert not only(documents, "Service")["spec"]["selector"].items() <= test["metadata"]["labels"].items()
    api, engines = spec["egress"]
    assert [port["port"] for port in api["ports"]] == [443, 6443]
    assert engines["to"][0]["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["chat"]}
    ]


@pytest.mark.parametrize(
    ("values", "asks"),
    [
        ({"targets": ["http://chat.inference.svc:8000"]}, True),
        ({"targets": ["http://10.0.0.5:8000", "chat:8000"]}, True),
        ({"targets": ["http://10.0.0.5.example:8000"]}, True),
        ({"config": {"kube.api-url": "https://api.internal:6443"}}, True),
        ({"targets": ["http://10.0.0.5:8000", "https://[fd00::1]/", "10.0.0.6:8000"]}, False),
        ({}, False),
    ],
)
def test_the_network_policy_lets_out_what_the_names_of_targets_need(values: Json, asks: bool) -> None:
    policy = {"enabled": True, "dnsPorts": [53, 5353]}
    egress = only(render({"networkPolicy": policy, "namespaces": ["inference"], **values}), "NetworkPolicy")["spec"][
        "egress"
    ]
    dns = {"ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")]}
    assert (dns in egress) is asks
    assert len(egress) == 2 + asks


@pytest.mark.parametrize("addresses", [[], ["10.0.0.1/32"], ["192.0.2.0/28", "fd00::1/128"]])
def test_the_network_policy_lets_out_to_the_api_server_and_not_to_the_internet(addresses: list[str]) -> None:
    """Where its addresses are known; a rule without them allows its ports to any host."""
    policy = {"enabled": True, "apiServerCIDRs": addresses, "apiServerPorts": [6443]}
    api, engines = only(render({"networkPolicy": policy}), "NetworkPolicy")["spec"]["egress"]
    to = {"to": [{"ipBlock": {"cidr": address}} for address in addresses]} if addresses else {}
    assert api == {"ports": [{"protocol": "TCP", "port": 6443}], **to}
    assert engines == {"to": [{"namespaceSelector": {}}]}


def test_without_the_api_the_network_policy_does_not_allow_it() -> None:
    off = dict.fromkeys(("pods", "node", "procfs", "cgroup", "logs"), False)
    spec = only(render({"networkPolicy": {"enabled": True}, "sources": off}), "NetworkPolicy")["spec"]
    assert [set(rule) for rule in spec["egress"]] == [{"to"}]
    assert of_kind(render({"networkPolicy": {"enabled": True, "restrictEgress": False}}), "NetworkPolicy")[0]["spec"][
        "policyTypes"
    ] == ["Ingress"]
    assert pods({"sources": off})[0]["automountServiceAccountToken"] is False
