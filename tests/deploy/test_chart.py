"""The chart as a whole: lint, every value, every supported Kubernetes, and what the schema refuses."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import re
from typing import Any, Final

import helm_python
import pytest
import yaml

from tests.deploy.chart import CI_VALUES, DEPLOY, KUBERNETES, Json, chart, name_of, of_kind, problems, render

pytestmark = pytest.mark.slow

CHART: Final = DEPLOY / "helm" / "kvpressure"

NODES: Final[Json] = {
    "amd": {"enabled": True},
    "monitor": {"kind": "ServiceMonitor"},
    "networkPolicy": {"enabled": True},
    "recording": {"enabled": True},
}
BUNDLE: Final[Json] = {
    "prometheusRule": {"enabled": True},
    "rulesConfigMap": {"enabled": True},
    "dashboards": {"enabled": True},
}
EVERYTHING: Final[Json] = {**NODES, **BUNDLE}
OF_THE_BUNDLE: Final = re.compile(
    r"(rules|thresholds|dashboards|prometheusRule|rulesConfigMap|commonLabels|\w+Override)\b"
)
"""Values that change rules or dashboards, which are large; the others are switched without them."""
OF_A_VENDOR: Final[Json] = {
    "enabled": False,
    "runtimeClassName": "other",
    "resources": {"limits": {"memory": "512Mi"}},
    "tolerateAll": True,
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "a", "hostPath": {"path": "/a"}}],
    "extraVolumeMounts": [{"name": "state", "mountPath": "/a"}],
    "nodeSelector": {"pool": "gpu"},
    "affinity": {"nodeAffinity": None, "podAffinity": {}},
    "tolerations": [{"operator": "Exists"}],
}
SWITCHED: Final[Json] = {
    "nameOverride": "pressure",
    "fullnameOverride": "pressure",
    "commonLabels": {"team": "inference"},
    "global.imageRegistry": "mirror.internal",
    "global.imagePullSecrets": ["mirror"],
    "image.registry": "registry.internal",
    "image.repository": "registry.internal/kvpressure",
    "image.tag": "1.2.3",
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "nvidia.driverRoot": ("/opt/driver", {"nvidia": {"runtimeClassName": ""}}),
    "nvidia.privileged": (True, {"nvidia": {"runtimeClassName": ""}}),
    **{f"{vendor}.{name}": value for vendor in ("nvidia", "amd") for name, value in OF_A_VENDOR.items()},
    "sources.pods": (False, {"sources": {"procfs": False, "cgroup": False, "logs": False}}),
    "sources.node": False,
    "sources.podresources": False,
    "sources.procfs": False,
    "sources.cgroup": False,
    "sources.logs": False,
    "namespaces": ["chat", "batch"],
    "podSelector": "app=vllm",
    "targets": ["http://10.0.0.5:8000"],
    "host.kubelet": "/var/snap/kubelet",
    "host.proc": "/hostproc",
    "hostPID": True,
    "host.cgroup": "/cgroup",
    "host.podLogs": "/logs/pods",
    "host.logTargets": ["/var/lib/docker/containers"],
    "config": {"log.format": "json", "log.level": "debug", "nvidia.gpm": True},
    "thresholds": {"kv_full_ratio": 0.9},
    "recording.enabled": False,
    "recording.maxSizeMiB": 8,
    "recording.keep": 3,
    "port": 9000,
    "listenAddress": "127.0.0.1",
    "healthPort": (9001, {"webConfigSecret": "web"}),
    "webConfigSecret": "kvpressure-web",
    "runAsUser": (65532, {"sources": {"podresources": False, "logs": False}}),
    "seLinuxOptions": {"type": "spc_t"},
    "resources": {"limits": {"memory": "1Gi"}},
    "podSecurityContext": {"supplementalGroups": [44]},
    "priorityClassName": "",
    "priorityClassQuota.enabled": True,
    "priorityClassQuota.pods": (12, {"priorityClassQuota": {"enabled": True}}),
    "updateStrategy.type": "OnDelete",
    "updateStrategy.maxUnavailable": 1,
    "updateStrategy.maxSurge": ("25%", {"updateStrategy": {"maxUnavailable": 0, "maxSurge": 1}}),
    "revisionHistoryLimit": 3,
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "state", "mountPath": "/a"}],
    "extraContainers": [{"name": "proxy", "image": "proxy:1", "ports": [{"name": "https", "containerPort": 8443}]}],
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}, "data": {}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: as-text}\ndata: {a: {{ .Values.port | quote }}}\n",
    ],
    "podAnnotations": {"a": "b"},
    "podLabels": {"a": "b"},
    "serviceAccount.create": False,
    "serviceAccount.name": "other",
    "serviceAccount.annotations": {"a": "b"},
    "rbac.create": False,
    "service.enabled": (False, {"monitor": {"kind": "PodMonitor"}}),
    "service.annotations": {"a": "b"},
    "service.clusterIP": "",
    "service.targetPort": "https",
    "service.internalTrafficPolicy": ("Local", {"service": {"clusterIP": ""}}),
    "service.ipFamilyPolicy": "PreferDualStack",
    "service.ipFamilies": ["IPv6", "IPv4"],
    "openshift.enabled": True,
    "openshift.scc": ("privileged", {"openshift": {"enabled": True}}),
    "monitor.kind": "PodMonitor",
    "monitor.labels": {"release": "prometheus"},
    "monitor.interval": "30s",
    "monitor.scrapeTimeout": "5s",
    "monitor.cluster": "eu-1",
    "monitor.scheme": "https",
    "monitor.tlsConfig": {"insecureSkipVerify": True},
    "monitor.basicAuth": {
        "username": {"name": "login", "key": "user"},
        "password": {"name": "login", "key": "password"},
    },
    "monitor.authorization": {"type": "Bearer", "credentials": {"name": "token", "key": "token"}},
    "monitor.bearerTokenSecret": {"name": "token", "key": "token"},
    "monitor.port": ("https", {"monitor": {"kind": "PodMonitor"}}),
    "monitor.namespace": "monitoring",
    "monitor.relabelings": [{"targetLabel": "region", "replacement": "eu"}],
    "monitor.alertsOnly": True,
    "monitor.metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "python_.*"}],
    "monitor.limits": {"sampleLimit": 20000, "labelLimit": 40},
    "monitor.attachMetadata": {"node": True},
    "prometheusRule.enabled": False,
    "prometheusRule.labels": {"release": "prometheus"},
    "alertmanagerConfig.enabled": True,
    "alertmanagerConfig.labels": ({"a": "b"}, {"alertmanagerConfig": {"enabled": True}}),
    "alertmanagerConfig.namespace": ("inference", {"alertmanagerConfig": {"enabled": True}}),
    "alertmanagerConfig.receivers": (
        [{"name": "pager", "webhookConfigs": [{"url": "https://pager.internal"}]}],
        {"alertmanagerConfig": {"enabled": True}},
    ),
    "rules.runbookBaseUrl": "https://docs.internal/runbooks",
    "rules.dashboardBaseUrl": "https://grafana.internal",
    "rulesConfigMap.enabled": False,
    "rulesConfigMap.labels": {"a": "b"},
    "rules.file": "groups: [{name: mine, rules: [{record: one, expr: vector(1)}]}]",
    "dashboards.enabled": False,
    "dashboards.labels": {"a": "b"},
    "dashboards.annotations": {"grafana_folder": "vLLM"},
    "dashboards.files": {"kvpressure-incident": "{}"},
    "networkPolicy.enabled": False,
    "networkPolicy.ingressFrom": [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ],
    "networkPolicy.restrictEgress": False,
    "networkPolicy.apiServerCIDRs": ["10.0.0.1/32", "fd00::1/128"],
    "networkPolicy.apiServerPorts": [8443],
    "networkPolicy.dnsPorts": ([53, 5353], {"targets": ["http://chat.inference.svc:8000"]}),
    "networkPolicy.extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
}
"""Every value of the chart, by its dotted name, switched to something else; a pair brings what it needs besides."""


def merged(base: Json, more: Json) -> Json:
    found = copy.deepcopy(base)
    for key, value in more.items():
        found[key] = (
            merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
        )
    return found


def nested(name: str, value: Any) -> Json:
    for part in reversed(name.split(".")):
        value = {part: value}
    found: Json = value
    return found


def leaves(values: Json, free: set[str], prefix: str = "") -> set[str]:
    """Dotted names of all values; a mapping with names of the user's own counts as one."""
    names: set[str] = set()
    for key, value in values.items():
        name = prefix + key
        names |= leaves(value, free, f"{name}.") if isinstance(value, dict) and value and name not in free else {name}
    return names


def test_every_value_is_switched_here() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {"nvidia.affinity", "amd.affinity", "resources", "dashboards.labels"}
    assert leaves(values, free) == set(SWITCHED)


@pytest.mark.parametrize("name", sorted(SWITCHED))
def test_a_switched_value_changes_what_is_rendered_and_stays_valid(name: str) -> None:
    switched = SWITCHED[name]
    value, needed = switched if isinstance(switched, tuple) else (switched, {})
    base = merged(EVERYTHING if OF_THE_BUNDLE.match(name) else NODES, needed)
    before, after = render(base), render(merged(base, nested(name, value)))
    assert after != before
    oldest_and_newest = (KUBERNETES[0], KUBERNETES[-1])  # the example values are held to all between them
    assert problems([document for document in after if document not in before], oldest_and_newest) == []


@pytest.mark.parametrize("values", CI_VALUES.values(), ids=CI_VALUES.keys())
def test_the_example_values_render_on_every_kubernetes(values: Json) -> None:
    assert problems(render(values)) == []
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nope": 1}, "nope"),
        ({"sources": {"pods": False, "procfs": True, "cgroup": False, "logs": False}}, "sources.pods true"),
        ({"networkPolicy": {"apiServerCIDRs": ["10.0.0.1"]}}, "/networkPolicy/apiServerCIDRs/0"),
        ({"thresholds": {"kv_fool_ratio": 0.9}}, "kv_fool_ratio"),
        ({"config": {"web.max-requestz": 1}}, "web.max-requestz"),
        ({"rules": {"file": "apiVersion: v1"}}, "rules.file has no rule groups"),
        (
            {"prometheusRule": {"enabled": True}, "thresholds": {"memory_critical_ratio": 0.95}},
            "thresholds.memory_critical_ratio is a number of the rules too",
        ),
        ({"image": {"repository": ""}}, "image.repository is empty"),
        ({"fullnameOverride": "Y_BAD"}, "fullnameOverride"),
        ({"monitor": {"interval": "1s1m"}}, "interval"),
        ({"updateStrategy": {"maxUnavailable": "some"}}, "maxUnavailable"),
        ({"updateStrategy": {"maxSurge": 1}}, "wants one of them to be 0"),
        ({"healthPort": 9846}, "is also port"),
        ({"config": {"web.engine-labels": "prefixed"}, "prometheusRule": {"enabled": True}}, "have plain names"),
        ({"priorityClassName": "", "priorityClassQuota": {"enabled": True}}, "needs a class"),
        ({"service": {"internalTrafficPolicy": "Local"}}, "service.clusterIP empty"),
        ({"config": {"collector.pods": False}}, "allowed: the value sources.pods,"),
        (
            {"commonLabels": {"app.kubernetes.io/name": "x"}},
            "commonLabels: the chart sets app.kubernetes.io/name itself",
        ),
        (
            {"monitor": {"interval": "1m", "scrapeTimeout": "61s"}},
            "monitor.scrapeTimeout 61s is above monitor.interval 1m",
        ),
        ({"nvidia": {"privileged": True}}, "allowed: nvidia.runtimeClassName empty"),
        ({"nvidia": {"enabled": False}}, "allowed: at least one true"),
        ({"runAsUser": 65532}, "sources.podresources false"),
        ({"runAsUser": 65532, "sources": {"podresources": False}}, "sources.logs false"),
        ({"service": {"enabled": False}, "monitor": {"kind": "ServiceMonitor"}}, "service.enabled true"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Json, said: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert said in str(caught.value)


def test_every_setting_that_the_chart_writes_is_refused_in_config() -> None:
    """Another one there would win over port, mounts and rights. The page's links may differ from those of the rules."""
    everything = merged(
        NODES,
        {
            "namespaces": ["chat"],
            "podSelector": "app=vllm",
            "targets": ["http://10.0.0.5:8000"],
            "webConfigSecret": "web",
            "thresholds": {"kv_full_ratio": 0.9},
        },
    )
    written = {
        name
        for item in of_kind(render(everything), "ConfigMap")
        for name in yaml.safe_load(item["data"]["config.yaml"])
    }
    assert len(written) > 20
    lists = {"web.listen-address", "web.health-listen-address", "engine.target", "kube.namespaces"}
    for name in written - {"web.runbook-url", "web.dashboard-url"}:
        with pytest.raises(helm_python.HelmError, match=re.escape(f"config.{name} would leave")):
            render({"config": {name: ["x"] if name in lists else "x"}})


@pytest.mark.parametrize(
    "values",
    [
        {"monitor": {"interval": "1m", "scrapeTimeout": "60s"}},
        {"monitor": {"interval": "1m30s", "scrapeTimeout": "90s"}},
        {"updateStrategy": {"maxUnavailable": "0%", "maxSurge": "1%"}},
        {"fullnameOverride": "kv-pressure-2"},
        {"prometheusRule": {"enabled": True}, "thresholds": {"kv_full_ratio": 0.9}},
        {"commonLabels": {"app.kubernetes.io/part-of": "inference"}},
    ],
)
def test_values_at_the_edge_are_taken(values: Json) -> None:
    assert problems(render(merged({"monitor": {"kind": "PodMonitor"}}, values))) == []


def test_several_releases_do_not_collide() -> None:
    """Objects without a namespace carry that of their release in their name."""
    first, second = (
        {name_of(item) for item in render(EVERYTHING, namespace=namespace) if "namespace" not in item["metadata"]}
        for namespace in ("one", "two")
    )
    assert first
    assert not first & second


def test_everything_lies_in_the_release_namespace() -> None:
    for document in render(merged(EVERYTHING, {"namespaces": ["chat"]}), namespace="elsewhere"):
        expected = {"ClusterRole": None, "ClusterRoleBinding": None, "Role": "chat", "RoleBinding": "chat"}
        assert document["metadata"].get("namespace") == expected.get(document["kind"], "elsewhere"), name_of(document)


def test_what_is_applied_fits_into_its_annotation() -> None:
    """``kubectl apply`` keeps a copy of each object in an annotation of at most 256 KiB (262 144 bytes)."""
    for document in render(EVERYTHING):
        assert len(json.dumps(document)) < 245_000, name_of(document)


def test_a_release_fits_into_its_secret() -> None:
    """Helm keeps chart and manifest of a release, packed and in base64, in a Secret of at most 1 MiB."""
    parts = [item["data"] for item in [*chart().files, *chart().templates]]
    release = json.dumps(
        [
            *parts,
            *chart()
            .render(values=merged(EVERYTHING, nested("image.repository", "kvpressure")), name="a", namespace="b")
            .values(),
        ]
    )
    assert len(base64.b64encode(gzip.compress(release.encode()))) < 400_000


def test_the_chart_names_the_versions_of_the_package() -> None:
    from kvpressure import __version__

    assert chart().metadata["version"] == __version__
    assert chart().metadata["appVersion"] == __version__
