"""The part that runs inside vLLM. torch with a GPU cannot be had here: a stand-in has the documented keys."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure_vllm import report
from kvpressure_vllm.allocator import sample
from kvpressure_vllm.report import guarded
from kvpressure_vllm.steps import KV_REPORTS, LARGEST_BATCH, StepCounts
from tests.helpers.plugin import with_plugin

pytestmark = pytest.mark.live

FAKE_TORCH = """
import sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: True, device_count=lambda: 1,
    memory_stats=lambda device: {"allocated_bytes.all.current": 10, "reserved_bytes.all.current": 30,
                                 "inactive_split_bytes.all.current": 5})
sys.modules["torch"] = torch
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, so that imports, threads and forks are its own."""
    clean = with_plugin(os.environ, without=("KVPRESSURE", "PROMETHEUS"))
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=30, check=False
    )


def cuda(devices: list[dict[str, int]], initialized: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized,
            device_count=lambda: len(devices),
            memory_stats=lambda index: devices[index],
        )
    )


def stats(allocated: int, reserved: int) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": reserved,
        "inactive_split_bytes.all.current": 3,
    }


class TestRegister:
    def test_off_unless_asked_for(self, tmp_path: Path) -> None:
        for value in ({}, {"KVPRESSURE_PLUGIN": "0"}, {"KVPRESSURE_PLUGIN": "true"}):
            done = run(
                FAKE_TORCH + "import threading, kvpressure_vllm as p; p.register()\nprint(threading.active_count())",
                PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
                **value,
            )
            assert (done.stdout.strip(), done.stderr) == ("1", "")

    def test_one_thread_however_often_it_is_called_and_one_in_a_forked_engine(self, tmp_path: Path) -> None:
        done = run(
            FAKE_TORCH
            + """
import os, threading, time
import kvpressure_vllm.report as report
report.EVERY_SECONDS = 0.05
import kvpressure_vllm as plugin
forked = False
torch.cuda.is_initialized = lambda: forked  # vLLM does not fork a process that uses the device
for _ in range(3):
    plugin.register()
print(threading.active_count(), flush=True)
child = os.fork()
forked = True
names = lambda: sorted(os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
wanted = f"gauge_liveall_{os.getpid()}.db"
end = time.monotonic() + 10
while wanted not in names() and time.monotonic() < end:
    time.sleep(0.01)
if child == 0:
    os._exit(0 if wanted in names() and threading.active_count() == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), wanted in names())
""",
            KVPRESSURE_PLUGIN="1",
            PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        )
        assert done.stdout.split() == ["2", "0", "True"], done.stderr

    def test_without_the_directory_of_prometheus_it_says_once_that_nothing_is_reported(self) -> None:
        done = run(
            FAKE_TORCH + "import kvpressure_vllm.report as r\nr.EVERY_SECONDS = 0.01\n"
            "import time, kvpressure_vllm as p; p.register(); time.sleep(0.2)\n"
            "import sys; print('prometheus_client' in sys.modules)",
            KVPRESSURE_PLUGIN="1",
        )
        assert (done.returncode, done.stdout.strip()) == (0, "False")
        [line] = done.stderr.splitlines()
        assert "PROMETHEUS_MULTIPROC_DIR" in line

    def test_torch_that_breaks_breaks_nothing_and_is_told_once(self, tmp_path: Path) -> None:
        done = run(
            "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(\n"
            "    is_initialized=lambda: 1 / 0))\nimport kvpressure_vllm.report as r\nr.EVERY_SECONDS = 0.01\n"
            "import kvpressure_vllm as p, time; p.register(); time.sleep(0.3); print('alive')",
            KVPRESSURE_PLUGIN="1",
            PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        )
        assert done.stdout.strip() == "alive"
        assert done.stderr.count("ZeroDivisionError") == 1


class TestAllocator:
    def test_figures_of_the_device_that_this_process_uses(self) -> None:
        torch = cuda([stats(0, 0), stats(10, 30), stats(1, 2)])
        assert sample(torch) == {"rank": 1, "allocated_bytes": 10, "reserved_bytes": 30, "inactive_split_bytes": 3}

    def test_rank_in_the_process_group(self) -> None:
        torch = cuda([stats(10, 30)])
        torch.distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3)
        assert (sample(torch) or {})["rank"] == 3

    @pytest.mark.parametrize(
        "torch",
        [SimpleNamespace(), cuda([stats(1, 2)], initialized=False), cuda([]), cuda([stats(0, 0)]), cuda([{}])],
        ids=["half imported", "not initialised", "no device", "unused", "no figures"],
    )
    def test_absent_rather_than_zero(self, torch) -> None:
        assert sample(torch) is None


def step(decoding: int, first: int = 0, preempted: int = 0) -> SimpleNamespace:
    """The ``IterationStats`` of vLLM, as far as it is read."""
    return SimpleNamespace(
        inter_token_latencies_iter=[0.01] * decoding,
        time_to_first_tokens_iter=[0.1] * first,
        num_generation_tokens=decoding + first,
        num_preempted_reqs=preempted,
    )


def scheduled(running: int, usage: float = 0.5) -> SimpleNamespace:
    """The ``SchedulerStats`` of vLLM, as far as it is read."""
    return SimpleNamespace(num_running_reqs=running, kv_cache_usage=usage)


class TestSteps:
    @given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=50))
    def test_counts_are_what_a_list_of_all_steps_says(self, steps) -> None:
        counts = StepCounts()
        for decoding, running in steps:
            counts.record(scheduled(running), step(decoding))
        told = counts.report()
        assert told["batch"] == Counter(d for d, _ in steps if d)
        assert told["running"] == Counter(r for d, r in steps if d or r)
        assert told["steps"] == sum(told["running"].values())
        assert told["decoded"] == told["tokens"] == sum(d for d, _ in steps)

    def test_either_part_of_a_step_may_be_missing(self) -> None:
        counts = StepCounts()
        counts.record(None, step(3, first=1, preempted=2))  # another API server got the scheduler's part
        counts.record(scheduled(4), None)  # a chunk of a prompt: no output
        counts.record(None, None)
        told = counts.report()
        assert (told["steps"], told["decoded"], told["tokens"], told["preemptions"]) == (1, 3, 4, 2)

    def test_kv_maximum_lasts_ten_reports(self) -> None:
        counts = StepCounts()
        counts.record(scheduled(1, 0.9), None)
        counts.record(scheduled(1, 0.2), None)
        maxima = [counts.report()["kv_max"]]
        for _ in range(KV_REPORTS):
            counts.record(scheduled(1, 0.1), None)
            maxima.append(counts.report()["kv_max"])
        assert maxima == [0.9] * KV_REPORTS + [0.1]

    def test_batches_are_bounded(self) -> None:
        counts = StepCounts()
        for size in range(LARGEST_BATCH - 2, LARGEST_BATCH + 50):
            counts.record(scheduled(size), step(size))
        assert max(counts.report()["batch"]) == max(counts.report()["running"]) == LARGEST_BATCH

    def test_a_step_costs_less_than_a_thousandth_of_itself(self) -> None:
        counts, scheduler, iteration = StepCounts(), scheduled(256), step(256)
        spent = []
        for _ in range(5):
            begin = time.thread_time()
            for _ in range(1000):
                counts.record(scheduler, iteration)
            spent.append(time.thread_time() - begin)
        assert min(spent) / 1000 < 0.001 * 0.010  # of a step of 10 ms


class TestGuarded:
    def test_never_raises_and_tells_each_kind_once(self, caplog) -> None:
        report._told.clear()

        @guarded
        def broken(error: type[Exception]) -> None:
            raise error("no")

        for error in (AttributeError, AttributeError, TypeError):
            broken(error)
        assert len(caplog.records) == 2

    def test_a_report_that_costs_much_is_made_less_often(self, monkeypatch) -> None:
        naps: list[float] = []
        spent = iter([0.0, 0.0001, 0.0, 0.002, 0.0, 1.0])
        monkeypatch.setattr(report.time, "thread_time", lambda: next(spent))

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                raise StopIteration

        monkeypatch.setattr(report.time, "sleep", nap)
        with pytest.raises(StopIteration):
            report.repeat(lambda: None)
        assert naps == [1.0, 2.0, 5.0]
