"""The pods of the DaemonSets: what they may do, what they see of the node, and that the exporter takes
their settings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import yaml

from kvpressure.settings import settings
from kvpressure.settings.settings import Settings
from tests.deploy.chart import CI_VALUES, DEPLOY, Json, of_kind, only, render

pytestmark = pytest.mark.slow

HOST_SOURCES: Final = {
    "podresources": {"/host/pod-resources"},
    "procfs": {"/host/proc"},
    "cgroup": {"/host/cgroup"},
    "logs": {"/var/log/pods"},
}
BOTH: Final[Json] = {"amd": {"enabled": True}}
CASES: Final = {**CI_VALUES, "both": BOTH}


def pods(values: Json | None = None) -> list[Json]:
    return [item["spec"]["template"]["spec"] for item in of_kind(render(values), "DaemonSet")]


def container_of(pod: Json) -> Json:
    container: Json
    (container,) = pod["containers"]
    return container


def host_paths(pod: Json) -> dict[str, str]:
    """Mount path -> path on the node."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {
        mount["mountPath"]: volumes[mount["name"]]["hostPath"]["path"]
        for mount in container_of(pod)["volumeMounts"]
        if "hostPath" in volumes[mount["name"]]
    }


def load(documents: list[Json], vendor: str, directory: Path) -> Settings:
    """The settings that the exporter of ``vendor`` gets, read as it reads them; files of the pod lie in
    ``directory``.
    """
    data = next(
        item["data"] for item in of_kind(documents, "ConfigMap") if item["metadata"]["name"] == f"kvpressure-{vendor}"
    )
    for name, text in data.items():
        for mounted in ("/etc/kvpressure/", "/etc/kvpressure-web/"):
            text = text.replace(mounted, f"{directory}/")
        (directory / name).write_text(text)
    (directory / "web-config.yaml").touch()
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    with patch.dict("os.environ", NODE_NAME="node-1"):
        return settings.from_args(parser.parse_args(["--config", str(directory / "config.yaml")]))


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_the_security_profile(values: Json) -> None:
    uid = values.get("runAsUser", 0)
    for pod in pods(values):
        # An explicit false is dropped by the API server, and GitOps would show that as a difference for ever.
        assert pod.keys().isdisjoint({"hostNetwork", "hostPID", "hostIPC"})
        assert pod["enableServiceLinks"] is False
        selinux = {"seLinuxOptions": values["seLinuxOptions"]} if "seLinuxOptions" in values else {}
        assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, **selinux}
        assert "initContainers" not in pod
        container = container_of(pod)
        limits = {"privileged": False, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        asked = {"privileged": True} if values.get("nvidia", {}).get("privileged") else limits
        assert container["securityContext"] == {
            "runAsUser": uid,
            "runAsGroup": uid,
            "runAsNonRoot": uid != 0,
            "readOnlyRootFilesystem": True,
            **asked,
        }
        assert container["resources"]["limits"]["memory"]
        assert not any("gpu" in resource for resource in container["resources"]["limits"])  # it would take a GPU
        writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"state"}
        (state,) = (volume for volume in pod["volumes"] if volume["name"] == "state")
        assert set(state["emptyDir"]) == {"sizeLimit"}
        kinds = {kind for volume in pod["volumes"] for kind in volume}
        assert kinds <= {"name", "emptyDir", "configMap", "secret", "hostPath"}


def test_each_source_brings_its_mount_and_nothing_else() -> None:
    everything = set().union(*HOST_SOURCES.values())
    assert set(host_paths(pods({"sources": {"procfs": True}})[0])) == everything
    for source, mounts in HOST_SOURCES.items():
        assert set(host_paths(pods({"sources": {"procfs": True, source: False}})[0])) == everything - mounts
    assert host_paths(pods(CASES["minimal-values"])[0]) == {}


NODE_PROCFS_ALONE: Final = {
    "sources": {"podresources": False, "cgroup": False, "logs": False},
    "openshift": {"enabled": True},
}


@pytest.mark.parametrize(
    ("values", "mounted"),
    [
        ({}, {"nvidia": False}),
        (BOTH, {"nvidia": False, "amd": True}),
        (BOTH | {"hostPID": True}, {"nvidia": True, "amd": True}),
        (BOTH | {"sources": {"procfs": True}}, {"nvidia": True, "amd": True}),
        (BOTH | {"sources": {"procfs": False}, "hostPID": True}, {"nvidia": False, "amd": False}),
        (BOTH | {"sources": {"pods": False, "cgroup": False, "logs": False}}, {"nvidia": False, "amd": False}),
        (NODE_PROCFS_ALONE, {"nvidia": False}),
        (NODE_PROCFS_ALONE | {"hostPID": True}, {"nvidia": True}),
        (NODE_PROCFS_ALONE | BOTH | {"nvidia": {"enabled": False}}, {"amd": True}),
        (NODE_PROCFS_ALONE | {"amd": {"enabled": False}}, {"nvidia": False}),
    ],
)
def test_the_hosts_proc_is_mounted_where_drivers_list_its_processes_and_nowhere_else(
    values: Json, mounted: dict[str, bool], tmp_path: Path
) -> None:
    """It shows every command line of the node, and tells nothing of processes that no driver names."""
    documents = render(values)
    found, read = {}, {}
    for daemonset in of_kind(documents, "DaemonSet"):
        vendor = daemonset["metadata"]["labels"]["app.kubernetes.io/component"]
        found[vendor] = "/proc" in host_paths(daemonset["spec"]["template"]["spec"]).values()
        read[vendor] = load(documents, vendor, tmp_path).collectors["procfs"].enabled
    assert found == read == mounted
    for constraints in of_kind(documents, "SecurityContextConstraints"):
        assert constraints["allowHostDirVolumePlugin"] is any(mounted.values())


def test_a_source_is_told_where_its_mount_is(tmp_path: Path) -> None:
    """What the settings name lies in a mount; what is mounted is named."""
    paths = {"kubelet": "/opt/kubelet", "proc": "/p", "cgroup": "/c", "podLogs": "/l"}
    documents = render({"host": paths, "sources": {"procfs": True}})
    chosen = load(documents, "nvidia", tmp_path)
    named = {
        str(chosen.kubelet_socket.parent),
        str(chosen.host_proc),
        str(chosen.host_cgroup),
        str(chosen.host_pod_logs),
    }
    assert host_paths(only(documents, "DaemonSet")["spec"]["template"]["spec"]) == dict(
        zip(
            ("/host/pod-resources", "/host/proc", "/host/cgroup", "/var/log/pods"),
            ("/opt/kubelet/pod-resources", "/p", "/c", "/l"),
            strict=True,
        )
    )
    assert named == set().union(*HOST_SOURCES.values())


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_the_exporter_takes_the_settings(values: Json, tmp_path: Path) -> None:
    documents = render(values)
    sources = yaml.safe_load((DEPLOY / "helm/kvpressure/values.yaml").read_text())["sources"] | values.get(
        "sources", {}
    )
    for daemonset in of_kind(documents, "DaemonSet"):
        vendor = daemonset["metadata"]["labels"]["app.kubernetes.io/component"]
        chosen = load(documents, vendor, tmp_path)
        enabled = {name for name, collector in chosen.collectors.items() if collector.enabled}
        wanted = sources | {"procfs": vendor == "amd" and sources["procfs"] == "auto"}
        assert enabled == {vendor, "engines"} | {name for name, on in wanted.items() if on}
        (port,) = container_of(daemonset["spec"]["template"]["spec"])["ports"]
        assert [address.port for address in chosen.listen_addresses] == [port["containerPort"]]
        assert chosen.node_name == "node-1"
        assert chosen.kube_namespaces == tuple(values.get("namespaces", ()))
        overridden = {entry.name: entry.value for entry in chosen.thresholds.entries() if entry.overridden}
        assert overridden == values.get("thresholds", {})


def test_what_is_written_goes_to_the_scratch_directory(tmp_path: Path) -> None:
    documents = render({"recording": {"enabled": True, "maxSizeMiB": 10, "keep": 3}})
    chosen = load(documents, "nvidia", tmp_path)
    pod = only(documents, "DaemonSet")["spec"]["template"]["spec"]
    (state,) = (mount["mountPath"] for mount in container_of(pod)["volumeMounts"] if mount["name"] == "state")
    assert chosen.record_directory is not None
    assert str(chosen.record_directory.parent) == state
    assert {"name": "TMPDIR", "value": state} in container_of(pod)["env"]
    assert (chosen.record_max_bytes, chosen.record_keep) == (10 * 2**20, 3)
    (limit,) = (volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "state")
    assert limit == "56Mi"  # three files that are kept, one being written, 16 for the rest


def test_settings_of_one_vendor_do_not_stop_the_other(tmp_path: Path) -> None:
    documents = render(BOTH | {"config": {"nvidia.gpm": True, "log.format": "json"}})
    nvidia, amd = load(documents, "nvidia", tmp_path), load(documents, "amd", tmp_path)
    assert (nvidia.nvidia_gpm, nvidia.log_format) == (True, "json")
    assert (amd.nvidia_gpm, amd.log_format) == (False, "json")


def test_gkes_nodes_lend_their_library_to_the_privileged_exporter_of_nvidia_alone() -> None:
    """No RuntimeClass is named, so that admission takes the pod; the driver is found where GKE has it."""
    nvidia, amd = pods(BOTH | CASES["gke-values"])
    assert "runtimeClassName" not in nvidia
    (mount,) = (path for path, source in host_paths(nvidia).items() if source == "/home/kubernetes/bin/nvidia")
    assert {item["name"]: item.get("value") for item in container_of(nvidia)["env"]}[
        "LD_LIBRARY_PATH"
    ] == f"{mount}/lib64"
    assert [container_of(pod)["securityContext"]["privileged"] for pod in (nvidia, amd)] == [True, False]
    assert [path for path in host_paths(amd).values() if "nvidia" in path] == []


def test_each_vendor_gets_its_own_pods() -> None:
    first, second = of_kind(render(BOTH), "DaemonSet")
    for daemonset in (first, second):
        labels = daemonset["spec"]["template"]["metadata"]["labels"]
        assert daemonset["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert (
        not second["spec"]["selector"]["matchLabels"].items() <= first["spec"]["template"]["metadata"]["labels"].items()
    )


def test_nvidia_asks_the_runtime_for_the_library_and_amd_for_nothing() -> None:
    amd, nvidia = sorted(pods(BOTH), key=lambda pod: "runtimeClassName" in pod)
    env = [{item["name"]: item.get("value") for item in container_of(pod)["env"]} for pod in (nvidia, amd)]
    assert nvidia["runtimeClassName"] == "nvidia"
    assert (env[0]["NVIDIA_VISIBLE_DEVICES"], env[0]["NVIDIA_DRIVER_CAPABILITIES"]) == ("all", "utility")
    assert env[1]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "/dev" not in str(amd["volumes"])


def test_changed_settings_start_new_pods() -> None:
    def digest(values: Json) -> str:
        return str(
            only(render(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"][
                "kvpressure.io/config-digest"
            ]
        )

    assert digest({}) == digest({"image": {"tag": "2"}})
    assert (
        len({digest({}), digest({"thresholds": {"kv_full_ratio": 0.9}}), digest({"config": {"interval": "2s"}})}) == 3
    )


@pytest.mark.parametrize(
    ("values", "asked"),
    [({"webConfigSecret": "web"}, "health"), ({"listenAddress": "127.0.0.1"}, "health"), ({}, "metrics")],
)
def test_where_the_kubelet_cannot_ask_the_metrics_port_it_asks_another(
    values: Json, asked: str, tmp_path: Path
) -> None:
    """It has neither password nor certificate; a check of the open port would never restart a stuck loop."""
    documents = render(values)
    container = container_of(only(documents, "DaemonSet")["spec"]["template"]["spec"])
    for probe, path in (("livenessProbe", "/-/healthy"), ("readinessProbe", "/-/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": asked}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    chosen = load(documents, "nvidia", tmp_path)
    assert [address.port for address in chosen.health_addresses] == [ports[asked]] * (asked == "health")
    assert [address.port for address in chosen.listen_addresses] == [ports["metrics"]]
    assert [address.host for address in chosen.listen_addresses] == [values.get("listenAddress", "")]


def test_the_web_configuration_is_mounted_where_the_setting_says() -> None:
    (pod,) = pods({"webConfigSecret": "web"})
    (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret == {"secretName": "web", "defaultMode": 0o400}
    config: Any = yaml.safe_load(
        next(item for item in of_kind(render({"webConfigSecret": "web"}), "ConfigMap"))["data"]["config.yaml"]
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(pod)["volumeMounts"]}
    assert config["web.config.file"] == f"{mounts['web-config']}/web-config.yaml"


def test_what_belongs_to_all_and_to_one_vendor_comes_together() -> None:
    nvidia, amd = pods(
        BOTH
        | {
            "extraEnv": [{"name": "A", "value": "all"}],
            "nvidia": {"extraEnv": [{"name": "B", "value": "one"}], "resources": {"limits": {"memory": "1Gi"}}},
        }
    )
    names = [{item["name"] for item in container_of(pod)["env"]} & {"A", "B"} for pod in (nvidia, amd)]
    assert names == [{"A", "B"}, {"A"}]
    assert [container_of(pod)["resources"]["limits"]["memory"] for pod in (nvidia, amd)] == ["1Gi", "192Mi"]
    assert container_of(nvidia)["resources"]["requests"] == container_of(amd)["resources"]["requests"]


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({}, "r/kvpressure:0.1.0"),
        ({"image": {"registry": "one.internal:5000"}}, "one.internal:5000/r/kvpressure:0.1.0"),
        (
            {"image": {"registry": "one.internal"}, "global": {"imageRegistry": "two.internal"}},
            "two.internal/r/kvpressure:0.1.0",
        ),
        ({"image": {"digest": "sha256:" + "0" * 64, "tag": "x"}}, "r/kvpressure@sha256:" + "0" * 64),
    ],
)
def test_the_image_is_named_after_registry_repository_and_digest(values: Json, image: str) -> None:
    (pod,) = pods(values | {"image": {"repository": "r/kvpressure", **values.get("image", {})}})
    assert container_of(pod)["image"] == image
