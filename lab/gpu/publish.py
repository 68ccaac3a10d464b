"""Keeps results for the project: their files, the report made of them, and the GPU as a fixture of the tests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Final

from lab.gpu import plan, report
from lab.gpu.children import ROOT
from lab.gpu.result import Result, load

KEPT: Final = ROOT / "lab/gpu/results"
FIXTURES: Final = ROOT / "tests/fixtures/gpu"


def publish(results: Path) -> Path:
    """Copy what there is, and write report and fixture from all that is kept; the report. ``results`` is only read."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in plan.NAMES:
        source = results / f"{name}.json"
        if source.exists() and results.resolve() != KEPT:
            shutil.copyfile(source, KEPT / source.name)
    calls = load(KEPT, "calls")
    if calls is not None and "gpu" in calls.data:
        FIXTURES.mkdir(parents=True, exist_ok=True)
        fixture(calls, FIXTURES)
    return report.write(KEPT)


def fixture(calls: Result, directory: Path) -> Path:
    """Write the GPU's answers as ``<gpu>_<driver branch>.json``; see ``lab/gpu/inventory.py``."""
    gpu = calls.data["gpu"]
    words = f"{gpu['gpus'][0]['name']} {gpu['driver_version'].split('.')[0]}"
    path = directory / (re.sub(r"[^a-z0-9]+", "_", words.lower().replace("nvidia", "")).strip("_") + ".json")
    path.write_text(json.dumps(gpu, indent=1) + "\n")
    return path
