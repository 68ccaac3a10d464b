"""Writing recordings: whole after a kill, bounded in size, never in the way of the monitor."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import Encoder
from kvpressure.recording import recorder as recorder_module
from kvpressure.recording.format import Header
from kvpressure.recording.reader import Reader, ReadProblem
from kvpressure.recording.recorder import (
    REASONS,
    BackgroundRecorder,
    Recorder,
    RecordingFull,
    reason_of,
)
from kvpressure.runtime.monitor import Monitor
from tests.helpers.failing import raising
from tests.helpers.waiting import until

HEADER = Header(1.0, "node-1", "test")


def tick(t: float, size: int = 0) -> Snapshot:
    """A tick whose line is about ``size`` bytes long and does not compress."""
    return Snapshot(t, gpus=(GpuReading(os.urandom(size // 2).hex(), 0, "nvidia"),) if size else ())


def read(path: Path) -> tuple[list[Snapshot], list[ReadProblem]]:
    problems: list[ReadProblem] = []
    with Reader(path, on_problem=problems.append, keep_exposition=True) as reader:
        return list(reader), problems


def test_every_flush_is_a_whole_gzip_member_on_disk(tmp_path: Path) -> None:
    now = [0.0]
    recorder = Recorder(tmp_path / "a.jsonl.gz", HEADER, flush_seconds=2.0, clock=lambda: now[0])
    part = tmp_path / "a.jsonl.gz.part"
    for second in range(7):
        now[0] = float(second)
        recorder.write(tick(float(second)))
        on_disk = gzip.decompress(part.read_bytes()).splitlines()  # raises if a member is cut
        assert len(on_disk) - 1 == {0: 0, 1: 0, 2: 3, 3: 3, 4: 5, 5: 5, 6: 7}[second]
    recorder.close()


@pytest.mark.attack("a link in place of a new recording", "what it points at stays as it is")
@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "to nothing"])
def test_a_link_in_place_of_the_file_is_not_written_through(tmp_path: Path, exists: bool) -> None:
    target, path = tmp_path / "elsewhere" / "precious", tmp_path / "a.jsonl"
    target.parent.mkdir()
    if exists:
        target.write_text("precious")
    path.symlink_to(target)
    with contextlib.suppress(FileExistsError), Recorder(path, HEADER) as recorder:
        recorder.write(tick(1.0))
    assert [one.read_text() for one in target.parent.iterdir()] == (["precious"] if exists else [])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=40),
    keep=st.integers(1, 4),
    max_bytes=st.integers(600, 6000),
    flush=st.sampled_from([0.0, 3.0]),
)
def test_a_directory_never_exceeds_its_bound_and_keeps_the_newest(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], keep: int, max_bytes: int, flush: float
) -> None:
    directory = tmp_path_factory.mktemp("r")
    now = [0.0]
    recorder = Recorder(directory, HEADER, max_bytes=max_bytes, keep=keep, flush_seconds=flush, clock=lambda: now[0])
    for t, size in enumerate(sizes):
        now[0] = float(t)
        recorder.write(tick(float(t), size))
        assert sum(file.stat().st_size for file in directory.iterdir()) <= max_bytes * keep
    recorder.close()
    files = sorted(directory.iterdir())
    assert len(files) <= keep
    assert all(file.name.endswith(".jsonl.gz") and file.stat().st_size <= max_bytes for file in files)
    times = [snapshot.time for file in files for snapshot in read(file)[0]]
    assert times == sorted(times)
    assert recorder.ticks + recorder.dropped == len(sizes)
    fits = [t for t, size in enumerate(sizes) if size < max_bytes / 3]
    if recorder.dropped == 0 and fits and fits[-1] == len(sizes) - 1:
        assert times[-1] == len(sizes) - 1


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    others = [
        *("notes.txt", "kvpressure-node-2-000001-20240101T000000Z.jsonl.gz"),
        *("kvpressure-node-1-a-000001-20240101T000000Z.jsonl.gz",),
        *("kvpressure-node-1-1-20240101T000000Z.jsonl.gz",),
        *("kvpressure-node-2-000001-20240101T000000Z.jsonl.gz.part",),
    ]
    for name in others:
        (tmp_path / name).write_text("x")
    with Recorder(tmp_path, HEADER, max_bytes=1000, keep=1, flush_seconds=0.0) as recorder:
        for t in range(20):
            recorder.write(tick(float(t), 600))
    assert {file.name for file in tmp_path.iterdir()} >= set(others)
    assert len(list(tmp_path.iterdir())) == len(others) + 1


def test_the_oldest_goes_first_whatever_the_clock_says(tmp_path: Path) -> None:
    for number, day in ((7, "20990101"), (8, "20010101")):
        (tmp_path / f"kvpressure-node-1-{number:06d}-{day}T000000Z.jsonl.gz").write_text("x")
    with Recorder(tmp_path, HEADER, keep=2) as recorder:
        recorder.write(tick(1.0))
    assert recorder.path.name.startswith("kvpressure-node-1-000009-")
    assert sorted(file.name[18:24] for file in tmp_path.iterdir()) == ["000008", "000009"]


@pytest.mark.parametrize("node", ["", "../../etc", "näme with space", "a" * 300])
def test_any_node_name_makes_a_file_in_the_directory(tmp_path: Path, node: str) -> None:
    with Recorder(tmp_path / "deep" / "er", Header(node=node)) as recorder:
        recorder.write(tick(1.0))
    assert recorder.path.parent == tmp_path / "deep" / "er"
    assert len(read(recorder.path)[0]) == 1


_KILLED = """
import sys, time
from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.recording.format import Header
from tests.helpers.waiting import until
from kvpressure.recording.recorder import Recorder
recorder = Recorder(sys.argv[1], Header(node="node-1"), flush_seconds=0.2)
n = 0
while True:
    recorder.write(Snapshot(time.time(), gpus=(GpuReading(str(n), 0, "nvidia"),)))
    n += 1
    time.sleep(0.01)
    if n == 30:
        print("going", flush=True)
"""


@pytest.mark.live
@pytest.mark.fault(
    "process", "kill -9 while recording", "the last moments are lost", "–", "the next process adopts the file"
)
def test_kill_minus_nine_costs_moments_and_the_next_recorder_adopts_the_file(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.3)
        killed = time.time()
        process.send_signal(signal.SIGKILL)
    (part,) = tmp_path.iterdir()
    assert part.name.endswith(".part")
    snapshots, problems = read(part)
    assert problems == []
    assert killed - snapshots[-1].time < 2.0
    assert [s.gpus[0].uuid for s in snapshots] == [str(n) for n in range(len(snapshots))]
    with Recorder(tmp_path, HEADER) as recorder:
        recorder.write(tick(1.0))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [part.name.removesuffix(".part"), recorder.path.name]
    )


def test_a_file_that_is_being_written_is_not_adopted(tmp_path: Path) -> None:
    with Recorder(tmp_path, HEADER) as first, Recorder(tmp_path, HEADER) as second:
        assert first.path != second.path
        assert len(list(tmp_path.glob("*.part"))) == 2
        first.write(tick(1.0))
        second.write(tick(2.0))
    assert len(read(first.path)[0]) == len(read(second.path)[0]) == 1


def test_a_failed_write_leaves_the_file_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "a.jsonl.gz", HEADER, flush_seconds=0.0)
    recorder.write(tick(1.0))
    real = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) > 40:
            return real(fd, bytes(data)[:40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder_module.os, "write", half)
    with pytest.raises(OSError, match="No space"):
        recorder.write(tick(2.0, 100))
    monkeypatch.undo()
    recorder.write(tick(3.0))
    recorder.close()
    snapshots, problems = read(recorder.path)
    assert [snapshot.time for snapshot in snapshots] == [1.0, 3.0]
    assert problems == []
    assert recorder.dropped == 1


class _Slow:
    """A recorder whose disk hangs until it is let go."""

    def __init__(self, write: Callable[[Snapshot], None]) -> None:
        self._write = write
        self.closed = False
        self.ticks = self.dropped = 0

    def write(self, snapshot: Snapshot) -> None:
        self._write(snapshot)
        self.ticks += 1

    def close(self) -> None:
        self.closed = True


def test_a_hanging_disk_never_blocks_the_listener() -> None:
    go, written = threading.Event(), []

    def hang(snapshot: Snapshot) -> None:
        go.wait(10)
        written.append(snapshot.time)

    background = BackgroundRecorder(_Slow(hang), backlog=4)
    began = time.monotonic()
    for t in range(100):
        background(tick(float(t)))
    assert time.monotonic() - began < 1.0
    go.set()
    background.close()
    assert written[:4] == [0.0, 1.0, 2.0, 3.0]
    assert len(written) + background.dropped == 100
    assert background.dropped >= 90
    assert background.health().errors == {"slow": background.dropped}
    assert background.health().dropped == background.dropped


def test_failures_have_a_reason_from_a_closed_set() -> None:
    by_number = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EACCES: "no_permission"}
    by_number |= {
        errno.EPERM: "no_permission",
        errno.EROFS: "read_only",
        errno.ENOENT: "removed",
        errno.EIO: "io_error",
    }
    assert {number: reason_of(OSError(number, "")) for number in by_number} == by_number
    others = (OSError("no number"), RecordingFull("x"), KeyError("x"))
    assert [reason_of(error) for error in others] == ["io_error", "full", "internal"]
    assert {*by_number.values(), "full", "internal"} <= set(REASONS)


def published(monitor: Monitor) -> dict[str, float]:
    text = Encoder().encode(families(monitor.tick()).collect(), openmetrics=False).decode()
    return {
        line.split()[0].removeprefix("kvpressure_"): float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("kvpressure_recorder_")
    }


@pytest.mark.fault(
    "process",
    "disk full or failing (flight recorder)",
    "recording stops, everything else goes on",
    "`recorder_up` 0, `recorder_errors_total`",
    "next write that succeeds",
)
def test_a_failing_flight_recorder_is_on_the_metrics_page_and_so_is_its_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = BackgroundRecorder(Recorder(tmp_path, HEADER, flush_seconds=0.0), wall=lambda: 1234.0)
    monitor = Monitor({}, Pipeline())
    assert published(monitor) == {}, "no flight recorder is kept"
    monitor.recorder = background.health
    monitor.add_listener(background)

    def wait_for(**expected: float) -> None:
        until(lambda: published(monitor) | expected == published(monitor))

    wait_for(recorder_up=1)

    monkeypatch.setattr(recorder_module.os, "write", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    wait_for(recorder_up=0)
    assert published(monitor)['recorder_errors_total{reason="disk_full"}'] >= 1
    assert background.health().dropped >= 1
    monkeypatch.undo()
    wait_for(recorder_up=1)
    background.close()


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "kept", HEADER, flush_seconds=0.0)
    recorder.write(tick(1.0))
    shutil.rmtree(tmp_path / "kept")
    recorder.write(tick(2.0))
    recorder.close()
    assert [snapshot.time for snapshot in read(recorder.path)[0]] == [2.0]
    assert recorder.dropped == 0
