"""The pages that lead to a message in a chat: their files and commands, as they are printed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import only, problems, render
from tests.deploy.test_quick_start import SELECTED, quick_start, selected
from tests.helpers.prometheus import accepted

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/routing.md").read_text(encoding="utf-8")


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
