"""Commands whose standard streams are full, closed, or of an old encoding: one clear line, never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

RECORDING = Path(__file__).parents[1] / "fixtures/recordings/vllm-cpu/d_kv_pressure.jsonl.gz"
COMMANDS = {
    "diagnose": f"diagnose {RECORDING}",
    "lines": f"replay {RECORDING} --format json",
    "help": "--help",
}
STATUS = {"diagnose": 1}


def shell(command: str, redirect: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.quote(sys.executable)} -m kvpressure {command} {redirect}"
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        timeout=120,
        check=False,
        encoding="utf-8",
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_said_in_one_line(name: str) -> None:
    done = shell(COMMANDS[name], ">/dev/full")
    assert done.returncode == 3
    assert done.stderr == "kvpressure: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing_else(name: str, closed: str) -> None:
    done = shell(COMMANDS[name], closed)
    assert done.returncode == STATUS.get(name, 0)
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_seen_enough(name: str) -> None:
    done = shell(COMMANDS[name], "| head -n 1; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, STATUS.get(name, 0))
    assert done.stderr == ""


def test_an_old_locale_costs_a_sign_and_not_the_answer() -> None:
    done = shell(COMMANDS["diagnose"], "", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "VERDICT  KV PRESSURE" in done.stdout


def test_what_was_not_asked_for_stays_out_of_json(tmp_path: Path) -> None:
    """Without standard error its lines must not go to standard output."""
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(RECORDING.read_bytes()[:20_000])
    done = shell(f"replay {cut} --format json", "2>&-")
    assert done.returncode == 0
    assert all(line.startswith("{") for line in done.stdout.splitlines())
