"""Who lets the pods in: OpenShift's SecurityContextConstraints, Pod Security's levels, taints, labels, quotas."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from tests.deploy.chart import CI_VALUES, Json, helm_test_objects, of_kind, only, render
from tests.deploy.test_daemonset import container_of, pods

pytestmark = pytest.mark.slow


# --- OpenShift


@pytest.mark.parametrize("values", [*CI_VALUES.values(), {"hostPID": True}], ids=[*CI_VALUES.keys(), "hostPID"])
def test_openshifts_constraints_admit_what_the_pods_are_and_nothing_more(values: Json) -> None:
    """By the fields of its definition in openshift/api; kubectl apply drops those that are null."""
    values = values | {"openshift": {"enabled": True}}
    scc = only(render(values), "SecurityContextConstraints")
    specs = pods(values)
    contexts = [container_of(pod)["securityContext"] for pod in specs]
    privileged = any(context.get("privileged") for context in contexts)
    volumes = {kind for pod in specs for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
    assert (scc["runAsUser"], scc["seccompProfiles"]) == (
        {"type": "MustRunAs", "uid": values.get("runAsUser", 0)},
        ["runtime/default"],
    )
    assert volumes <= set(scc["volumes"]) <= {"configMap", "emptyDir", "projected", "secret"} | volumes
    assert scc["allowHostDirVolumePlugin"] is ("hostPath" in volumes)
    assert scc["allowPrivilegedContainer"] is scc["allowPrivilegeEscalation"] is privileged
    assert scc["requiredDropCapabilities"] == ([] if privileged else ["ALL"])
    assert scc["allowedCapabilities"] == scc["defaultAddCapabilities"] == []
    assert scc["readOnlyRootFilesystem"] is True
    assert (scc["seLinuxContext"]["type"] == "RunAsAny") is ("seLinuxOptions" in values)
    assert [pod.get("hostPID", False) for pod in specs] == [scc["allowHostPID"]] * len(specs)
    assert scc["allowHostPID"] is values.get("hostPID", False), "NVIDIA's drivers name no process without it"
    assert not any(scc[f"allowHost{what}"] for what in ("IPC", "Network", "Ports"))


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
    found = {name: {level(pod) for pod in pods(values)} for name, values in CI_VALUES.items()}
    assert found.pop("minimal-values") == {"baseline"}  # uid 0 is what restricted refuses
    assert set().union(*found.values()) == {"privileged"}
    assert {level(pod) for pod in pods(CI_VALUES["minimal-values"] | {"runAsUser": 65532})} == {"restricted"}


def test_autopilot_gets_no_right_and_no_directory_of_the_node_but_its_logs() -> None:
    for pod in pods(CI_VALUES["gke-autopilot-values"]):
        paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
        assert paths == {"/var/log/pods"}
        assert not any(one["securityContext"].get("privileged") for one in pod["containers"])
        assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_pod_of_helm_test_is_restricted_and_has_no_token() -> None:
    (pod,) = (item["spec"] | {"volumes": []} for item in helm_test_objects())
    assert level(pod) == "baseline" if pod["securityContext"].get("runAsUser") == 0 else "restricted"
    assert pod["automountServiceAccountToken"] is False


# --- nodes

NVIDIA_NODES: Final[dict[str, tuple[str, str, list[str]]]] = {
    "GPU operator": ("default", "nvidia.com/gpu.present=true", ["nvidia.com/gpu=:NoSchedule"]),
    "GKE": (
        "gke-values",
        "cloud.google.com/gke-accelerator=nvidia-h100-80gb",
        ["nvidia.com/gpu=present:NoSchedule"],
    ),
    "AKS": (
        "aks-values",
        "kubernetes.azure.com/accelerator=nvidia",
        ["sku=gpu:NoSchedule", "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"],
    ),
    "EKS with Karpenter": (
        "eks-karpenter-values",
        "karpenter.k8s.aws/instance-gpu-manufacturer=nvidia",
        ["nvidia.com/gpu=true:NoSchedule", "team=inference:NoExecute"],
    ),
    "EKS Auto Mode": (
        "eks-auto-mode-values",
        "eks.amazonaws.com/instance-gpu-manufacturer=nvidia",
        ["anything=:NoSchedule"],
    ),
    "OKE": ("oke-values", "node.kubernetes.io/instance-type=BM.GPU.H100.8", ["nvidia.com/gpu=:NoSchedule"]),
    "CoreWeave": ("coreweave-values", "gpu.nvidia.com/class=H100_NVLINK_80GB", ["is_gpu=true:PreferNoSchedule"]),
    "OpenShift": (
        "openshift-values",
        "feature.node.kubernetes.io/pci-10de.present=true",
        ["nvidia.com/gpu=true:NoSchedule"],
    ),
}
"""Platform -> values, and the usual label and taints of its GPU nodes (tests/fixtures/pods/README.md), as kubectl
writes them.
"""


def labelled(text: str) -> dict[str, str]:
    return {"kubernetes.io/os": "linux"} | dict([text.split("=")] if text else [])


def matches(expression: Json, labels: dict[str, str]) -> bool:
    value = labels.get(expression["key"])
    return value is not None if expression["operator"] == "Exists" else value in expression["values"]


def selected(pod: Json, labels: dict[str, str]) -> bool:
    required: Any = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return pod["nodeSelector"].items() <= labels.items() and any(
        all(matches(one, labels) for one in term["matchExpressions"]) for term in required["nodeSelectorTerms"]
    )


def tolerated(pod: Json, taint: str) -> bool:
    """Whether one of the pod's tolerations covers the taint, by Kubernetes' rules."""
    key, value, effect = re.split("[=:]", taint)
    return any(
        one.get("key") in (None, key)
        and (one.get("operator") == "Exists" or one.get("value", "") == value)
        and one.get("effect") in (None, effect)
        for one in pod.get("tolerations", ())
    )


@pytest.mark.parametrize(("values", "label", "taints"), NVIDIA_NODES.values(), ids=NVIDIA_NODES.keys())
def test_a_platforms_gpu_nodes_get_a_pod(values: str, label: str, taints: list[str]) -> None:
    (pod,) = pods(CI_VALUES[values])
    assert selected(pod, labelled(label))
    assert [taint for taint in taints if not tolerated(pod, taint)] == []


@pytest.mark.parametrize(
    "label",
    [
        "",
        "node.kubernetes.io/instance-type=m5.large",
        "karpenter.k8s.aws/instance-gpu-manufacturer=amd",
        "kubernetes.azure.com/accelerator=amd",
    ],
)
@pytest.mark.parametrize("values", sorted({case for case, *_ in NVIDIA_NODES.values()}))
def test_other_nodes_get_none(values: str, label: str) -> None:
    assert not selected(pods(CI_VALUES[values])[0], labelled(label))


def test_a_windows_node_with_gpus_gets_none() -> None:
    label = "kubernetes.azure.com/accelerator=nvidia"
    for own in ({}, {"pool": "gpu"}):
        (pod,) = pods({"nvidia": {"tolerateAll": True, "nodeSelector": own}})
        assert selected(pod, labelled(label) | own)
        assert not selected(pod, labelled(label) | own | {"kubernetes.io/os": "windows"})


def test_a_taint_of_ones_own_is_tolerated_only_with_the_switch() -> None:
    taint = "dedicated=inference:NoExecute"
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
