"""SGLang's log lines and command lines become events and arguments; nothing but numbers and fixed words
leaves the node.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpressure.engines.sglang import arguments, log_lines

LOGS = Path(__file__).parents[2] / "fixtures" / "sglang" / "logs"


def events(name: str) -> list[str | None]:
    lines = (LOGS / name).read_text().splitlines()
    found = [log_lines.recognise(log_lines.strip(line)) for line in lines]
    return [event.event if event else None for event in found]


def test_lines_are_recognised() -> None:
    expected = {
        "0.4.1_retract.log": ["stats", "stats", "preemption", None],  # the last one is of a further rank
        "0.4.9_start.log": ["weights_bytes", "capacity", None, "capacity"],
        "0.5.13_start.log": ["capacity"],
        "0.5.14_retract.log": ["stats", "preemption", "stats"],
        "0.5.6_decode.log": ["stats", "preemption"],
        "0.5.16_pd.log": ["stats", "stats"],
    }
    assert {name: events(name) for name in expected} == expected


def test_the_start_up_line_has_the_true_limits() -> None:
    (line,) = (LOGS / "0.5.13_start.log").read_text().splitlines()
    event = log_lines.recognise(log_lines.strip(line))
    assert event.facts == {
        "capacity_tokens": 2086558.0,
        "max_num_batched_tokens": 8192.0,
        "max_num_seqs": 33.0,
        "max_model_len": 256000.0,
    }


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.name)
def test_what_is_kept_of_a_line_says_the_same(path: Path) -> None:
    for line in path.read_text().splitlines():
        kept = log_lines.public_line(line)
        event = log_lines.recognise(log_lines.strip(line))
        assert (None if kept is None else log_lines.recognise(kept)) == event


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--max-running-requests", "64", "--tp", "2"],
        ["sh", "-c", "exec python3 -m sglang.launch_server --model m --max-running-requests=64 --tp-size 2"],
        ["sglang", "serve", "--model-path", "m", "--max-running-requests", "64", "--tensor-parallel-size", "2"],
    ],
)
def test_command_lines_are_read(argv: list[str]) -> None:
    read = arguments.read(argv)
    assert read.starts_server
    assert (read.args.model, read.args.max_num_seqs, read.args.tensor_parallel_size) == ("m", 64, 2)


def test_no_secret_leaves_in_a_command_line() -> None:
    read = arguments.read(["python3", "-m", "sglang.launch_server", "--api-key", "sk-geheim", "--model-path", "m"])
    words = arguments.PUBLIC.command(read.args)
    assert "sk-geheim" not in " ".join(words)
    assert "--model-path=m" in words
