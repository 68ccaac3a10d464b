"""The plain manifests: rendered from the chart, taken by kustomize, complete."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import DEPLOY, Json, generator, name_of, of_kind, only, problems

pytestmark = pytest.mark.live

MANIFESTS = DEPLOY / "manifests"
OTHER_OPERATORS = (
    "victoriametrics",
    "google-managed-prometheus",
    "grafana-operator",
)  # no schemas of theirs: test_elsewhere
VARIANTS = sorted({path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml")} - set(OTHER_OPERATORS))


def kustomize(folder: Path) -> list[Json]:
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


def test_what_is_generated_is_up_to_date() -> None:
    assert generator().check() == []


def test_a_manifest_that_nothing_generates_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing or differs is noticed as in the bundle (tests/bundle/test_render.py)."""
    monkeypatch.setattr(generator(), "HERE", tmp_path)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/old.yaml").touch()
    assert generator()._unknown({}) == ["manifests/old.yaml: not generated"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_builds_what_every_kubernetes_takes(variant: str) -> None:
    documents = kustomize(MANIFESTS / variant)
    assert problems(documents) == []
    assert all(item["metadata"].get("namespace", "kvpressure") == "kvpressure" for item in documents)
    assert "Helm" not in str([item["metadata"] for item in documents])


@pytest.mark.parametrize("variant", ["nvidia", "amd"])
def test_a_variant_is_complete(variant: str) -> None:
    documents = kustomize(MANIFESTS / variant)
    assert sorted(item["kind"] for item in documents) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "Namespace",
        "Service",
        "ServiceAccount",
    ]
    pod = only(documents, "DaemonSet")["spec"]["template"]["spec"]
    named = {f"ServiceAccount/{pod['serviceAccountName']}"} | {
        f"ConfigMap/{volume['configMap']['name']}" for volume in pod["volumes"] if "configMap" in volume
    }
    assert named <= {name_of(item) for item in documents}
    assert only(documents, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_an_overlay_sets_the_image(tmp_path: Path) -> None:
    """As docs/deploy.md shows it."""
    shutil.copytree(MANIFESTS / "nvidia", tmp_path / "nvidia")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [nvidia]\nimages:\n  - {name: kvpressure, newName: registry.internal/kvpressure, newTag: 1.2.3}\n"
    )
    daemonset = only(kustomize(tmp_path), "DaemonSet")
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.internal/kvpressure:1.2.3"


def test_both_vendors_can_be_applied_to_one_cluster() -> None:
    """They share the account, its rights and the Service, so that applying both changes nothing of either."""
    nvidia, amd = kustomize(MANIFESTS / "nvidia"), kustomize(MANIFESTS / "amd")
    for item in nvidia:
        twin = [other for other in amd if name_of(other) == name_of(item)]
        assert twin in ([], [item]), name_of(item)
    names = {only(documents, "DaemonSet")["metadata"]["name"] for documents in (nvidia, amd)}
    assert len(names) == 2
    assert len(of_kind(nvidia, "ConfigMap")) == len(of_kind(amd, "ConfigMap")) == 1
