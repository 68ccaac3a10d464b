"""Following pod logs on disk: formats, rotation, restarts, truncation, hostile lines, positions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpressure.engines.vllm.log_lines import recognise
from kvpressure.model.readings import GpuOwner
from kvpressure.settings.settings import Settings
from kvpressure.sources.host import container_logs as logs
from kvpressure.sources.host import log_files as logfile
from kvpressure.sources.host.container_logs import REASONS, LogsSource
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.helpers.failing import reason_of
from tests.sources.host.podlogs import PodLog
from tests.sources.kubernetes.objects import of_static_pod, pod

Build = Callable[..., Settings]
REAL = Path(__file__).parents[2] / "fixtures" / "vllm-logs"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB."
DEAD = "EngineCore encountered a fatal error."
NOISE = 'INFO:     127.0.0.1:59272 - "POST /v1/completions HTTP/1.1" 200 OK'
FACT = "Using max model len 2048"


def engine_pod(name: str = "a") -> Pod:
    return read_pod(pod(name), Policy())


A = engine_pod()


class Follower:
    """A source over a log root, with the pods it is told of."""

    def __init__(self, settings: Build, root: Path, *pods: Pod, **fields: object) -> None:
        root.mkdir(exist_ok=True)
        self.now: float | None = None
        chosen = settings(host_pod_logs=root, **fields)
        self.shared = chosen.shared
        self.shared.pods = pods
        self.source = LogsSource(chosen, lambda: time.time() if self.now is None else self.now)
        self.errors: dict[str, int] = {}

    def read(self, times: int = 1) -> list[str]:
        """Lines of this many reads."""
        lines: list[str] = []
        for _ in range(times):
            reading = self.source.read()
            assert reading.logs is not None
            lines += [line.line for line in reading.logs]
            for reason, count in reading.errors.items():
                assert reason in REASONS
                self.errors[reason] = self.errors.get(reason, 0) + count
        return lines


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pods"


@pytest.fixture
def follower(settings: Build, root: Path) -> Follower:
    return Follower(settings, root, A)


@pytest.mark.parametrize("name", sorted(path.name for path in REAL.glob("*.log")))
def test_real_logs_lose_nothing_however_they_are_chopped(
    settings: Build, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REAL / name).read_text(encoding="utf-8", errors="replace")
    expected = [event for line in text.splitlines() if (event := recognise(line)) is not None]
    for chunk in (97, 65536):
        monkeypatch.setattr(logfile, "CHUNK_BYTES", chunk)
        one = engine_pod(f"p{chunk}")
        PodLog(root, one).write(*text.splitlines())
        found = [recognise(line) for line in Follower(settings, root, one).read(3)]
        assert found == expected


def test_lines_that_the_runtime_split_are_joined(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    log.write("torch.OutOfMemoryError: CUDA out of ", tag="P")
    assert follower.read() == []
    log.write("an interleaved line of the other stream: " + FACT, stream="stdout")
    log.write("memory. Tried to ", tag="P")
    log.write("allocate 50.00 MiB.", DEAD)
    assert follower.read() == ["an interleaved line of the other stream: " + FACT, OOM, DEAD]


def test_a_half_written_line_waits_for_its_end(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    line = f"2026-01-01T00:00:00.1Z stderr F {FACT}\n".encode()
    for cut in range(1, len(line)):
        log.append(line[:cut])
        assert follower.read() == []
        log.append(line[cut:])
        assert follower.read() == [FACT]


def test_formats_of_runtimes_and_loggers(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    written = {"stream": "stderr", "time": "2026-01-01T00:00:00.000000001Z"}
    log.append(json.dumps({"log": f"INFO 11-21 05:37:59 [model.py:1883] {FACT}\n", **written}).encode() + b"\n")
    log.append(f"{FACT}\n".encode())
    log.write(json.dumps({"level": "INFO", "message": FACT}), f"\x1b[32mINFO\x1b[0m {FACT}")
    log.append(b"2026-01-01T00:00:00.1Z stderr F \xff\xfe " + FACT.encode() + b"\n")
    log.append(b"2026-01-01T00:00:00.1Z stderr\n2026-01-01T00:00:00.1Z stderr F\n\n \n")
    log.append(b'{"log": 5}\n{"log":' + b"[" * 5000 + b"\n")
    assert follower.read() == [FACT, FACT, FACT, f"INFO {FACT}", f"\ufffd\ufffd {FACT}"]


@pytest.mark.fault(
    "sources",
    "log rotated, truncated or flooding",
    "nothing; skipped bytes are counted",
    '`source_errors_total{source="logs",reason="skipped"}`',
    "by itself",
)
def test_rotation_loses_nothing(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    seen: list[str] = []
    for i in range(12):
        log.write(f"Using max model len {3 * i}")
        if i % 2:
            seen += follower.read()
        if i % 3 == 0:
            log.rotate(f"20260101-0000{i:02d}")
            log.write(f"Using max model len {3 * i + 1}")
            seen += follower.read(2)
    seen += follower.read(3)
    expected = sorted([3 * i for i in range(12)] + [3 * i + 1 for i in range(0, 12, 3)])
    assert [int(line.rsplit(" ", 1)[1]) for line in seen] == expected


@pytest.mark.attack("logs so fast that they are rotated twice between two reads", "counted as skipped")
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "the kubelet has compressed the older ones"])
def test_files_that_were_rotated_twice_between_two_reads_are_counted(
    follower: Follower, root: Path, compress: bool
) -> None:
    log = PodLog(root, A)
    log.write("Using max model len 1")
    assert len(follower.read(2)) == 1
    for number in (2, 3, 4):
        log.write(f"Using max model len {number}")
        log.rotate(f"20260101-00000{number}", compress)
    log.write("Using max model len 5")
    assert follower.read(5) == ["Using max model len 2", "Using max model len 5"]
    assert follower.errors == {"skipped": 1}
    log.rotate("20260101-000005")
    log.write("Using max model len 6")
    assert follower.read(4) == ["Using max model len 6"]


def test_the_writer_may_still_use_the_old_file_for_a_moment(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    with log.path.open("ab") as old:
        follower.read()
        log.path.rename(log.directory / "0.log.20260101-000000")
        follower.read()
        log.path.touch()
        follower.read()
        old.write(f"2026-01-01T00:00:00.1Z stderr F {FACT}\n".encode())
        old.flush()
        log.write("Using max model len 9")
        assert follower.read(2) == [FACT, "Using max model len 9"]


def test_a_truncated_file_is_read_from_its_start(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    log.write(*[NOISE] * 20)
    follower.read()
    os.truncate(log.path, 0)
    log.write(DEAD)
    assert follower.read() == [DEAD]


def test_a_restart_goes_on_in_the_new_file_after_the_last_words_of_the_old(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    follower.read()
    log.write(OOM)
    log.restart()
    log.write(FACT)
    assert follower.read(2) == [OOM, FACT]
    log.restart()
    log.restart()
    log.write(DEAD)
    assert follower.read(4) == [DEAD]


def test_what_happened_before_this_process(settings: Build, root: Path) -> None:
    """Facts count at any age, failures only when they are recent; the previous container's end is looked at."""
    now = time.time()
    log = PodLog(root, A, restarts=3)
    log.write(DEAD, FACT, at=now - 7 * 86400)
    log.write(OOM, at=now - 60)
    log.restart()
    log.write("Using max model len 4096", "EngineCore failed to start.", at=now - 3600)
    log.write(DEAD, at=now - 5)
    assert Follower(settings, root, A).read(3) == [FACT, OOM, "Using max model len 4096", DEAD]


@pytest.mark.parametrize("compress", [False, True])
def test_start_up_lines_are_found_in_the_oldest_rotation(settings: Build, root: Path, compress: bool) -> None:
    log = PodLog(root, A)
    log.write(FACT, DEAD, at=time.time() - 86400)
    log.rotate("20260101-000000", compress)
    log.write(*[NOISE] * 5)
    log.rotate("20260102-000000")
    log.write(NOISE)
    assert Follower(settings, root, A).read(2) == [FACT]


def test_a_broken_rotation_is_nothing(settings: Build, root: Path) -> None:
    log = PodLog(root, A)
    (log.directory / "0.log.20260101-000000.gz").write_bytes(b"\x1f\x8b no gzip")
    log.write(FACT)
    assert Follower(settings, root, A).read() == [FACT]


def test_a_large_log_is_entered_at_both_ends(settings: Build, root: Path) -> None:
    log = PodLog(root, A)
    log.write(FACT)
    log.write(*[NOISE] * 12_000)
    log.write("Using max model len 1")  # in the middle, which nobody reads
    log.write(*[NOISE] * 12_000)
    log.write(DEAD)
    found = Follower(settings, root, A)
    assert found.read(8) == [FACT, DEAD]
    log.write(OOM)
    assert found.read() == [OOM]


def test_bytes_a_read_are_bounded_and_nothing_is_lost(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    follower.read()
    log.write(*[NOISE] * 30_000, DEAD)  # 3 MB at once
    reads = 0
    while not follower.read():
        reads += 1
    assert reads == log.path.stat().st_size // logs.CONTAINER_BYTES
    assert follower.errors == {}


@pytest.mark.attack("180 000 log lines at once", "bounded bytes for each reading; what is skipped is counted")
def test_a_log_that_runs_away_is_followed_from_its_end(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    follower.read()
    log.write(*[NOISE] * 180_000)
    log.write(DEAD)
    assert follower.read(3) == [DEAD]
    assert follower.errors == {"skipped": 1}


@pytest.mark.attack("log lines of 10 MB", "cut; the lines after them are read")
def test_lines_of_ten_megabytes(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    follower.read()
    start = b"2026-01-01T00:00:00.1Z stderr F "
    log.append(start + FACT.encode() + b" " + b"memory " * 1_500_000 + b"\n" + start + b"Using max model len 5\n")
    for _ in range(40):
        log.append(start.replace(b" F ", b" P ") + b"memory " * 2300 + b"\n")
    log.append(start + b"the end\n" + start + b"Using max model len 6\n")
    began = time.process_time()
    lines = follower.read(60)
    assert [line[:24].strip() for line in lines] == [FACT, "Using max model len 5", "Using max model len 6"]
    assert all(len(line) <= 17_000 for line in lines)
    assert time.process_time() - began < 2.0


@pytest.mark.writer(
    "anyone whose container logs",
    "log lines of any number, length and content",
    "the events of their own container",
    "bytes and recognised lines per read; only recognised lines are kept",
)
def test_recognised_lines_a_read_are_bounded(follower: Follower, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LINES", 10)
    log = PodLog(root, A)
    log.write(*[DEAD] * 25)
    assert len(follower.read()) == 10
    assert follower.errors == {"too_many_lines": 15}


def test_pods_come_and_go(follower: Follower, root: Path) -> None:
    """A pod that is gone is read once more; another of the same name has its own log."""
    log = PodLog(root, A)
    follower.read()
    log.write(DEAD)
    follower.shared.pods = ()
    assert follower.read() == [DEAD]
    assert follower.source._logs  # still open for the last words
    follower.read()
    assert not follower.source._logs
    other = engine_pod("b")
    follower.shared.pods = (other,)
    assert follower.read() == []
    assert follower.errors == {"no_log": 1}
    PodLog(root, other).write(OOM)
    assert follower.read() == []
    follower.now = time.time() + logs.MISSING_SECONDS + 1
    assert follower.read() == [OOM]


def test_containers_without_a_gpu_push_out_no_container_with_one(
    settings: Build, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_CONTAINERS", 2)
    owning, strangers = engine_pod("z"), [engine_pod(name) for name in "abcd"]
    files = {one.name: PodLog(root, one) for one in (owning, *strangers)}
    found = Follower(settings, root, *strangers)
    found.read(3)
    found.shared.owners = (GpuOwner("GPU-0", owning.namespace, owning.name, "vllm"),)
    found.shared.pods = (*strangers, owning)
    found.read()
    files["z"].write(DEAD)
    assert found.read(2) == [DEAD]
    assert found.errors["too_many_containers"] >= 4


def test_static_pods_have_their_hash_in_the_path(settings: Build, root: Path) -> None:
    static = read_pod(pod("s", annotations=of_static_pod("ab" * 16)), Policy())
    assert static is not None
    directory = root / f"inference_s_{'ab' * 16}" / "vllm"
    directory.mkdir(parents=True)
    (directory / "0.log").write_text(f"2026-01-01T00:00:00.1Z stderr F {FACT}\n")
    assert Follower(settings, root, static).read() == [FACT]


def test_reasons(settings: Build, root: Path, follower: Follower) -> None:
    follower.shared.pods = None
    assert reason_of(follower.read, REASONS) == "pods_unknown"
    found = Follower(settings, root, A)
    root.rmdir()
    assert reason_of(found.read, REASONS) == "no_log_directory"


def test_files_are_closed(follower: Follower, root: Path) -> None:
    log = PodLog(root, A)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(30):
        log.write(FACT)
        log.rotate(f"20260101-0000{i:02d}") if i % 3 else log.restart()
        follower.read(3)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    follower.source.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
