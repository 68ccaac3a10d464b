"""The page from a server to a chat: its files and its commands, as they are printed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.prometheus import accepted

pytestmark = pytest.mark.live

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
