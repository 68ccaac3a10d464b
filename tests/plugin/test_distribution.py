"""The plugin as it is shipped: one small wheel without dependencies."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.plugin import PLUGIN, ROOT

pytestmark = pytest.mark.live

LARGEST_WHEEL = 30_000
AS_VLLM_LOADS = """
import os, json, sys
from importlib.metadata import distributions, entry_points
for group in ("vllm.general_plugins", "vllm.stat_logger_plugins"):
    for entry in entry_points(group=group):
        found = entry.load()
        print(group, entry.name, entry.dist.name, found.__name__)
        if group == "vllm.general_plugins":
            found()
        else:
            logger = found(None, 0)
            logger.record(None, None)
            logger.log_engine_initialized()
print("exporter" if any(d.name == "kvpressure" for d in distributions()) else "plugin only")
"""
STUB = """
class StatLoggerBase:
    pass
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git holds of the plugin's folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in PLUGIN.rglob("*"):
        if path.is_file() and not {"__pycache__", "build"} & set(path.parts) and ".egg-info" not in str(path):
            copy = source / path.relative_to(PLUGIN)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(target)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [built] = target.glob("*.whl")
    return built


class TestWheel:
    def test_it_is_small_pure_and_asks_for_nothing(self, wheel: Path) -> None:
        assert wheel.name == f"kvpressure_vllm-{version(PLUGIN)}-py3-none-any.whl"
        assert wheel.stat().st_size < LARGEST_WHEEL
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
        assert "Requires-Dist" not in metadata
        assert {name.split("/")[0].split("-")[0] for name in names} == {"kvpressure_vllm"}
        modules = {path.name for path in (PLUGIN / "kvpressure_vllm").iterdir() if path.name != "__pycache__"}
        assert {name.split("/")[1] for name in names if name.startswith("kvpressure_vllm/")} == modules

    def test_vllm_loads_it_from_a_clean_environment(self, wheel: Path, tmp_path: Path) -> None:
        """With vLLM's one class that it derives from standing in for vLLM, and no exporter beside it."""
        venv.create(tmp_path / "venv", with_pip=False)
        python = tmp_path / "venv/bin/python"
        [packages] = (tmp_path / "venv/lib").glob("python3*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)  # what an installer does with a pure wheel without scripts
        loggers = packages / "vllm/v1/metrics/loggers.py"
        loggers.parent.mkdir(parents=True)
        loggers.write_text(STUB)
        environment = {"KVPRESSURE_PLUGIN": "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        done = subprocess.run(
            [python, "-c", AS_VLLM_LOADS], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.splitlines() == [
            "vllm.general_plugins kvpressure kvpressure-vllm register",
            "vllm.stat_logger_plugins kvpressure kvpressure-vllm StepLogger",
            "plugin only",
        ]
        assert "Traceback" not in done.stderr  # prometheus_client, which vLLM brings, is not there

    def test_it_is_one_release_with_the_exporter_under_the_same_licence(self) -> None:
        assert version(PLUGIN) == version(ROOT)
        assert (PLUGIN / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def project(where: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((where / "pyproject.toml").read_text())["project"]
    return found


def version(where: Path) -> str:
    return str(project(where)["version"])
