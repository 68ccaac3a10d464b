"""The installation command of the documentation: what kube-prometheus-stack, as it comes, makes of its objects."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import Json, of_kind, problems, render

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploy.md"
# What the stack takes by default: monitors and rules of its own release, by the documentation's name, and dashboards
SELECTED = {"release": "kube-prometheus-stack"}
DASHBOARD_LABEL = {"grafana_dashboard": "1"}


def quick_start() -> Json:
    """The values that the documented ``helm install`` sets."""
    command = next(
        block.replace("\\\n", " ")
        for block in re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.S)
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


@pytest.mark.slow
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
