"""Without the chart: systemd, Compose, other operators, GitOps."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from kvpressure.bundle.dashboards import DASHBOARDS
from kvpressure.settings import settings
from tests.deploy.chart import DEPLOY, ROOT, Json, chart, of_kind, only, problems, render
from tests.deploy.test_manifests import MANIFESTS, kustomize
from tests.helpers.prometheus import accepted

pytestmark = pytest.mark.live

COMPOSE: Final = DEPLOY / "compose"
UNIT: Final = DEPLOY / "systemd" / "kvpressure.service"


def settings_of(path: Path) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.from_args(parser.parse_args(["--config", str(path)]))


# --- systemd


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/kvpressure/bin/kvpressure", "/bin/true"))
    return path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: systemd)")
class TestUnit:
    def test_systemd_takes_every_line(self, unit: Path) -> None:
        checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")

    def test_what_it_could_do_is_little(self, unit: Path) -> None:
        """0 is nothing at all, 10 everything; a service without any of these lines has 9.6. The rest is
        what it is for.
        """
        checked = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=18", unit], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout[-200:]
        assert re.search(r"exposure level for kvpressure.service: 1\.\d", checked.stdout)


def test_the_units_settings_write_where_the_unit_lets_them() -> None:
    chosen = settings_of(DEPLOY / "systemd" / "config.yaml")
    assert str(chosen.record_directory).startswith("/var/lib/kvpressure/")
    assert "StateDirectory=kvpressure\n" in UNIT.read_text()
    assert chosen.collectors["processes"].enabled
    assert "PrivateUsers=yes" not in UNIT.read_text()  # else every user's sockets look alike


# --- Compose


def services() -> Json:
    found: Json = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def mounts() -> dict[str, dict[str, Path]]:
    """Service -> path in the container -> file or directory here."""
    return {
        name: {
            inside: (COMPOSE / outside).resolve()
            for outside, inside, *_ in (volume.split(":") for volume in service.get("volumes", ()))
            if outside.startswith(".")
        }
        for name, service in services().items()
    }


def test_the_compose_file_follows_the_specification() -> None:
    schema = json.loads((ROOT / "tests/fixtures/schemas/compose-spec.json").read_text())
    document = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(document)] == []
    document["services"]["exporter"]["cap_dropped"] = []
    assert list(validator.iter_errors(document))


def test_what_is_mounted_exists_and_is_read_only() -> None:
    assert all(path.exists() for found in mounts().values() for path in found.values())
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            assert volume.endswith(":ro") or not volume.startswith("."), (name, volume)
    named = {
        volume.split(":")[0]
        for service in services().values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    assert named == set(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"])


def test_promtool_takes_the_configuration_as_mounted(tmp_path: Path) -> None:
    for inside, path in mounts()["prometheus"].items():
        target = tmp_path / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace("/etc/prometheus/", f"{tmp_path}/etc/prometheus/"))
    config = tmp_path / "etc/prometheus/prometheus.yml"
    assert re.search(r"SUCCESS: \d{2,} rules found", accepted("promtool", "check", "config", config))


def test_amtool_takes_the_receiver() -> None:
    accepted("amtool", "check-config", mounts()["alertmanager"]["/etc/alertmanager/alertmanager.yml"])


def test_every_address_in_the_configuration_is_a_service_of_it() -> None:
    prometheus = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (alertmanager,) = prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    (exporter,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert alertmanager.split(":")[0] in services()
    assert services()["exporter"]["network_mode"] == "host"  # so that Prometheus asks the host
    assert exporter.split(":")[0] in services()["prometheus"]["extra_hosts"][0]
    chosen = settings_of(mounts()["exporter"]["/etc/kvpressure/config.yaml"])
    assert [address.port for address in chosen.listen_addresses] == [int(exporter.split(":")[1])]
    assert {name for name, one in chosen.collectors.items() if one.enabled} >= {"engines", "nvidia"}
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services()


# --- other operators


def monitor() -> Json:
    return only(render({"monitor": {"kind": "PodMonitor"}}), "PodMonitor")


def test_victoriametrics_gets_the_same_relabelings() -> None:
    (document,) = kustomize(MANIFESTS / "victoriametrics")
    assert document["apiVersion"] == "operator.victoriametrics.com/v1beta1"
    spec, plain = document["spec"], monitor()["spec"]
    (endpoint,), (expected,) = spec["podMetricsEndpoints"], plain["podMetricsEndpoints"]
    assert endpoint["relabelConfigs"] == expected["relabelings"]
    assert endpoint.keys() ^ expected.keys() == {"relabelConfigs", "relabelings"}
    assert (endpoint["honorLabels"], spec["selector"]) == (True, plain["selector"])


def test_victoriametrics_gets_the_same_rules() -> None:
    """By the command of docs/your-site.md."""
    command = re.search(r"`(sed '.*' prometheusrule.yaml) >vmrule", (ROOT / "docs/your-site.md").read_text())
    assert command
    made = subprocess.run(command[1], shell=True, cwd=ROOT / "alerts", capture_output=True, check=True).stdout
    rules = yaml.safe_load((ROOT / "alerts/prometheusrule.yaml").read_text())
    assert yaml.safe_load(made) == {**rules, "apiVersion": "operator.victoriametrics.com/v1beta1", "kind": "VMRule"}


def test_grafanas_operator_gets_each_dashboard_of_the_config_maps() -> None:
    maps = {(item["metadata"]["name"], key) for item in kustomize(MANIFESTS / "grafana") for key in item["data"]}
    found = {
        (item["spec"]["configMapRef"]["name"], item["spec"]["configMapRef"]["key"])
        for item in kustomize(MANIFESTS / "grafana-operator")
    }
    assert found == maps
    assert {key for _, key in found} == {f"{uid}.json" for uid in DASHBOARDS}


# --- GitOps


def test_the_chart_holds_no_links() -> None:
    """Flux leaves them out of what it takes from Git, and would install neither rules nor dashboards."""
    assert [path for path in (DEPLOY / "helm").rglob("*") if path.is_symlink()] == []


def gitops_values() -> dict[str, Any]:
    argo = yaml.safe_load((DEPLOY / "gitops/argocd-application.yaml").read_text())
    flux = list(yaml.safe_load_all((DEPLOY / "gitops/flux.yaml").read_text()))
    return {
        "argocd": argo["spec"]["source"]["helm"]["valuesObject"],
        "flux": next(item for item in flux if item["kind"] == "HelmRelease")["spec"]["values"],
    }


@pytest.mark.parametrize("tool", ["argocd", "flux"])
def test_the_values_of_a_gitops_example_render(tool: str) -> None:
    documents = render(gitops_values()[tool])
    assert problems(documents) == []
    assert of_kind(documents, "PodMonitor")
    assert of_kind(documents, "PrometheusRule")


def test_a_gitops_example_names_the_chart_and_its_version() -> None:
    argo = yaml.safe_load((DEPLOY / "gitops/argocd-application.yaml").read_text())
    repository, release = yaml.safe_load_all((DEPLOY / "gitops/flux.yaml").read_text())
    path = DEPLOY.parent / argo["spec"]["source"]["path"]
    assert (path / "Chart.yaml").exists()
    assert release["spec"]["chart"]["spec"]["chart"] == argo["spec"]["source"]["path"]
    version = f"v{chart().metadata['version']}"
    assert (argo["spec"]["source"]["targetRevision"], repository["spec"]["ref"]["tag"]) == (version, version)
