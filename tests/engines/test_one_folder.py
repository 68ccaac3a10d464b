"""A dialect is one folder and a row of the registry: SGLang is taken as the example of one that was added."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "exporter" / "kvpressure"
FOLDER = "exporter/kvpressure/engines/sglang"
PROGRAM = ("alerts", "dashboards", "deploy", "exporter", "lab", "plugin")
TEXT = {
    ".py",
    ".j2",
    ".yaml",
    ".yml",
    ".json",
    ".md",
    ".toml",
    ".tpl",
    ".txt",
    ".sh",
    ".js",
    ".css",
    ".service",
    ".jsx",
}
KNOWN = {
    "exporter/kvpressure/engines/registry.py": "its row",
    "exporter/kvpressure/engines/other_software.py": "its router, which is no engine; and what to point at",
    "exporter/kvpressure/model/reasons.py": "the failure reason that names its router",
    "exporter/kvpressure/capacity/models.json": "a source of some models' figures has it in its path",
    "lab/accuracy/digests.txt": "names of recordings",
    "lab/incidents/build_sglang.py": "writes the fixtures of its incidents",
    "lab/incidents/sglang_incidents.py": "the same",
    "lab/incidents/sglang_model.py": "the same",
}
ROW = re.compile(r'^    "sglang": "[^"]+",\n', re.MULTILINE)


def files() -> Iterator[Path]:
    for top in PROGRAM:
        for path in (ROOT / top).rglob("*"):
            if (
                path.is_file()
                and path.suffix in TEXT
                and not {"node_modules", "kvpressure.egg-info", "tests"} & set(path.relative_to(ROOT).parts)
            ):
                yield path


def test_no_other_file_of_the_program_knows_it() -> None:
    named = {
        str(path.relative_to(ROOT)) for path in files() if re.search("sglang|sgl_", path.read_text(), re.IGNORECASE)
    }
    own = {name for name in named if name.startswith(FOLDER)}
    assert own
    assert named - own == set(KNOWN)


def test_the_registry_has_one_row_of_it() -> None:
    text = (PACKAGE / "engines" / "registry.py").read_text()
    assert len(re.findall("sglang", ROW.sub("", text), re.IGNORECASE)) == 0
    assert len(ROW.findall(text)) == 1


def answer(package: Path, recording: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-m", "kvpressure", "replay", str(recording), "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.live
def test_without_its_folder_and_its_row_nothing_else_changes(tmp_path: Path) -> None:
    bare = tmp_path / "kvpressure"
    shutil.copytree(PACKAGE, bare, ignore=shutil.ignore_patterns("__pycache__", "sglang"))
    registry = bare / "engines" / "registry.py"
    registry.write_text(ROW.sub("", registry.read_text()))
    of_vllm = ROOT / "tests/fixtures/recordings/vllm-cpu/d_kv_pressure.jsonl.gz"
    of_sglang = ROOT / "tests/fixtures/sglang/live_0.4.9.post6.jsonl.gz"

    whole, without = answer(PACKAGE, of_vllm), answer(bare, of_vllm)
    assert (whole.returncode, without.returncode, without.stderr) == (0, 0, whole.stderr)
    assert whole.stdout == without.stdout != ""

    assert '"verdict":"unknown"' not in answer(PACKAGE, of_sglang).stdout.splitlines()[-1].replace(" ", "")
    assert '"verdict":"unknown"' in answer(bare, of_sglang).stdout.splitlines()[-1].replace(" ", "")
