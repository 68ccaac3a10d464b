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
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.loads import SEEN
from tests.gpu.nodes import Build, Node, h100, mig_h100
from tests.gpu.test_golden_nodes import served
from tests.sources.gpu.nvml_stub import GIB, Gpu, Mig, World, environment, write
from tests.sources.gpu.nvml_stub import kept as stub_world

from kvpressure.model.readings import GpuReading
from lab.gpu import allocator, command, fragmentation_alert, levels, plan, privileges, publish, report, smi
from lab.gpu.options import Options
from lab.gpu.result import Result, load
from lab.gpu.timing import summary

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
                "--reads",
                "6",
                "--phase-seconds",
                "2.5",
                "--settle-seconds",
                "0.1",
                "--leak-minutes",
                "0.15",
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

    def test_a_python_without_the_packages_is_one_line(self) -> None:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "lab.gpu"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert re.fullmatch("lab.gpu: .* lacks nvidia-ml-py, .*; run it with a Python that has them, .*\n", done.stderr)

    def test_a_sandbox_that_refuses_calls(self, nvml: Build) -> None:
        """Power blocked, no GPM permission, utilization not there: codes in the table, and a check that fails."""
        gpu = replace(
            H200, utilization=None, samples=None, codes={"nvmlDeviceGetPowerUsage": 17, "nvmlGpmSampleGet": 4}
        )
        place = Place(nvml(()), World(gpus=[gpu]))
        done = place.run("--part", "calls")
        assert done.returncode == 1
        found = place.result("calls").data["identities"][privileges.AS_IS]
        assert found["absent"] == ["power_watts", "utilization_ratio"]
        assert found["calls"]["nvmlDeviceGetPowerUsage"]["codes"] == {"17": 5}
        assert set(found["calls"]["nvmlGpmSampleGet"]["codes"]) == {"4"}
        assert found["activity"] == {"readings": 6, "with": 0, "last": 0}
        assert found["errors"] == {"blocked": 5, "no_permission": 1}

    def test_an_nvidia_smi_without_gpm_and_with_other_figures(self, nvml: Build) -> None:
        told = {**TOLD, "row": ["20", "[N/A]", "512", "350.00", "700.00"], "gpm": None}
        place = Place(nvml(()), World(gpus=[H200]), told)
        done = place.run("--part", "counters")
        result = place.result("counters")
        assert done.returncode == 1
        assert not found_for(result, "idle: utilization against nvidia-smi query")[0]["ok"]
        lacking = {item["what"]: item["reason"] for item in result.missing}
        assert "Invalid argument" in lacking["GPM metrics of nvidia-smi dmon"]
        assert (
            lacking["idle: memory used without reserved against nvidia-smi query"]
            == "nvidia-smi does not tell 'memory.used'"
        )

    def test_a_part_that_hangs_is_ended_and_leaves_its_reason(
        self, tmp_path: Path, nvml: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = Place(nvml(()), World(hangs={"nvmlInitWithFlags": 600}))
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        part = plan.Part("calls", "calls", "hangs", lambda _: -38.7)  # ended after two seconds
        options = Options(tmp_path)
        assert command._run(part, options, ["--results", str(tmp_path)]) is False
        found = load(tmp_path, "calls")
        assert found is not None
        assert found.failed is not None
        assert found.failed.startswith("did not end within")

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

    def test_a_file_of_another_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "calls.json").write_text('{"format": 0}')
        with pytest.raises(ValueError, match="not a result of format 1"):
            report.render(tmp_path)


class TestGpu:
    """A real GPU becomes one more golden GPU: what the tool keeps of it gives the same page again."""

    def test_a_gpu_as_it_is_kept(self, nvml: Build) -> None:
        place = Place(nvml(()), World(gpus=[H200, h100(codes={"nvmlDeviceGetPowerUsage": 17})]))
        kept = place.module("inventory")
        first = kept["gpu"]["gpus"][0]
        assert set(first) <= {field.name for field in fields(Gpu)}
        assert (first["name"], first["processes"], first["codes"]) == ("NVIDIA H200", [[101, 48 * GIB]], {})
        assert kept["gpu"]["gpus"][1]["codes"] == {"nvmlDeviceGetPowerUsage": 17}
        assert not re.search("GPU-|4711|0000:", json.dumps(kept)), "nothing that tells whose GPU it was"
        assert kept["memory"][0]["second"]["reserved"] == GIB // 2

    @pytest.mark.parametrize(
        "gpu", [H200, mig_h100(), h100(memory_total=None, power_limit_mw=None)], ids=["h200", "mig", "unified"]
    )
    def test_the_page_of_what_was_kept_is_the_gpus(self, gpu: Gpu, tmp_path: Path, nvml: Build) -> None:
        place = Place(nvml(()), World(gpus=[gpu]))
        kept = publish.fixture(Result("calls", data=place.module("inventory")), tmp_path)
        ready = 'kvpressure_gpu_dram_activity_ratio{gpu="0",uuid="' if gpu.gpm else "kvpressure_gpu_up"
        pages = []
        for number, world in enumerate((World(gpus=[gpu]), stub_world(kept))):
            where = tmp_path / str(number)
            where.mkdir()
            lines = served(Node(ready, world, arguments=("--nvidia.gpm",)), where, nvml, lambda: tmp_path)
            pages.append([re.sub('uuid="MIG-[^"]*"', 'uuid="MIG"', line) for line in lines])
        assert sorted(pages[0]) == sorted(pages[1])

    def test_name_of_a_fixture(self, tmp_path: Path) -> None:
        gpu = {"driver_version": "580.159.03", "gpus": [{"name": "NVIDIA H200"}]}
        assert publish.fixture(Result("calls", data={"gpu": gpu}), tmp_path).name == "h200_580.json"


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

    def test_what_was_measured_once_stays_told_apart(self, tmp_path: Path) -> None:
        """Kept readings, real ones too once there are some, by the thresholds of today."""
        made = Result("loads")
        made.data |= levels.judge(made, self.readings(("profiling", "power", "utilization_weak")))
        made.write(tmp_path)
        results = [result for place in (tmp_path, publish.KEPT) if (result := load(place, "loads")) is not None]
        assert results[0].data == made.data
        for result in results:
            again = Result("loads")
            found = levels.judge(again, levels.kept(result))
            assert [check["ok"] for check in again.checks] == [check["ok"] for check in result.checks]
            assert found["levels"] == result.data["levels"]

    def test_not_told_apart_is_said(self) -> None:
        result = Result("loads")
        levels.judge(result, self.readings(("profiling", "power", "utilization_weak"), swap=True))
        assert [check["ok"] for check in result.checks[:2]] == [False, False]

    def test_without_gpm_the_other_levels_are_judged(self) -> None:
        result = Result("loads")
        levels.judge(result, self.readings(("power", "utilization_weak")))
        assert result.good
        assert len(result.checks) == 2
        assert [item["what"] for item in result.missing] == [
            "profiling: the loads told apart",
            "profiling: which load leaves the GPU starved",
        ]


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
        assert [(step["step"], step["condition"]) for step in result.data["steps"]] == [
            ("start", 0.0),
            ("fill", 0.0),
            ("fragment", 1.0),
            ("fail", 1.0),
            ("release", 0.0),
        ]
        result.write(tmp_path)
        assert "silent when full, fires when fragmented and clears after the release" in report.render(tmp_path)

    def test_figures_that_are_not_torchs_are_noticed(
        self, tmp_path: Path, nvml: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = self.judged(tmp_path, nvml, monkeypatch, "lie")
        assert not any(check["ok"] for check in found_for(result, "five figures"))

    @pytest.mark.parametrize(
        ("figures", "text"),
        [
            ((0.0, 6e9, 0.0), "silent when full, fires when fragmented and clears"),
            ((0.0, 1e9, 0.0), "does not do as it should"),
            ((0.0, 6e9, 6e9), "does not do as it should"),
            ((0.0, None, 0.0), "was not asked: a figure is absent"),
            ((0.0, 6e9), "was not asked: a figure is absent"),
        ],
    )
    def test_the_shipped_alert_is_asked(self, figures: tuple[float | None, ...], text: str) -> None:
        shown = {
            step: {"fragmentation_bytes": value, "condition": float((value or 0) > 2e9)}
            for step, value in zip(("fill", "fail", "release"), figures, strict=False)
        }
        assert text in fragmentation_alert.sentence(shown)


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

    def test_without_results_nothing_is_claimed(self, tmp_path: Path) -> None:
        text = report.render(tmp_path)
        assert text.count(report.NOT_RUN) == 1 + len(plan.PARTS)
        assert "ok" not in re.findall(r"\w+", text)
        assert "checks" not in text.split("## calls")[1]


def test_all_parts_fit_the_time_they_are_planned_for() -> None:
    options = Options(Path())
    assert sum(part.seconds(options) for part in plan.PARTS) <= 20 * 60
    assert all(part.seconds(options) <= 8 * 60 for part in plan.PARTS if part.name != "leak")


def test_only_root_can_become_less() -> None:
    code = "import sys; from lab.gpu import privileges as p; p.become(sys.argv[1]); print(p.facts()['CapEff'])"
    done = subprocess.run(
        [sys.executable, "-c", code, privileges.NO_CAPABILITIES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if os.getuid() == 0:
        assert int(done.stdout, 16) == 0
    else:
        assert "only root can become" in done.stderr


def test_summaries_and_cells() -> None:
    assert summary([]) == {"n": 0}
    assert summary([3.0, 1.0, 2.0]) == {"n": 3, "min": 1.0, "median": 2.0, "p99": 3.0, "max": 3.0}
    assert [smi.number(cell) for cell in ("350.25", "[N/A]", "[Not Supported]", "")] == [350.25, None, None, None]


def test_a_split_gpu_is_kept_with_its_instances(nvml: Build) -> None:
    kept = Place(nvml(()), World(gpus=[mig_h100()])).module("inventory")["gpu"]["gpus"][0]
    slots = kept["migs"]
    assert [slot is not None for slot in slots] == [True, True, False, True, False, False, False]
    assert set(slots[0]) <= {field.name for field in fields(Mig)}
    assert (slots[1]["gi"], slots[1]["memory_free"], slots[1]["dram"]) == (7, 6 * GIB, 20.0)
