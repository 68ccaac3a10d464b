"""Reading recordings: real ones, damaged ones, hostile ones, long ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.errors import InputError
from kvpressure.model.readings import Snapshot
from kvpressure.recording import reader as reader_module
from kvpressure.recording.format import Header
from kvpressure.recording.reader import Reader, ReadProblem
from tests.recording.strategies import RECORDINGS, real_pages

pytestmark = pytest.mark.slow

HEADER = Header(1.0, "node-1", "test").to_json()
TICKS = [json.dumps({"t": 100.0 + i, "gpus": [{"uuid": "a", "index": 0, "vendor": "nvidia"}]}) for i in range(50)]


def read(path: Path) -> tuple[list[Snapshot], list[ReadProblem]]:
    problems: list[ReadProblem] = []
    with Reader(path, on_problem=problems.append) as recording:
        return list(recording), problems


def lines(*rows: str) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def test_a_failure_in_free_words_becomes_one_of_the_reasons() -> None:
    snapshots, _ = read(RECORDINGS / "incidents" / "PRB1.jsonl.gz")
    assert {page.error for snapshot in snapshots for page in snapshot.pages} == {None, "timeout", "refused"}
    assert {page.exposition for snapshot in snapshots for page in snapshot.pages} == {None}, "kept only on demand"


def test_plain_and_gzip_files_are_told_apart_by_content(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.gz", tmp_path / "b.jsonl"
    plain.write_bytes(lines(HEADER, *TICKS))
    zipped.write_bytes(gzip.compress(lines(HEADER, *TICKS)))
    assert read(plain) == read(zipped)
    assert len(read(plain)[0]) == 50


def test_malformed_lines_are_reported_with_their_number_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines(HEADER, TICKS[0], "{broken", "", TICKS[1], '{"t": "x"}', TICKS[2]) + TICKS[1][:20].encode())
    snapshots, problems = read(path)
    assert [snapshot.time for snapshot in snapshots] == [100.0, 101.0, 102.0]
    assert [problem.line for problem in problems] == [3, 6, 8]
    assert "expected Unix seconds" in problems[1].text
    assert problems[2].text.startswith("cut off")


def test_gzip_cut_off_anywhere_gives_what_was_whole(tmp_path: Path) -> None:
    whole = gzip.compress(lines(HEADER, *TICKS[:25])) + gzip.compress(lines(*TICKS[25:]))
    first = len(gzip.compress(lines(HEADER, *TICKS[:25])))
    path = tmp_path / "r.jsonl.gz"
    for end in range(first + 1, len(whole)):
        path.write_bytes(whole[:end])
        snapshots, problems = read(path)
        assert len(snapshots) >= 25
        assert [s.time for s in snapshots] == [100.0 + i for i in range(len(snapshots))]
        assert problems, end


def test_garbage_after_a_member_ends_the_recording_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(lines(HEADER, *TICKS)) + b"garbage")
    snapshots, problems = read(path)
    assert len(snapshots) == 50
    assert "file ends here" in problems[0].text


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_break_the_reader(data: bytes, zipped: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "r"
        body = lines(HEADER) + data
        path.write_bytes(gzip.compress(body) if zipped else body)
        read(path)
        path.write_bytes(data)
        with pytest.raises(InputError):
            read(path)


def test_a_line_longer_than_allowed_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines(HEADER, TICKS[0], '{"t": 1, "x": "' + "y" * 5000 + '"}', TICKS[1]))
    snapshots, problems = read(path)
    assert [snapshot.time for snapshot in snapshots] == [100.0, 101.0]
    assert problems == [ReadProblem(3, "longer than 1000 bytes")]


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    tick = json.dumps({"engines": [{"target": "x", "exposition": real_pages()[0]}]})[1:]

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as out:
            out.write(HEADER + "\n")
            out.writelines(f'{{"t": {1000 + i}, {tick}\n' for i in range(count))
        tracemalloc.start()
        try:
            with Reader(path) as recording:
                assert sum(1 for _ in recording) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(5)  # imports and caches
    assert peak(200) < 1.2 * peak(20)


def test_targets_that_come_and_go_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("w") as out:
        out.write(HEADER + "\n")
        out.writelines(
            json.dumps({"t": i, "engines": [{"target": str(i), "exposition": "x 1\n"}]}) + "\n" for i in range(3000)
        )
    with Reader(path) as recording:
        assert sum(1 for _ in recording) == 3000
        assert len(recording._scanners) <= reader_module._MAX_SCANNERS


@pytest.mark.attack("a packed bomb in a recording", "costs its line")
@pytest.mark.writer(
    "whoever hands you a recording",
    "a packed bomb, damaged or forged lines",
    "the tick of that line is lost",
    "bytes and values per line; a bad line is reported and skipped",
)
@pytest.mark.parametrize(
    "bomb", ["[" + "[]," * 2_000_000 + "[]]", "[" + "0," * 4_000_000 + "0]", '"' + "y" * 40_000_000 + '"']
)
def test_a_packed_bomb_costs_its_line_and_little_memory(tmp_path: Path, bomb: str) -> None:
    """A file of some kilobytes took 229 MiB."""
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(lines(HEADER, TICKS[0], f'{{"t": 1, "x": {bomb}}}', TICKS[1])))
    code = (
        "import resource, sys; from kvpressure.recording.reader import Reader; problems = [];"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "ticks = [tick.time for tick in Reader(sys.argv[1], on_problem=problems.append)];"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; print(len(ticks), len(problems), after - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    ticks, problems, more_kib = map(int, done.stdout.split())
    assert (ticks, problems) == (2, 1)
    assert more_kib < 96 * 1024
