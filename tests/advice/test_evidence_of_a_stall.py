"""The printed command for the evidence of a stall, really run: which processes it takes, and what it saves where their
stacks cannot be read.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import Diagnosis
from kvpressure.settings.thresholds import builtin
from tests.helpers.waiting import until
from tests.publish.states import full_engine

pytestmark = pytest.mark.live

SLEEP = ("-c", "import time; time.sleep(60)")
OF_VLLM = (
    ("VLLM::EngineCore",),
    ("VLLM::EngineCore_DP0",),
    ("VLLM::Worker_TP1",),
    ("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m"),
    ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
)
OF_SGLANG = (
    ("sglang::scheduler_TP0",),
    ("sglang::detokenizer",),
    ("python3", "-m", "sglang.launch_server", "--model-path", "m"),
    ("/usr/bin/python3", "/usr/local/bin/sglang", "serve", "m"),
)
WORKERS = (
    ("ray::RayWorkerWrapper.execute_method",),
    ("python3", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"),
)
OTHERS = (
    ("pip", "install", "vllm-doctor"),
    ("pip", "install", "vllm", "sglang"),
    ("/usr/bin/python3", "/usr/local/bin/vllm-htop"),
    ("less", "/var/log/vllm/server.log"),
    ("nginx: worker process",),
)


def _started(pid: int) -> bool:
    """Whether the process has its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().count(b"\0") > 2


@pytest.fixture
def processes() -> Iterator[dict[tuple[str, ...], int]]:
    """Running processes with these command lines, by pid; the arguments come after those of the interpreter."""
    all_lines = (*OF_VLLM, *OF_SGLANG, *WORKERS, *OTHERS)
    started = {
        line: subprocess.Popen([line[0], *SLEEP, *line[1:]], executable=sys.executable, start_new_session=True)
        for line in all_lines
    }
    for process in started.values():
        until(partial(_started, process.pid))
    yield {line: process.pid for line, process in started.items()}
    for process in started.values():
        process.kill()
        process.wait()


def printed(dialect: str, pod: bool) -> str:
    """The command for the stacks, as a shell on this machine would run it beside the server."""
    key = EngineKey("prod", "chat-0", "m", "0") if pod else EngineKey("", "127.0.0.1:8000", "m", "0")
    engine = replace(full_engine(), key=key, dialect=dialect, diagnosis=Diagnosis("stalled", 1.0, None, 0.0))
    (command,) = (
        command
        for action in plan(engine, builtin()).actions
        for command in action.commands
        if command.endswith("> stacks.txt")
    )
    if not pod:
        return command
    words = shlex.split(command)
    assert words[:4] == ["kubectl", "exec", "-n", "prod"]
    return f"{shlex.join(words[words.index('--') + 1 : -2])} > stacks.txt"


def run(command: str, folder: Path, py_spy: str | None) -> tuple[str, int]:
    """What is saved, and the pid of the shell. ``py_spy``: a script in its place, None = it is not installed."""
    binaries = folder / "bin"
    binaries.mkdir()
    if py_spy is not None:
        (binaries / "py-spy").write_text(f"#!/bin/sh\n{py_spy}\n")
        (binaries / "py-spy").chmod(0o755)
    path = f"{binaries}:/usr/bin:/bin"
    with subprocess.Popen(["/bin/sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path}) as shell:
        assert shell.wait(60) == 0
    return (folder / "stacks.txt").read_text(), shell.pid


@pytest.mark.parametrize("pod", [True, False])
@pytest.mark.parametrize(("dialect", "own"), [("vllm", OF_VLLM), ("sglang", OF_SGLANG)])
def test_every_process_of_the_server_is_taken_and_no_other(
    tmp_path: Path,
    processes: dict[tuple[str, ...], int],
    dialect: str,
    own: Sequence[tuple[str, ...]],
    pod: bool,
) -> None:
    said, shell = run(printed(dialect, pod), tmp_path, 'echo "STACKS OF $3"')
    taken = {int(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("STACKS OF")}
    wanted = (*own, *WORKERS) if pod else own
    assert {line for line, pid in processes.items() if pid in taken} == set(wanted)
    assert shell not in taken
    for line in wanted:
        assert f"== {processes[line]} {line[0]} " in said


@pytest.mark.parametrize(
    "py_spy", [None, 'echo "Error: Permission Denied: Try running again with elevated permissions"; exit 1']
)
def test_without_stacks_the_state_of_every_thread_is_saved(
    tmp_path: Path, processes: dict[tuple[str, ...], int], py_spy: str | None
) -> None:
    said, _ = run(printed("vllm", True), tmp_path, py_spy)
    pid = processes["VLLM::EngineCore",]
    assert f"/proc/{pid}/task/{pid}/status:State:\t" in said
    assert f"/proc/{pid}/task/{pid}/wchan:" in said
    assert ("Permission Denied" if py_spy else "py-spy: not found") in said
