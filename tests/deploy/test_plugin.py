"""The plugin's directory: the chart and the plain manifests mount it, and the exporter finds the reports there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.settings import settings
from kvpressure.settings.settings import Settings
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.plugin_reports import PluginSource
from tests.deploy.chart import DEPLOY, Json, of_kind, only, problems, render
from tests.deploy.test_daemonset import container_of, load
from tests.deploy.test_manifests import kustomize

pytestmark = pytest.mark.slow

VOLUMES = {
    "hostPath": ("/run/kvpressure", "DirectoryOrCreate", None),
    "emptyDir": ("/var/lib/kubelet/pods", "Directory", "HostToContainer"),
}
PLACES = {"hostPath": "inference_vllm-0", "emptyDir": "uid-1/volumes/kubernetes.io~empty-dir/kvpressure"}
DOCUMENT = DEPLOY.parent / "docs/plugin.md"


def mount_of(pod: Json) -> tuple[Json, Json]:
    """The plugin's mount and its volume."""
    (mount,) = (item for item in container_of(pod)["volumeMounts"] if item["name"] == "plugin")
    (volume,) = (item for item in pod["volumes"] if item["name"] == "plugin")
    return mount, volume


def report(directory: Path) -> None:
    directory.mkdir(parents=True)
    now = time.time()
    (directory / "worker-7.json").write_text(
        json.dumps(
            {
                "kvpressure": 1,
                "kind": "worker",
                "pid": 7,
                "started": now - 9,
                "written": now,
                "namespace": "else",
                "pod": "where",
                "rank": 0,
                "allocated_bytes": 10,
                "reserved_bytes": 30,
            }
        )
    )


def seen(chosen: Settings, directory: Path) -> list[tuple[str, str, int | None]]:
    """What the exporter reads with these settings from ``directory``, on a node with the pod ``vllm-0``."""
    chosen = dataclasses.replace(chosen, plugin_directory=directory)
    chosen.shared.pods = (Pod("inference", "vllm-0", "uid-1"),)
    return [(found.namespace, found.pod, found.reserved_bytes) for found in PluginSource(chosen).read().allocator]


@pytest.mark.parametrize("volume", VOLUMES)
class TestBothWays:
    def test_the_mount_shows_the_nodes_directory_read_only(self, volume: str) -> None:
        path, kind, propagation = VOLUMES[volume]
        documents = render({"plugin": {"volume": volume}})
        mount, mounted = mount_of(only(documents, "DaemonSet")["spec"]["template"]["spec"])
        assert (mount["readOnly"], mount.get("mountPropagation"), mounted["hostPath"]) == (
            True,
            propagation,
            {"path": path, "type": kind},
        )
        assert problems(documents) == []

    def test_the_exporter_finds_the_reports_where_the_mount_is(self, volume: str, tmp_path: Path) -> None:
        documents = render({"plugin": {"volume": volume}})
        mount, _ = mount_of(only(documents, "DaemonSet")["spec"]["template"]["spec"])
        chosen = load(documents, "nvidia", tmp_path)
        assert chosen.collectors["plugin"].enabled
        assert str(chosen.plugin_directory) == mount["mountPath"]
        report(tmp_path / "node" / PLACES[volume])
        assert seen(chosen, tmp_path / "node") == [("inference", "vllm-0", 30)]

    def test_plain_manifests_take_it_as_a_component(self, volume: str, tmp_path: Path) -> None:
        """The overlay of docs/deploy.md, built by kustomize; environment variables win over the ConfigMap's
        settings.
        """
        component = f"plugin-{volume.lower()}"
        for name in ("nvidia", "amd", component):
            shutil.copytree(DEPLOY / "manifests" / name, tmp_path / name)
        for vendor in ("nvidia", "amd"):
            (tmp_path / "kustomization.yaml").write_text(f"resources: [{vendor}]\ncomponents: [{component}]\n")
            documents = kustomize(tmp_path)
            pod = only(documents, "DaemonSet")["spec"]["template"]["spec"]
            assert mount_of(pod) == mount_of(
                only(render({"plugin": {"volume": volume}}), "DaemonSet")["spec"]["template"]["spec"]
            )
            assert problems(documents) == []
            (tmp_path / "config.yaml").write_text(only(documents, "ConfigMap")["data"]["config.yaml"])
            env = {item["name"]: item["value"] for item in container_of(pod)["env"] if "value" in item}
            parser = argparse.ArgumentParser()
            settings.add_arguments(parser)
            chosen = settings.from_args(
                parser.parse_args(["--config", str(tmp_path / "config.yaml")]), env | {"NODE_NAME": "n"}
            )
            assert chosen.collectors["plugin"].enabled
            assert str(chosen.plugin_directory) == mount_of(pod)[0]["mountPath"]


def test_without_it_nothing_of_it_is_there() -> None:
    documents = render()
    assert "plugin" not in str(only(documents, "DaemonSet")) + str(only(documents, "ConfigMap")["data"])


def test_another_directory_of_the_node() -> None:
    documents = render({"plugin": {"volume": "hostPath", "hostPath": "/mnt/reports"}})
    assert mount_of(only(documents, "DaemonSet")["spec"]["template"]["spec"])[1]["hostPath"]["path"] == "/mnt/reports"
    other = render({"plugin": {"volume": "emptyDir"}, "host": {"kubelet": "/opt/kubelet"}})
    assert mount_of(only(other, "DaemonSet")["spec"]["template"]["spec"])[1]["hostPath"]["path"] == "/opt/kubelet/pods"
    assert of_kind(documents, "DaemonSet")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"runAsUser": 1000, "sources": {"podresources": False, "logs": False}},
            "runAsUser 1000 cannot read the pods' volumes",
        ),
        (
            {"sources": {"pods": False, "procfs": False, "cgroup": False, "logs": False}},
            "needs to know this node's pods",
        ),
    ],
    ids=["not root", "pods not known"],
)
def test_volumes_of_pods_need_root_and_their_names(values: Json, line: str) -> None:
    with pytest.raises(Exception, match=line):
        render(values | {"plugin": {"volume": "emptyDir"}})
    render(values | {"plugin": {"volume": "hostPath"}})


def test_the_pods_of_the_document_write_where_the_exporter_looks() -> None:
    """Every server of docs/plugin.md reports into a mount of its own, and its volume is what the chart's
    value names.
    """
    text = DOCUMENT.read_text()
    blocks: list[Any] = [yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml\n")[1:]]
    servers = [
        block for block in blocks if any(item["name"] == "KVPRESSURE_PLUGIN_DIR" for item in block.get("env", ()))
    ]
    for server, volume in zip(servers, ("hostPath", "emptyDir"), strict=True):
        (mount,), (mounted,) = server["volumeMounts"], server["volumes"]
        where = next(item["value"] for item in server["env"] if item["name"] == "KVPRESSURE_PLUGIN_DIR")
        assert (mount["mountPath"], mount["name"], mounted["name"]) == (where, "kvpressure", "kvpressure")
        assert volume in mounted
        assert f"plugin.volume={volume}" in text
    assert servers[0]["volumes"][0]["hostPath"]["path"] == VOLUMES["hostPath"][0]
