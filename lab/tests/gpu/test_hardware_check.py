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
from tests.gpu.loads import SEEN
from tests.gpu.nodes import Build, Node, h100, mig_h100
from tests.gpu.test_golden_nodes import served
from tests.sources.gpu.nvml_stub import GIB, Gpu, World, environment, write
from tests.sources.gpu.nvml_stub import kept as stub_world

from kvpressure.model.readings import GpuReading
from lab.gpu import allocator, command, levels, plan, privileges, publish, report
from lab.gpu.options import Options
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
    samples="1000:70",
    processes=((4711, 48 * GIB),),
)
USED = (150_754_820_096 - 40 * GIB - GIB // 2) // 2**20
TOLD = {"row": ["70", str(USED), "512", "350.00", "700.00"], "apps": [[4711, 49152]], "sm": 70, "gpm": [88, 10, 76]}


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
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "lab.gpu",
                "--results",
                str(self.results),
                *("--reads", "6", "--phase-seconds", "2.5", "--settle-seconds", "0.1", "--leak-minutes"),
                *("0.15",),
                *arguments,
            ],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def module(self, name: str, *arguments: str) -> Any:
        """The JSON that a module of the tool prints."""
        done = subprocess.run(
            [sys.executable, "-m", f"lab.gpu.{name}", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        return json.loads(done.stdout)

    def result(self, part: str) -> Result:
        """What a part left."""
        found = load(self.results, part)
        assert found is not None
        return found


def found_for(result: Result, what: str) -> list[dict[str, Any]]:
    """The checks whose text matches."""
    return [check for check in result.checks if re.search(what, check["what"])]


class TestAll:
    """One run of all parts on a node where everything answers except torch, and what it leaves."""

    def test_all_parts(self, nvml: Build) -> None:
        place = Place(nvml(()), World(gpus=[H200], driver_version="580.159.03"))
        done = place.run()
        self.everything_that_could_be_asked_holds(place, done)
        self.what_needs_torch_says_so_and_has_no_figures(place)
        self.every_call_of_the_source_is_in_the_table(place)
        self.identities_are_what_they_are_called(place)
        self.counters_stand_beside_those_of_nvidia_smi(place)
        self.minutes_beside_a_load_watch_the_exporter(place)
        self.processes_and_start_times(place)
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
        """What stands in the sources, less what only other GPUs, or older drivers, are asked."""
        text = "".join(path.read_text() for path in (ROOT / "exporter/kvpressure/sources/gpu/nvidia").glob("*.py"))
        wanted = set(re.findall(r"pynvml\.(nvml[A-Z]\w+)", text))
        assert len(wanted) > 30
        wanted = {name for name in wanted if not re.search(r"Mig(Device|SampleGet)|GpuInstanceId|_v2$|Throttle", name)}
        wanted -= {name for name in wanted if name.startswith("nvmlEventType")}
        for found in place.result("calls").data["identities"].values():
            timed = {re.sub(r"_v\d$", "", name) for name in found["calls"]}
            assert {re.sub(r"_v\d$", "", name) for name in wanted} <= timed
            assert found["calls"]["nvmlDeviceGetMemoryInfo_v2"]["n"] == 6 + 5
            assert found["calls"]["nvmlDeviceGetPowerUsage"]["codes"] == {"0": 11}
            assert found["activity"] == {"readings": 6, "with": 6, "last": 6}

    def identities_are_what_they_are_called(self, place: Place) -> None:
        calls = place.result("calls")
        if os.getuid() != 0:  # then it says that it could not
            assert {item["what"] for item in calls.missing} >= {
                f"calls {privileges.USER}",
                f"calls {privileges.NO_CAPABILITIES}",
            }
            return
        process = {name: found["process"] for name, found in calls.data["identities"].items()}
        assert process[privileges.USER]["Uid"] == "65532 65532 65532 65532"
        assert process[privileges.NO_CAPABILITIES]["Uid"] == "0 0 0 0"
        for name in (privileges.USER, privileges.NO_CAPABILITIES):
            assert (int(process[name]["CapEff"], 16), int(process[name]["CapBnd"], 16)) == (0, 0)

    def counters_stand_beside_those_of_nvidia_smi(self, place: Place) -> None:
        result = place.result("counters")
        rows = {(row["quantity"], row["by"]): (row["ours"], row["theirs"]) for row in result.data["rows"]}
        assert rows[("utilization", "query")] == (70.0, 70.0)
        assert rows[("memory used without reserved", "query")] == (pytest.approx(USED, abs=1), USED)
        assert rows[("power", "query")] == (350.0, 350.0)
        assert rows[("tensor activity", "dmon")] == (9.5, 10.0)
        assert [item["what"] for item in result.missing] == ["counters under load"]

    def minutes_beside_a_load_watch_the_exporter(self, place: Place) -> None:
        result = place.result("leak")
        assert result.data["identity"] == (privileges.NO_CAPABILITIES if os.getuid() == 0 else privileges.AS_IS)
        assert result.data["memory_kib"] > 10_000
        assert result.data["gpm"]["with"] > 0
        assert 0 < result.data["cpu_share"] < 1
        assert len(result.data["samples"]) >= 4
        assert found_for(result, "no thread more")[0]["ok"]

    def processes_and_start_times(self, place: Place) -> None:
        result = place.result("processes")
        assert result.data["ours"] == {"4711": 48 * GIB}
        assert len(result.data["starts"]) == 3
        assert result.data["page_with_gpu_seconds"] > 0

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

    def test_a_part_that_breaks_keeps_what_it_had(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(result: Result, _: Options) -> None:
            result.check("before", True, "yes")
            raise RuntimeError("driver went")

        monkeypatch.setattr(levels, "run", breaks)
        monkeypatch.setattr(plan, "describe", dict)
        result = plan.run_here(plan.named("loads"), Options(tmp_path))
        kept = load(tmp_path, "loads")
        assert kept is not None
        assert (result.good, kept.checks[0]["what"]) == (False, "before")
        assert "driver went" in (kept.failed or "")
        assert "**Ended early:** `RuntimeError: driver went`" in report.render(tmp_path)


class TestGpu:
    """A real GPU becomes one more golden GPU: what the tool keeps of it gives the same page again."""

    @pytest.mark.parametrize(
        "gpu", [H200, mig_h100(), h100(memory_total=None, power_limit_mw=None)], ids=["h200", "mig", "unified"]
    )
    def test_the_page_of_what_was_kept_is_the_gpus(self, gpu: Gpu, tmp_path: Path, nvml: Build) -> None:
        place = Place(nvml(()), World(gpus=[gpu]))
        kept = publish.fixture(Result("calls", data=place.module("inventory")), tmp_path)
        ready = 'kvpressure_gpu_tensor_activity_ratio{gpu="0",uuid="' if gpu.gpm else "kvpressure_gpu_up"
        pages = []
        for number, world in enumerate((World(gpus=[gpu]), stub_world(kept))):
            where = tmp_path / str(number)
            where.mkdir()
            lines = served(Node(ready, world, arguments=("--nvidia.gpm",)), where, nvml, lambda: tmp_path)
            pages.append([re.sub('uuid="MIG-[^"]*"', 'uuid="MIG"', line) for line in lines])
        assert sorted(pages[0]) == sorted(pages[1])


class TestLoads:
    """Which of three loads is which, by figures as they are documented for Hopper (``tests/gpu/loads.py``)."""

    def readings(self, level_names: tuple[str, ...], swap: bool = False) -> dict[str, list[tuple[float, GpuReading]]]:
        names = {"tensor": "prefill", "dram": "decode", "host": "host"}
        if swap:
            names |= {"tensor": "decode", "dram": "prefill"}
        return {
            kind: [
                (
                    1000.0 + t,
                    GpuReading(
                        "GPU-1",
                        0,
                        "nvidia",
                        **{field: value for level in level_names for field, value in SEEN[level][load_name].items()},
                    ),
                )
                for t in range(20)
            ]
            for kind, load_name in names.items()
        }

    def test_told_apart(self) -> None:
        result = Result("loads")
        data = levels.judge(result, self.readings(("profiling", "power", "utilization_weak")))
        assert result.good
        assert len(result.checks) == 5
        assert result.missing == []
        assert data["levels"]["profiling"]["host"] == {
            "level": "profiling",
            "factor": 0.0,
            "starved": True,
            "saturated": False,
        }
        assert data["figures"]["tensor"]["power_watts"] == 665.0


class TestAllocator:
    def judged(self, tmp_path: Path, nvml: Build, monkeypatch: pytest.MonkeyPatch, *lie: str) -> Result:
        write(tmp_path / "world", World(gpus=[H200]))
        for name, value in environment(nvml(()), tmp_path / "world").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(allocator, "NVML_SECONDS", 0.0)  # the world stands still
        if lie:
            monkeypatch.setattr(allocator, "REPORT_SECONDS", 1.5)
        result = Result("allocator")
        fake = (sys.executable, str(ROOT / "lab/tests/gpu/fake_fragment.py"), *lie)
        allocator.run(result, Options(tmp_path, fragment=fake))
        return result

    def test_plugin_exporter_condition_and_alert_follow_torch(
        self, tmp_path: Path, nvml: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The world stands still, so NVML's view of a release is the one thing that cannot hold here."""
        result = self.judged(tmp_path, nvml, monkeypatch)
        assert [check["what"] for check in result.checks if not check["ok"]] == ["from outside the release is seen"]
        assert [(step["step"], step["finding"]) for step in result.data["steps"]] == [
            ("start", 0.0),
            ("fill", 0.0),
            ("fragment", 1.0),
            ("fail", 1.0),
            ("release", 0.0),
        ]
        result.write(tmp_path)
        assert "silent when full, fires when fragmented and clears after the release" in report.render(tmp_path)


class TestPage:
    def test_publishing_keeps_results_and_writes_report_and_fixture(
        self, tmp_path: Path, nvml: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, path in (("KEPT", "kept"), ("FIXTURES", "fixtures")):
            monkeypatch.setattr(publish, name, tmp_path / path)
        given = tmp_path / "given"
        given.mkdir()
        gpu = Place(nvml(()), World(gpus=[H200])).module("inventory")
        Result("calls", data=gpu, machine={"name": "NVIDIA H200"}).write(given)
        assert command.main(["--part", "report", "--publish", "--results", str(given)]) == 0
        assert [path.name for path in given.iterdir()] == ["calls.json"]
        assert load(tmp_path / "kept", "calls") == load(given, "calls")
        assert "| name | NVIDIA H200 |" in (tmp_path / "kept/report.md").read_text()
        assert stub_world(tmp_path / "fixtures/h200_580.json").gpus[0].dram == 76
