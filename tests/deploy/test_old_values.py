"""Chart values of the first release candidate still render."""

from __future__ import annotations

import yaml

from tests.deploy.chart import render
from tests.helpers.plugin import ROOT


def test_old_values_render() -> None:
    values = yaml.safe_load((ROOT / "tests/fixtures/old-release/chart-values.yaml").read_text())
    values.pop("rules")  # what they change is in the values file of `kvpressure bundle` now
    objects = render(values)
    assert {"DaemonSet", "ConfigMap", "PodMonitor"} <= {item["kind"] for item in objects}
    [settings] = [
        yaml.safe_load(item["data"]["config.yaml"]) for item in objects if "config.yaml" in item.get("data", {})
    ]
    assert (settings["interval"], settings["engine.target"]) == ("2s", ["http://10.0.0.5:8000"])
