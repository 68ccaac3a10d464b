"""Who lets the pods in: OpenShift's SecurityContextConstraints, Pod Security's levels, taints, labels, quotas."""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest
import yaml

from tests.deploy.chart import DEPLOY, Json, of_kind, only, render
from tests.deploy.test_daemonset import container_of, pods

pytestmark = pytest.mark.slow

CI: Final = DEPLOY / "helm" / "kvpressure" / "ci"
CASES: Final = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CI.glob("*.yaml"))} | {"default": {}}

SCC_REQUIRED: Final = {
    *("allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID", "allowHostPorts"),
    *("allowPrivilegedContainer", "allowedCapabilities", "defaultAddCapabilities", "priority"),
    *("readOnlyRootFilesystem", "requiredDropCapabilities", "volumes"),
}


# --- OpenShift: its admission, as far as these pods touch it (security.openshift.io/v1, SecurityContextConstraints)
# ------


def refused(pod: Json, scc: Json) -> set[str]:
    """Why the constraints would refuse the pod."""
    found = {
        name
        for name, asked, allowed in (
            ("host network", pod.get("hostNetwork"), scc["allowHostNetwork"]),
            ("host pid", pod.get("hostPID"), scc["allowHostPID"]),
            ("host ipc", pod.get("hostIPC"), scc["allowHostIPC"]),
        )
        if asked and not allowed
    }
    of_pod = pod.get("securityContext", {})
    if f"{of_pod.get('seccompProfile', {}).get('type', '')}" != "RuntimeDefault" or scc["seccompProfiles"] != [
        "runtime/default"
    ]:
        found.add("seccomp")
    if "seLinuxOptions" in of_pod and scc["seLinuxContext"]["type"] != "RunAsAny":
        found.add("selinux")
    for volume in pod["volumes"]:
        (kind,) = volume.keys() - {"name"}
        if kind not in scc["volumes"] or (kind == "hostPath" and not scc["allowHostDirVolumePlugin"]):
            found.add(f"volume {kind}")
    for container in pod["containers"]:
        asked = container["securityContext"]
        if asked.get("privileged") and not scc["allowPrivilegedContainer"]:
            found.add("privileged")
        if asked.get("allowPrivilegeEscalation", True) and not scc["allowPrivilegeEscalation"]:
            found.add("escalation")
        if scc["readOnlyRootFilesystem"] and not asked.get("readOnlyRootFilesystem"):
            found.add("writable root")
        if asked.get("runAsUser") != scc["runAsUser"]["uid"]:
            found.add("uid")
        if set(asked.get("capabilities", {}).get("add", ())) - set(scc["allowedCapabilities"] or ()):
            found.add("capabilities")
        if not set(scc["requiredDropCapabilities"] or ()) <= set(asked.get("capabilities", {}).get("drop", ())):
            found.add("capabilities not dropped")
        if any("hostPort" in port for port in container.get("ports", ())) and not scc["allowHostPorts"]:
            found.add("host port")
    return found


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_openshifts_constraints_admit_the_pods(values: Json) -> None:
    documents = render(values | {"openshift": {"enabled": True}})
    for pod in pods(values | {"openshift": {"enabled": True}}):
        assert refused(pod, only(documents, "SecurityContextConstraints")) == set()


@pytest.mark.parametrize(
    ("values", "more", "why"),
    [
        ({}, {"hostNetwork": True}, "host network"),
        ({}, {"hostPID": True}, "host pid"),
        ({}, {"volumes": [{"name": "a", "persistentVolumeClaim": {}}]}, "volume persistentVolumeClaim"),
        (CASES["minimal-values"], {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volume hostPath"),
        ({}, {"securityContext": {"privileged": True}}, "privileged"),
        ({}, {"securityContext": {"runAsUser": 1}}, "uid"),
        ({}, {"securityContext": {"readOnlyRootFilesystem": False}}, "writable root"),
        ({}, {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}}, "capabilities"),
        ({}, {"securityContext": {"capabilities": {}}}, "capabilities not dropped"),
    ],
)
def test_the_constraints_admit_nothing_more(values: Json, more: Json, why: str) -> None:
    scc = only(render(values | {"openshift": {"enabled": True}}), "SecurityContextConstraints")
    pod = copy.deepcopy(pods(values)[0])
    pod["containers"][0]["securityContext"] |= more.pop("securityContext", {})
    assert why in refused(pod | more, scc)


@pytest.mark.parametrize("values", [{}, CASES["gke-values"]], ids=["default", "privileged"])
def test_what_the_api_server_requires_of_constraints_is_set(values: Json) -> None:
    """The required fields of the definition in openshift/api; kubectl apply drops those that are null."""
    scc = only(render(values | {"openshift": {"enabled": True}}), "SecurityContextConstraints")
    required = {name for name in SCC_REQUIRED if scc.get(name) is None}
    assert required == set()


@pytest.mark.parametrize("existing", ["", "privileged"])
def test_only_this_releases_account_may_use_the_constraints(existing: str) -> None:
    documents = render({"openshift": {"enabled": True, "scc": existing}})
    made = of_kind(documents, "SecurityContextConstraints")
    assert [item["metadata"]["name"] for item in made] == ([] if existing else ["kvpressure-kvpressure"])
    assert all(item["users"] == item["groups"] == [] for item in made)
    role, binding = only(documents, "Role"), only(documents, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["security.openshift.io"],
            "resources": ["securitycontextconstraints"],
            "resourceNames": [existing or "kvpressure-kvpressure"],
            "verbs": ["use"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = only(documents, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]


# --- Pod Security
# ------------------------------------------------------------------------------------------------------


def level(pod: Json) -> str:
    """The strictest level of the Pod Security Standards that takes the pod, as far as its fields are set here."""
    contexts = [container["securityContext"] for container in pod["containers"]]
    if (
        any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        or any("hostPath" in volume for volume in pod["volumes"])
        or any(one.get("privileged") for one in contexts)
        or pod["securityContext"].get("seLinuxOptions", {}).get("type", "container_t")
        not in ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
    ):
        return "privileged"
    strict = all(
        one.get("allowPrivilegeEscalation") is False
        and one.get("runAsNonRoot")
        and one.get("runAsUser") != 0
        and one.get("capabilities", {}).get("drop") == ["ALL"]
        for one in contexts
    )
    return "restricted" if strict and pod["securityContext"]["seccompProfile"]["type"] != "Unconfined" else "baseline"


def test_the_levels_are_those_that_the_documentation_names() -> None:
    found = {name: {level(pod) for pod in pods(values)} for name, values in CASES.items()}
    assert found.pop("minimal-values") == {"baseline"}  # uid 0 is what restricted refuses
    assert set().union(*found.values()) == {"privileged"}
    assert {level(pod) for pod in pods(CASES["minimal-values"] | {"runAsUser": 65532})} == {"restricted"}


def test_the_pod_of_helm_test_is_restricted_and_has_no_token() -> None:
    from tests.deploy.chart import helm_test_objects

    (pod,) = (item["spec"] | {"volumes": []} for item in helm_test_objects())
    assert level(pod) == "baseline" if pod["securityContext"].get("runAsUser") == 0 else "restricted"
    assert pod["automountServiceAccountToken"] is False


# --- nodes
# -------------------------------------------------------------------------------------------------------------

NVIDIA_NODES: Final[dict[str, tuple[str, dict[str, str], list[Json]]]] = {
    "GPU operator": (
        "default",
        {"nvidia.com/gpu.present": "true"},
        [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    ),
    "GKE": (
        "gke-values",
        {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
        [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
    ),
    "AKS": (
        "aks-values",
        {"kubernetes.azure.com/accelerator": "nvidia"},
        [
            {"key": "sku", "value": "gpu", "effect": "NoSchedule"},
            {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"},
        ],
    ),
    "EKS with Karpenter": (
        "eks-karpenter-values",
        {"karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"},
        [
            {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},
            {"key": "team", "value": "inference", "effect": "NoExecute"},
        ],
    ),
    "EKS Auto Mode": (
        "eks-auto-mode-values",
        {"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia"},
        [{"key": "anything", "effect": "NoSchedule"}],
    ),
    "OKE": (
        "oke-values",
        {"node.kubernetes.io/instance-type": "BM.GPU.H100.8"},
        [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    ),
    "CoreWeave": (
        "coreweave-values",
        {"gpu.nvidia.com/class": "H100_NVLINK_80GB"},
        [{"key": "is_gpu", "value": "true", "effect": "PreferNoSchedule"}],
    ),
    "OpenShift": (
        "openshift-values",
        {"feature.node.kubernetes.io/pci-10de.present": "true"},
        [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
    ),
}
"""Platform -> values, and the usual labels and taints of its GPU nodes (tests/fixtures/pods/README.md)."""


def matches(expression: Json, labels: dict[str, str]) -> bool:
    """A node selector's requirement."""
    value = labels.get(expression["key"])
    return value is not None if expression["operator"] == "Exists" else value in expression["values"]


def selected(pod: Json, labels: dict[str, str]) -> bool:
    """Whether the pod may run on a node with these labels."""
    required: Any = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return any(all(matches(one, labels) for one in term["matchExpressions"]) for term in required["nodeSelectorTerms"])


def tolerated(pod: Json, taint: Json) -> bool:
    """Whether one of the pod's tolerations covers the taint, by Kubernetes' rules."""
    return any(
        one.get("key") in (None, taint["key"])
        and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
        and one.get("effect") in (None, taint["effect"])
        for one in pod.get("tolerations", ())
    )


@pytest.mark.parametrize(("values", "labels", "taints"), NVIDIA_NODES.values(), ids=NVIDIA_NODES.keys())
def test_a_platforms_gpu_nodes_get_a_pod(values: str, labels: dict[str, str], taints: list[Json]) -> None:
    (pod,) = pods(CASES[values])
    assert selected(pod, labels)
    assert [taint for taint in taints if not tolerated(pod, taint)] == []


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"kubernetes.io/os": "linux", "node.kubernetes.io/instance-type": "m5.large"},
        {"karpenter.k8s.aws/instance-gpu-manufacturer": "amd"},
        {"kubernetes.azure.com/accelerator": "amd"},
    ],
)
@pytest.mark.parametrize("values", sorted({case for case, *_ in NVIDIA_NODES.values()}))
def test_other_nodes_get_none(values: str, labels: dict[str, str]) -> None:
    assert not selected(pods(CASES[values])[0], labels)


def test_a_taint_of_ones_own_is_tolerated_only_with_the_switch() -> None:
    taint = {"key": "dedicated", "value": "inference", "effect": "NoExecute"}
    assert not tolerated(pods()[0], taint)
    nvidia, amd = pods({"amd": {"enabled": True}, "nvidia": {"tolerateAll": True}})
    assert (tolerated(nvidia, taint), tolerated(amd, taint)) == (True, False)


def test_the_pods_are_not_evicted_first_and_a_quota_admits_their_class() -> None:
    documents = render({"priorityClassQuota": {"enabled": True}})
    (pod,) = pods()
    (scope,) = only(documents, "ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    assert scope == {"scopeName": "PriorityClass", "operator": "In", "values": [pod["priorityClassName"]]}
    assert pod["priorityClassName"] == "system-node-critical"
    assert container_of(pod)["name"] == "kvpressure"


@pytest.mark.parametrize(
    ("number", "stored"), [(1, "1"), (1000, "1k"), (1500, "1500"), (20000, "20k"), (5_000_000, "5M")]
)
def test_the_quota_stands_as_the_server_writes_it(number: int, stored: str) -> None:
    documents = render({"priorityClassQuota": {"enabled": True, "pods": number}})
    assert only(documents, "ResourceQuota")["spec"]["hard"] == {"pods": stored}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_every_relabeling_has_the_action_that_the_server_would_write(kind: str) -> None:
    spec = only(render({"monitor": {"kind": kind, "cluster": "one"}}), kind)["spec"]
    (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert len(endpoint["relabelings"]) == 5
    assert all("action" in rule for rule in endpoint["relabelings"])
