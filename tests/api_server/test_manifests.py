"""What is deployed, applied to a real API server: chart, manifests, examples, Pod Security and rights."""

from __future__ import annotations

from typing import Final

import pytest
import yaml

from tests.api_server.cluster import Cluster
from tests.deploy.chart import DEPLOY, Json, helm_test_objects, of_kind, only, render
from tests.deploy.test_admission import level
from tests.deploy.test_manifests import MANIFESTS, kustomize
from tests.deploy.test_rbac import granted

pytestmark = pytest.mark.live

CASES: Final[dict[str, Json]] = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((DEPLOY / "helm" / "kvpressure" / "ci").glob("*.yaml"))
} | {"default": {}}
EVERYTHING: Final[Json] = {
    "monitor": {"kind": "PodMonitor"},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
    "rulesConfigMap": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "priorityClassQuota": {"enabled": True},
    "openshift": {"enabled": True},
}
BUILT_IN: Final = {
    *("ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet", "HorizontalPodAutoscaler", "Namespace"),
    *("NetworkPolicy", "Pod", "ResourceQuota", "Role", "RoleBinding", "Service", "ServiceAccount"),
}
LEVELS: Final = ("privileged", "baseline", "restricted")


def applied(cluster: Cluster, documents: list[Json], *options: str) -> tuple[int, str]:
    """Exit status of ``kubectl apply`` and everything it said; warnings and unknown fields fail it."""
    status, out, problem = cluster.kubectl(
        "apply", "--validate=strict", "--warnings-as-errors", *options, "-f", "-", text=yaml.safe_dump_all(documents)
    )
    return status, out + problem


def known(documents: list[Json], kinds: set[str]) -> list[Json]:
    """The objects whose kind this API server knows."""
    return [item for item in documents if item["kind"] in BUILT_IN | kinds]


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("name", [*CASES, "everything"])
def test_the_charts_objects_are_taken(cluster: Cluster, custom_kinds: set[str], name: str, side: str) -> None:
    """As ``helm install`` and as ``ServerSideApply`` send them."""
    cluster.namespace("kvpressure", enforce="privileged")
    for one in ("inference", "batch"):
        cluster.namespace(one)
    values = EVERYTHING if name == "everything" else CASES[name]
    options = ["--server-side", "--force-conflicts"] if side == "server" else []
    status, said = applied(cluster, known(render(values) + helm_test_objects(values), custom_kinds), *options)
    assert status == 0, said
    # A second time changes nothing: no field is dropped or rewritten, which GitOps would call drift.
    status, said = applied(cluster, known(render(values), custom_kinds), *options)
    assert status == 0, said
    if side == "client":
        assert [line for line in said.splitlines() if not line.endswith("unchanged")] == []


FOLDERS: Final = sorted(  # the components of an overlay are nothing to apply
    path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml") if "kind: Component" not in path.read_text()
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_plain_manifests_are_taken(cluster: Cluster, custom_kinds: set[str], folder: str) -> None:
    """By the command of docs/deploy.md."""
    cluster.kubectl("create", "namespace", "kvpressure")
    kinds = {item["kind"] for item in kustomize(MANIFESTS / folder)} - BUILT_IN - custom_kinds
    if kinds:
        pytest.skip(f"no definition of {', '.join(sorted(kinds))} in CUSTOM_RESOURCES")
    status, out, problem = cluster.kubectl(
        "apply", "--validate=strict", "--warnings-as-errors", "-k", str(MANIFESTS / folder)
    )
    assert status == 0, out + problem


EXAMPLES: Final = (
    *("autoscaling/hpa", "autoscaling/keda-scaledobject", "autoscaling/prometheusrule"),
    *("gitops/argocd-application", "gitops/flux"),
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_taken(cluster: Cluster, custom_kinds: set[str], name: str) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))
    unknown = {item["kind"] for item in documents} - BUILT_IN - custom_kinds
    if unknown:
        pytest.skip(f"no definition of {', '.join(sorted(unknown))} in CUSTOM_RESOURCES")
    for document in documents:
        cluster.kubectl("create", "namespace", document["metadata"]["namespace"])
    status, said = applied(cluster, documents)
    assert status == 0, said


# --- Pod Security -----------------------------------------------------------------------------------------------------


def template(daemonset: Json, namespace: str) -> Json:
    """The pod that a DaemonSet makes on a node."""
    made = daemonset["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**made["metadata"], "name": "tried", "namespace": namespace},
        "spec": {**made["spec"], "nodeName": "node-1", "serviceAccountName": "default"},
    }


@pytest.mark.parametrize("enforced", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_pod_security_admits_what_the_documentation_says(cluster: Cluster, name: str, enforced: str) -> None:
    namespace = cluster.namespace(f"security-{enforced}", enforce=enforced)
    for daemonset in of_kind(render(CASES[name]), "DaemonSet"):
        pod = template(daemonset, namespace)
        if pod["spec"].get("priorityClassName"):
            quota = only(render({"priorityClassQuota": {"enabled": True}}), "ResourceQuota")
            cluster.create({**quota, "metadata": {"name": "critical", "namespace": namespace}})
        answer = cluster.create(pod, dry_run=True)
        admitted = LEVELS.index(enforced) <= LEVELS.index(level(pod["spec"]))
        assert (answer.status_code == 201) is admitted, answer.text
        if not admitted:
            assert f'violates PodSecurity "{enforced}:latest"' in answer.json()["message"]


# --- rights -----------------------------------------------------------------------------------------------------------

RESOURCES: Final = (  # that a thief of the token would try
    *("pods", "secrets", "configmaps", "events", "services", "serviceaccounts", "nodes", "namespaces"),
    *("daemonsets.apps", "roles.rbac.authorization.k8s.io", "clusterroles.rbac.authorization.k8s.io"),
)
VERBS: Final = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")


def objects_of(values: Json, namespace: str) -> list[Json]:
    """Account and rights of the chart, installed in a namespace."""
    return [
        item
        for item in render(values, namespace=namespace)
        if item["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    ]


@pytest.mark.parametrize("name", ["default", "namespaced-values", "minimal-values"])
def test_the_token_may_read_what_the_sources_ask_for_and_nothing_else(cluster: Cluster, name: str) -> None:
    own, engines, other = cluster.namespace(f"rights-{name}"), cluster.namespace("inference"), cluster.namespace("bank")
    documents = objects_of(CASES[name], own)
    status, said = applied(cluster, documents)
    assert status == 0, said
    token = cluster.token(own, only(documents, "ServiceAccount")["metadata"]["name"])
    rights = granted(documents)
    found = set()
    for resource in RESOURCES:
        for verb in VERBS:
            for namespace in (own, engines, other):
                if cluster.may(token, verb, resource, namespace):
                    found.add((namespace, resource, verb))
    expected = {
        (namespace, resource, verb)
        for where, resource, verb in rights
        for namespace in ((own, engines, other) if not where else (where,))
    }
    assert found == expected
