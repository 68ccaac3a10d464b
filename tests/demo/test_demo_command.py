"""The command as people run it: a process of its own, real Prometheus and Alertmanager, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.helpers.beats import in_time, missed_by
from tests.helpers.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.real_time]

COMMAND = [sys.executable, "-m", "lab.demo"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Temporary files go where the test can count them."""
    return {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def running(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [*COMMAND, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Output up to the first line with ``text``; the test's own timeout bounds it."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line.rstrip())
        if text in line:
            return seen
    raise AssertionError("\n".join(seen))


def using(folder: Path) -> dict[int, str]:
    """Command lines of processes that work in ``folder``, by their number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                where = (entry / "cwd").readlink()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if where.is_relative_to(folder):
                found[int(entry.name)] = command
    return found


def refused(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_the_incident_is_seen_from_first_token_to_cleared_alert(
    running: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    def play(slower: int) -> tuple[tuple[int, str], list[str]]:
        process = running("--for", "180", "--speed", str(10 / slower))
        output, _ = process.communicate(timeout=150)
        return (process.returncode, output), missed_by(output)

    status, output = in_time(play)
    assert status == 0, output
    order = [
        "== healthy:",
        r"chat-13b-0: (\w+ -> )?healthy",
        "== incident:",
        r"-> kv_pressure \(saturated\)",
        r"ALERT InferenceKVCachePressure \(warning, tickets\)",
        r"ALERT InferenceSlow \(critical, pager\)",
        "== mitigation:",
        "-> healthy",
        r"CLEARED InferenceSlow \(critical, pager\)",
        "all expected verdicts and alerts were seen",
    ]
    at = 0
    for text in order:
        found = re.compile(text).search(output, at)
        assert found, f"{text!r} is missing or too early:\n{output}"
        at = found.start()
    paged = set(re.findall(r"ALERT (\w+) \(\w+, pager\)", output))
    assert paged == {"InferenceSlow"}
    assert re.search(r"\+ the KV cache is full(?: or nearly full)?: recent peak \d+ % .*, \d+ % now", output)
    assert re.search(r"(200|100|50) times shorter than in production", output)
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
    assert using(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_cleanly(
    number: signal.Signals, running: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = running("--for", "600")
    urls = [line.split()[1] for line in lines_until(process, "shorter than in production") if "http://" in line]
    assert len(urls) == 6
    for url in urls:
        assert url.startswith("http://127.0.0.1:")
        with urlopen(url, timeout=5) as answer:
            assert answer.status == 200
    assert len(using(tmp_path)) == 2
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 130, output
    assert time.monotonic() - began < 10
    assert "interrupted" in output
    assert not re.search(r"^\[ .*s\] ", output.partition("what was seen:")[2], re.M), "the summary comes last"
    assert "Traceback" not in output
    assert using(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_running_even_when_the_demo_is_killed(
    running: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = running("--for", "600")
    lines_until(process, "shorter than in production")
    assert len(using(tmp_path)) == 2
    process.kill()
    process.communicate(timeout=10)
    until(lambda: using(tmp_path) == {})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--for", "10"), "--for: '10' is not allowed; allowed: a number from 60 to 86400"),
        (("--for", "nan"), "--for: 'nan' is not allowed"),
        (("--speed", "0"), "--speed: '0' is not allowed; allowed: a number from 0.01 to 20"),
        (("--speed", "fast"), "--speed"),
        (("--port", "70000"), "--port: '70000' is not allowed; allowed: a whole number from 0 to 65535"),
        (("--scenario", "fire"), "--scenario: 'fire' is not allowed; allowed: kv_pressure, "),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    assert complaint in refused(*arguments)
