"""What ``diagnose``, ``probe`` and ``mitigate --verify`` say about a real vLLM under each load shape: ``make
live-transcripts``.

The outputs stay in ``.vllm/transcripts``, one file a shape, so that the shapes can run in pieces; the page is made of
all that are there. Usage: transcripts.py PAGE.md [--only SHAPE...]
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from session import ROOT, SERVER_ENV, free_port, process, server_command, wait_for

MODEL = ".vllm/small-llama"
STORE = ROOT / ".vllm" / "transcripts"
PRESSURE = "closed --clients 48 --prompt 300 500 --output 400 900"
RAMP_SECONDS = 12
LONGEST_LOAD = 400
_TITLED = re.compile(r"  \d ")


@dataclass(frozen=True)
class Shape:
    """A load, and what is asked while it lasts. ``load`` None = nobody sends anything; ``then`` is the load during the
    last command; ``repeat`` sends the load again and again, this many seconds apart. ``{url}`` and ``{args}`` stand for
    the server.
    """

    name: str
    title: str
    load: str | None
    commands: tuple[str, ...]
    seqs: int = 64
    then: str | None = None
    repeat: float | None = None


LOOK = "diagnose {url} --args={args} --seconds 25"
PROBE = "probe {url} --yes --max-requests 12 --max-tokens 40000 --model-config .vllm/small-llama"
VERIFY = "mitigate --verify {url} --args={args} --verify-seconds 40"
SHAPES = (
    Shape("idle", "Nobody sends anything", None, (LOOK, PROBE, "mitigate {url} --args={args} --seconds 10", VERIFY)),
    Shape(
        "steady",
        "Eight clients, 150 to 250 tokens in and out",
        "closed --clients 8 --prompt 150 250 --output 150 250",
        (LOOK, PROBE, VERIFY),
    ),
    Shape(
        "pressure",
        "48 clients, 300 to 500 tokens in and 400 to 900 out: more than the cache holds",
        PRESSURE,
        (
            LOOK,
            "mitigate {url} --args={args} --seconds 25",
            PROBE,
            "mitigate --verify {url} --args={args} --verify-seconds 20",
        ),
    ),
    Shape(
        "recovery",
        "The same, and during the watch the load of clients that obey caps: 8 of them, 100 to 200 tokens in and 50 to"
        " 100 out",
        PRESSURE,
        ("mitigate --verify {url} --args={args} --verify-seconds 120",),
        then="closed --clients 8 --prompt 100 200 --output 50 100",
    ),
    Shape(
        "burst",
        "Load test with bursts: 60 requests at once, every 20 seconds",
        "burst --clients 60 --prompt 50 100 --output 40 80",
        (LOOK, PROBE, VERIFY),
        repeat=20.0,
    ),
    Shape(
        "long-prompts",
        "Load test with long prompts: four clients, 1 500 to 1 900 tokens in and 16 to 32 out",
        "closed --clients 4 --prompt 1500 1900 --output 16 32",
        (LOOK, PROBE, VERIFY),
    ),
    Shape(
        "sequence-limit",
        "`--max-num-seqs 4` and sixteen clients",
        "closed --clients 16 --prompt 100 150 --output 100 200",
        (LOOK, "mitigate {url} --args={args} --seconds 15", PROBE, VERIFY),
        seqs=4,
    ),
)


@contextmanager
def sending(port: int, load: str | None, repeat: float | None = None) -> Iterator[None]:
    """Clients that send ``load`` until the block ends."""
    if load is None:
        yield
        return
    mode, *options = load.split()
    command = [sys.executable, str(ROOT / "lab/vllm/load.py"), str(port), mode]
    if repeat is None:
        command += [str(LONGEST_LOAD), *options]
    else:
        again = shlex.join(
            [*command, str(repeat - 1), *options]
        )  # other prompts each time, or all would stand in the prefix cache
        command = ["/bin/sh", "-c", f"n=1; while true; do {again} --seed $n; n=$((n + 1)); sleep 1; done"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        subprocess.run(["kill", "--", f"-{child.pid}"], check=False)
        child.wait()


def ask(command: str, port: int, seqs: int) -> dict[str, object]:
    """Run one command of kvpressure and keep what it printed."""
    args = shlex.quote(f"--max-num-seqs {seqs} --max-model-len 2048")
    words = shlex.split(command.format(url=f"http://127.0.0.1:{port}", args=args))
    began = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-m", "kvpressure", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    shown = command.format(url="http://127.0.0.1:8000", args=args)
    found = {
        "command": f"kvpressure {shown}",
        "output": (said.stdout + said.stderr).replace(f":{port}", ":8000"),
        "status": said.returncode,
        "seconds": round(time.monotonic() - began),
    }
    print(f"$ {found['command']}\n{found['output']}[exit {found['status']}, {found['seconds']} s]\n", flush=True)
    return found


def run(shapes: list[Shape]) -> None:
    """All shapes of one server."""
    port = free_port()
    command = [*server_command(MODEL, port), "--max-num-seqs", str(shapes[0].seqs)]
    with process(command, SERVER_ENV, STORE / "vllm.log"):
        wait_for(f"http://127.0.0.1:{port}/health", 240)
        for shape in shapes:
            if shape.then is not None:
                told = _changing(shape, port)
            else:
                with sending(port, shape.load, shape.repeat):
                    time.sleep(RAMP_SECONDS)
                    told = [ask(text, port, shape.seqs) for text in shape.commands]
            (STORE / f"{shape.name}.json").write_text(json.dumps(told, indent=1))
            time.sleep(3)


def _changing(shape: Shape, port: int) -> list[dict[str, object]]:
    """The last command, while the load gives way to another."""
    found: list[dict[str, object]] = []
    asker = threading.Thread(target=lambda: found.append(ask(shape.commands[-1], port, shape.seqs)))
    with sending(port, shape.load):
        time.sleep(2 * RAMP_SECONDS)
        asker.start()
        time.sleep(RAMP_SECONDS)
    with sending(port, shape.then):
        asker.join()
    return found


# --- the page ---------------------------------------------------------------------------------------------


def page() -> str:
    """Everything that was ever run."""
    lines = [
        "# Transcripts: a real vLLM by load shape",
        "",
        (
            "Written by `make -C lab live-transcripts` (`lab/vllm/transcripts.py`): vLLM 0.32.0 on the CPU, 77 M"
            " parameters of random Llama, two cores,"
        ),
        (
            "255 usable KV blocks of 32 tokens (8 160 tokens), `--max-num-seqs 64` where nothing else is said. Outputs"
            " are as printed; where triage"
        ),
        "and common problems repeat, only what is worth a look is left, and `[...]` stands for the rest.",
        "",
    ]
    for shape in SHAPES:
        file = STORE / f"{shape.name}.json"
        if not file.exists():
            continue
        lines += [f"## {shape.title}", ""]
        for told in json.loads(file.read_text()):
            complete = shape.name == "pressure" or not told["command"].startswith("kvpressure diagnose")
            output = told["output"].rstrip() if complete else shortened(told["output"])
            lines += ["```", f"$ {told['command']}", output, f"[exit {told['status']}, {told['seconds']} s]", "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def shortened(output: str) -> str:
    """A diagnosis with only those steps of its triage that are worth a look."""
    kept: list[str] = []
    section, shown = "", True
    for line in output.rstrip().splitlines():
        if line in ("triage", "common problems", "next"):
            section, shown = line, True
            kept += [""] if kept and kept[-1] else []
        elif section == "triage" and _TITLED.match(line):
            shown = line[4:8].strip() in ("look", "BAD")
        elif section == "common problems" and not line.startswith("       "):
            shown = line.startswith("  YES") or not line
        if shown:
            kept.append(line)
        elif kept[-1] != "  [...]":
            kept.append("  [...]")
    return "\n".join(kept)


def main() -> None:
    """Run what was asked for, then write the page of all that was ever run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--only", nargs="*", choices=[shape.name for shape in SHAPES], default=[shape.name for shape in SHAPES]
    )
    options = parser.parse_args()
    STORE.mkdir(parents=True, exist_ok=True)
    for seqs in dict.fromkeys(shape.seqs for shape in SHAPES):
        wanted = [shape for shape in SHAPES if shape.seqs == seqs and shape.name in options.only]
        if wanted:
            run(wanted)
    options.page.write_text(page())
    print(f"transcripts: wrote {options.page}")


if __name__ == "__main__":
    main()
