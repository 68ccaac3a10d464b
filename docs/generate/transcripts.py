"""``docs/transcripts.md``: what the commands print for a recording of a real vLLM. ``python -m
docs.generate.transcripts [--check]``.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path
from typing import Final

from kvpressure.cli import main as kvpressure

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "transcripts.md"
_RECORDED: Final = "tests/fixtures/recordings/vllm-cpu"
SHOWN: Final = (
    (
        "KV pressure: diagnose",
        "The recording shows vLLM 0.32 on a CPU with 48 clients and a KV cache of 8 192 tokens.",
        f"diagnose {_RECORDED}/d_kv_pressure.jsonl.gz",
    ),
    (
        "KV pressure: mitigate",
        "The values of the plan are for the server in the recording.",
        f"mitigate {_RECORDED}/d_kv_pressure.jsonl.gz",
    ),
    (
        "KV pressure: replay",
        "Each line of the output shows what changed, when, and the evidence at that time.",
        f"replay {_RECORDED}/d_kv_pressure.jsonl.gz --to 20",
    ),
    (
        "An idle server: mitigate",
        "No plan is printed when KV pressure is not the cause.",
        f"mitigate {_RECORDED}/a_idle.jsonl.gz",
    ),
    (
        "Audit of a command line",
        "Failed items come first. `--all` also gives reasons for the items that did not fail.",
        "audit --args='vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64' --vllm-version 0.11.2 --gpu L40S:48",
    ),
    (
        "Capacity",
        "`capacity` computes what fits on one GPU, and the limits to set.",
        "capacity llama-3.1-8b --gpu-memory 80GiB --prompt p50=1000,p95=4000,p100=9000 --output 500 --concurrency 40",
    ),
)
_HEAD: Final = """\
# Transcripts

Written by `python -m docs.generate`, which runs these commands on recordings in this repository.
Run the commands in a terminal to see colours.
`make -C lab live-transcripts` runs them against a real vLLM on this machine.
"""


def render() -> str:
    """The page."""
    blocks = [_HEAD]
    for title, text, command in SHOWN:
        status, printed = _run(command)
        blocks.append(
            f"## {title}\n\n{text}\n\n```\n$ kvpressure {command}\n{printed.rstrip()}\n[exit {status}]\n```\n"
        )
    return "\n".join(blocks)


def _run(command: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = kvpressure(shlex.split(command))
    return status, out.getvalue()


def main(check: bool = False) -> int:
    """Write the page, or with ``check`` return 1 if it is out of date."""
    text = render()
    if check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        if not same:
            print(f"{PAGE.relative_to(ROOT)}: out of date; run python -m docs.generate", file=sys.stderr)
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0
