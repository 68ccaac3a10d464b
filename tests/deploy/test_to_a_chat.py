"""The pages that lead to a message in a chat: their files and commands, as they are printed, and what
kube-prometheus-stack, as it comes, makes of their objects.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import Json, of_kind, only, problems, render
from tests.helpers.prometheus import accepted

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
# What the stack takes by default: monitors and rules of its own release, by the documentation's name, and dashboards
SELECTED = {"release": "kube-prometheus-stack"}
DASHBOARD_LABEL = {"grafana_dashboard": "1"}


def quick_start() -> Json:
    """The values that the documented ``helm install`` sets."""
    command = next(
        block.replace("\\\n", " ")
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S)
        if "helm install kvpressure" in block
    )
    words = shlex.split(next(line for line in command.splitlines() if line.startswith("helm install")))
    values: Json = {}
    for flag, given in pairwise(words):
        if flag == "--set":
            path, _, text = given.partition("=")
            *parents, name = path.split(".")
            place = values
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = yaml.safe_load(text)
    return values


def selected(documents: list[Json], labels: dict[str, str]) -> list[bool]:
    """Of each object, whether it has these labels."""
    return [labels.items() <= document["metadata"].get("labels", {}).items() for document in documents]


def test_the_stack_selects_monitor_rules_and_dashboards_of_the_quick_start() -> None:
    documents = render(quick_start())
    monitors = [one for kind in ("PodMonitor", "ServiceMonitor") for one in of_kind(documents, kind)]
    rules = of_kind(documents, "PrometheusRule")
    dashboards = [one for one in of_kind(documents, "ConfigMap") if any(".json" in name for name in one["data"])]
    assert monitors, "nothing is scraped"
    assert rules, "there is no alert"
    assert dashboards, "there is no dashboard"
    assert all(selected(monitors + rules, SELECTED))
    assert all(selected(dashboards, DASHBOARD_LABEL))
    assert not problems(documents, ("1.33",))


def block(language: str) -> str:
    """The page's first block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.S)
    assert found
    return found[1]


def test_the_printed_commands_make_files_that_prometheus_and_alertmanager_accept(tmp_path: Path) -> None:
    for name in ("deploy", "alerts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    etc = tmp_path / "etc"
    etc.mkdir()
    (tmp_path / "receivers.yml").write_text(block("yaml").replace("services/...", "services/T/B/X"))
    commands = [line.replace("/etc/prometheus/", f"{etc}/") for line in block("sh").splitlines() if "/etc/" in line]
    assert len(commands) == 3
    subprocess.run(["sh", "-euc", "\n".join(commands)], cwd=tmp_path, check=True, timeout=20)
    assert "SUCCESS" in accepted("promtool", "check", "config", f"{etc}/prometheus.yml")
    configuration = f"--config.file={etc}/alertmanager.yml"
    assert "SUCCESS" in accepted("amtool", "check-config", f"{etc}/alertmanager.yml")
    assert (
        accepted("amtool", "config", "routes", "test", configuration, "alertname=Try", "severity=warning") == "tickets"
    )


def test_the_stack_takes_the_printed_receivers() -> None:
    values = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[1])
    documents = render({**quick_start(), **values})
    receivers = {one["name"]: one for one in only(documents, "AlertmanagerConfig")["spec"]["receivers"]}
    assert receivers["tickets"]["slackConfigs"][0]["apiURL"] == {"name": "slack", "key": "url"}
    assert not problems(documents, ("1.33",))


def test_the_stack_selects_what_the_page_without_the_exporter_applies() -> None:
    page = (ROOT / "docs/vllm-only.md").read_text(encoding="utf-8")
    monitor = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.S)[0])
    rules = yaml.safe_load((ROOT / "alerts/kvpressure-vllm-only-prometheusrule.yaml").read_text(encoding="utf-8"))
    assert all(selected([monitor, rules], SELECTED))
    assert not problems([monitor, rules], ("1.33",))
