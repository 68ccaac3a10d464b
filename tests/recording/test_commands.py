"""``kvpressure replay`` and ``kvpressure record`` as a user runs them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpressure.cli import main
from kvpressure.model.readings import Snapshot
from kvpressure.recording.format import Header
from kvpressure.recording.reader import Reader
from kvpressure.recording.recorder import Recorder
from tests.helpers.command import Capsys, refused, run
from tests.helpers.serve_process import QUIET
from tests.helpers.vllm_server import answering, response
from tests.helpers.waiting import until
from tests.recording.strategies import RECORDINGS, real_pages

pytestmark = pytest.mark.live

KV03 = RECORDINGS / "incidents" / "KV03.jsonl.gz"


@pytest.mark.parametrize("command", [["replay", "--format", "json"], ["replay", "--openmetrics", "OUT"], ["mitigate"]])
def test_half_a_surrogate_pair_in_a_recording_is_printed_as_a_question_mark(command: list[str], tmp_path: Path) -> None:
    odd = "a\ud800b"
    page = f'vllm:num_requests_running{{engine="0",model_name="{odd}"}} 3\n'
    place = dict.fromkeys(("namespace", "pod", "container"), odd)
    entry = {**place, "target": odd, "args": ["--model", odd], "env": {odd: odd}, "exposition": page}
    rest = {"engines": [entry], "gpus": [{"uuid": odd, "name": odd}], "logs": [{**place, "line": odd}]}
    lines = [{"t": 1e9 + 5 * i, **rest} for i in range(4)]
    recording = tmp_path / "odd.jsonl"
    recording.write_text(Header().to_json() + "\n" + "".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(tmp_path / word) if word == "OUT" else word for word in command]
    ran = subprocess.run(
        [sys.executable, "-m", "kvpressure", arguments[0], str(recording), *arguments[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr
    shown = ran.stdout + ((tmp_path / "OUT").read_text() if "OUT" in command else "")
    assert "\\ud800" not in shown
    assert command[0] != "replay" or "a?b" in shown


def test_files_of_a_rotation_are_one_recording(tmp_path: Path, capsys: Capsys) -> None:
    with gzip.open(KV03, "rt") as lines:
        head, *ticks = lines
    for name, part in (("a", ticks[:40]), ("b", ticks[40:])):
        (tmp_path / name).write_text(head + "".join(part))
    assert main(["replay", str(KV03), "--format", "json"]) == 0
    whole = capsys.readouterr().out
    lines = [json.loads(line) for line in whole.splitlines()]
    assert {line["model_name"] for line in lines} == {"Llama-3.1-8B"}
    assert [line["t"] for line in lines] == [1700000000.0 + 5 * i for i in range(109)]
    assert "kv_pressure" in {line["verdict"] for line in lines}
    assert main(["replay", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "json"]) == 0
    assert capsys.readouterr().out == whole


def test_replay_text_shows_changes_and_a_summary(capsys: Capsys) -> None:
    assert main(["replay", str(KV03)]) == 0
    shown = capsys.readouterr().out
    assert "-> kv_pressure (saturated)" in shown
    assert "    for: the KV cache is full" in shown
    assert shown.splitlines()[-1].startswith("inference/vllm-kv03 Llama-3.1-8B engine 0: ")


def test_thresholds_of_the_user_judge(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "t.yaml").write_text("kv_full_ratio: 1\nkv_near_full_ratio: 1\n")
    assert main(["replay", str(KV03), "--format", "json", "--thresholds", str(tmp_path / "t.yaml")]) == 0
    assert all(json.loads(line)["evidence"]["kv_full"] is not True for line in capsys.readouterr().out.splitlines())


def test_damage_is_reported_and_the_rest_replayed(tmp_path: Path, capsys: Capsys) -> None:
    with gzip.open(KV03, "rt") as lines:
        rows = list(lines)
    path = tmp_path / "r.jsonl"
    path.write_text(rows[0] + "".join(row + "broken\n" for row in rows[1:31]))
    assert main(["replay", str(path), "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 30
    assert captured.err.splitlines()[0] == f"{path}:3: not JSON (JSONDecodeError)"
    assert captured.err.splitlines()[-1] == f"{path}: 20 more lines skipped"


def test_a_recording_without_ticks_or_engines_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(Header().to_json() + "\n")
    said = f"kvpressure replay: {path}: no readable tick; allowed: a recording with at least one tick\n"
    assert refused(capsys, f"replay {path}") == said
    path.unlink()
    with Recorder(str(path), Header()) as recorder:
        recorder.write(Snapshot(1e9))
    for command in ("replay", "replay --format json", "diagnose"):
        said = refused(capsys, f"{command} {path}")
        assert f"{path}: the recording contains no engine; allowed: a recording with" in said
    assert run(capsys, f"replay {path} --openmetrics {tmp_path}/series.txt")[0] == 0  # GPUs and health remain


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("", "--openmetrics: :"),
        ("/", "a directory or a device"),
        ("{}", "a directory or a device"),
        ("{}/fifo", "a directory or a device"),
        ("{}/" + "a" * 300, "File name too long"),
        ("{}/r.jsonl", "the recording itself"),
    ],
)
def test_openmetrics_replaces_nothing_but_a_file(tmp_path: Path, capsys: Capsys, out: str, said: str) -> None:
    """The finished file takes the name: as root that would put a file in the place of /dev/stdout."""
    recording = tmp_path / "r.jsonl"
    recording.write_text(Header().to_json() + "\n")
    os.mkfifo(tmp_path / "fifo")
    assert said in refused(capsys, f"replay {recording} --openmetrics", out.format(tmp_path))
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert recording.read_text() == Header().to_json() + "\n"


@pytest.fixture
def engine() -> Iterator[str]:
    """A server that answers with a real page; its metrics URL."""
    with answering(response(real_pages()[0].encode())) as server:
        yield server.url


def record(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "kvpressure", "record", *QUIET, "--interval", "0.1"),
            *("--engine.pace", "fixed"),
            *arguments,
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("KVPRESSURE_")},
    )


def test_record_then_replay(engine: str, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "r.jsonl.gz"
    with record("--out", str(out), "--for", "4", "--engine.target", engine, "--node-name", "here") as process:
        _, error = process.communicate(timeout=30)
    assert process.returncode == 0, error
    assert f"recording to {out}" in error
    with Reader(out, on_problem=lambda problem: pytest.fail(str(problem)), keep_exposition=True) as reader:
        assert reader.header.node == "here"
        assert reader.header.interval_seconds == 0.1
        pages = [page for snapshot in reader for page in snapshot.pages]
    assert len(pages) >= 5
    assert {page.exposition for page in pages} == {real_pages()[0]}
    assert main(["replay", str(out), "--format", "json"]) == 0
    assert {json.loads(line)["model_name"] for line in capsys.readouterr().out.splitlines()} == {"tiny"}


def test_record_to_a_directory_ends_cleanly_on_a_signal(engine: str, tmp_path: Path) -> None:
    with record("--out", str(tmp_path / "flight"), "--engine.target", engine) as process:
        until(lambda: any(file.stat().st_size > 2000 for file in tmp_path.glob("flight/*.part")))
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 0, error
    (file,) = (tmp_path / "flight").iterdir()
    assert file.name.endswith(".jsonl.gz")
    with Reader(file, on_problem=lambda problem: pytest.fail(str(problem))) as reader:
        assert sum(1 for _ in reader) >= 2


def test_record_stops_when_its_file_is_full_and_says_so(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    with record("--out", str(out), "--for", "60", "--max-size", "64KiB", "--engine.target", engine) as process:
        _, error = process.communicate(timeout=30)
    assert process.returncode == 1, error
    assert "has reached 65536 bytes; give a larger --max-size to record more" in error
    assert out.stat().st_size <= 65536
    with Reader(out, on_problem=lambda problem: pytest.fail(str(problem))) as reader:
        assert sum(1 for _ in reader) >= 1


NAMES = "allowed: a file NAME.jsonl or NAME.jsonl.gz, or a directory"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "required: --out"),
        (f"--out {KV03}", "File exists; give a new file in an existing directory that can be written, or a directory"),
        *((f"--out {name} --for 1 --engine.target a", NAMES) for name in ("''", "a.json", "a.gz", "a.jsonl.zst")),
        ("--out x.jsonl --for soon", "--for: 'soon' is not allowed; allowed: 0.01 to 86400 seconds"),
        ("--out x.jsonl --max-size 1", "--max-size: '1' is not allowed; allowed: bytes from 64KiB"),
        ("--out x.jsonl --keep 0", "--keep: '0' is not allowed; allowed: a whole number from 1"),
        ("--out x.jsonl --engine.target nonsense://", "--engine.target"),
    ],
)
def test_record_refuses_in_one_line_and_makes_nothing(
    typed: str, says: str, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, f"record {typed}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [["--engine.target", "http://127.0.0.1:9"], ["http://127.0.0.1:9"], []])
def test_a_recording_of_nothing_is_no_success(target: list[str], tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "nothing.jsonl"
    if not target:
        (tmp_path / "c.yaml").write_text("engine.target: [http://127.0.0.1:9]\n")
        target = ["--config", str(tmp_path / "c.yaml")]
    assert main(["record", "--no-collector.processes", *target, "--out", str(out), "--for", "2"]) == 1
    said = capsys.readouterr().err
    assert "nothing was recorded: no GPU could be read, and no engine could be scraped (http://" in said
    assert "(http://127.0.0.1:9/metrics: connection refused)" in said
