"""``make test-gpu`` without a GPU: its parts over the stub library, a stand-in ``nvidia-smi``, and no torch.

What only a GPU can answer - loads, torch's allocator - is not pretended here; that the parts ask, compare and judge
is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.nodes import Build, h100
from tests.sources.gpu.nvml_stub import GIB, World, environment, write

from lab.gpu import plan, report
from lab.gpu.result import Result, load

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[3]
H200 = h100(
    name="NVIDIA H200",
    memory_total=150_754_820_096,
    memory_free=40 * GIB,
    gpm=1,
    sm=88,
    tensor=9.5,
    dram=76,
    processes=((4711, 48 * GIB),),
)
TOLD = {"row": ["70", "40960", "350.00", "700.00"], "apps": [[4711, 49152]], "sm": 70, "gpm": [88, 10, 76]}


class Place:
    """A folder with the stub library, its world, and the stand-in ``nvidia-smi`` first on the path. Other
    users may read it.
    """

    def __init__(self, library: Path | None, world: World, told: Mapping[str, Any] = TOLD) -> None:
        self._folder = tempfile.TemporaryDirectory()
        where = Path(self._folder.name)
        where.chmod(0o755)
        self.results = where / "results"
        (where / "bin").mkdir()
        script = where / "bin/nvidia-smi"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/lab/tests/gpu/fake_smi.py "$@"\n')
        script.chmod(0o755)
        write(where / "world", world)
        if library is not None:
            library = Path(shutil.copy(library, where))
        self.environment = environment(library, where / "world") | {
            "FAKE_SMI": json.dumps(told),
            "PATH": f"{where}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}/exporter",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``python -m lab.gpu`` with small numbers."""
        small = ("--reads", "6", "--phase-seconds", "2.5", "--settle-seconds", "0.1", "--leak-minutes", "0.15")
        command = [sys.executable, "-m", "lab.gpu", "--results", str(self.results), *small, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )

    def result(self, part: str) -> Result:
        """What a part left."""
        found = load(self.results, part)
        assert found is not None
        return found


class TestAll:
    """One run of all parts on a node where everything answers except torch, and what it leaves."""

    def test_all_parts(self, nvml: Build) -> None:
        place = Place(nvml(()), World(gpus=[H200], driver_version="580.159.03"))
        done = place.run()
        self.everything_that_could_be_asked_holds(place, done)
        self.what_needs_torch_says_so_and_has_no_figures(place)
        self.every_call_of_the_source_is_in_the_table(place)
        self.the_report_has_a_section_of_each_part(place)

    def everything_that_could_be_asked_holds(self, place: Place, done: subprocess.CompletedProcess[str]) -> None:
        results = [place.result(name) for name in plan.NAMES]
        assert [result.failed for result in results] == [None] * len(results), done.stdout + done.stderr
        # A busy machine is no fault of the tool, and in nine seconds a thread that answers a scrape counts as one more.
        late = re.compile("p99 of a reading|within 10 s of its start|no thread more")
        failed = [check for result in results for check in result.checks if not check["ok"]]
        assert [check for check in failed if not late.search(check["what"])] == []
        assert done.returncode == (1 if failed else 0)
        assert f"{len(failed)} failed" in done.stdout.splitlines()[-1]

    def what_needs_torch_says_so_and_has_no_figures(self, place: Place) -> None:
        for part in ("loads", "allocator"):
            result = place.result(part)
            assert (result.checks, [item["reason"] for item in result.missing]) == (
                [],
                ["ModuleNotFoundError: No module named 'torch'"],
            )

    def every_call_of_the_source_is_in_the_table(self, place: Place) -> None:
        """What stands in the sources, less what only other GPUs are asked."""
        text = "".join(path.read_text() for path in (ROOT / "exporter/kvpressure/sources/gpu/nvidia").glob("*.py"))
        wanted = set(re.findall(r"pynvml\.(nvml[A-Z]\w+)", text))
        assert len(wanted) > 30
        wanted = {name for name in wanted if not re.search(r"Mig(Device|SampleGet)|GpuInstance|_v2$", name)}
        wanted -= {name for name in wanted if name.startswith("nvmlEventType")}
        for found in place.result("calls").data["identities"].values():
            timed = {re.sub(r"_v\d$", "", name) for name in found["calls"]}
            assert {re.sub(r"_v\d$", "", name) for name in wanted} <= timed
            assert found["calls"]["nvmlDeviceGetMemoryInfo"]["n"] == 6 + 5
            assert found["calls"]["nvmlDeviceGetPowerUsage"]["codes"] == {"0": 11}
            assert found["activity"] == {"readings": 6, "with": 6, "last": 6}

    def the_report_has_a_section_of_each_part(self, place: Place) -> None:
        text = (place.results / "report.md").read_text()
        assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(plan.NAMES)
        assert "| driver | 580.159.03 |" in text
        assert "`nvmlGpmSampleGet`" in text
        assert report.NOT_RUN not in text


class TestWhatFails:
    def test_no_library_is_one_line(self) -> None:
        done = Place(None, World()).run()
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "lab.gpu: NVML does not open: library_missing; needs an NVIDIA GPU with its driver, and a folder to"
            " write to"
        ]
