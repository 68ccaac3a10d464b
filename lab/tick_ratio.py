"""CPU of a tick of one engine, of two source trees in turns: signals, diagnosis and what joins them, without I/O.

``python -m lab.tick_ratio OLD NEW [--rounds N | --instructions]``; each is a checkout of this repository
(``git worktree add``). Each tree has a process of its own that replays the same recordings again and again. Turns
cancel out what else the machine does. ``--instructions`` counts instructions with valgrind, which no other work on the
machine changes: those of two rounds less those of one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

RECORDINGS: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings"
PLAYED: Final = ("vllm-cpu/d_kv_pressure", "h100/llama-2-7b-169", "vllm-cpu-fresh/agents")
WORKER: Final = """
import gc, sys, time
try:
    from kvpressure.pipeline.pipeline import Pipeline
except ImportError:  # a tree from before there was a package
    from kvpressure.pipeline import Pipeline
from kvpressure.recording.reader import Reader
played = []
for name in sys.argv[1:]:
    with Reader(name) as reader:
        played.append(list(reader))
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 20)
print("ready", flush=True)
for _ in sys.stdin:
    begin = time.process_time()
    for snapshots in played:
        pipeline = Pipeline()
        for snapshot in snapshots:
            pipeline.observe(snapshot)
    print((time.process_time() - begin) / sum(map(len, played)), flush=True)
"""


def _worker() -> list[str]:
    return [sys.executable, "-c", WORKER, *(str(RECORDINGS / f"{name}.jsonl.gz") for name in PLAYED)]


def _environment(path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{path}/exporter:{path}/plugin", "PYTHONHASHSEED": "0"}


def instructions(path: str, rounds: int) -> int:
    """Instructions of a process of this checkout that replays the recordings ``rounds`` times."""
    with tempfile.NamedTemporaryFile() as out:
        counted = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out.name}", *_worker()],
            input="\n" * rounds,
            capture_output=True,
            text=True,
            env=_environment(path),
            check=True,
        )
    found = re.search(r"Collected : (\d+)", counted.stderr)
    if found is None:
        raise SystemExit(f"{path}: valgrind counted nothing: {counted.stderr[-200:]}")
    return int(found[1])


class Tree:
    """A checkout, and its process that replays on demand."""

    def __init__(self, path: str) -> None:
        self.path, self.seconds = path, list[float]()
        self._process = subprocess.Popen(
            _worker(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(path)
        )
        self._read()

    def play(self) -> None:
        """One turn: every recording once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.seconds.append(float(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.path}: no answer; is it a checkout of this repository?")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the cost of a tick for each tree, and the ratio of the second to the first."""
    parser = argparse.ArgumentParser(prog="python -m lab.tick_ratio", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args(argv)
    if options.instructions:
        counts = [instructions(path, 2) - instructions(path, 1) for path in (options.old, options.new)]
        for path, count in zip((options.old, options.new), counts, strict=True):
            print(f"{path}: {count / 1e6:.0f} million instructions a round")
        print(f"ratio {counts[1] / counts[0]:.2f}")
        return
    trees = [Tree(options.old), Tree(options.new)]
    for _ in range(options.rounds):
        for tree in trees:
            tree.play()
    for tree in trees:
        tree.close()
        print(f"{tree.path}: {median(tree.seconds) * 1e6:.0f} µs a tick (least {min(tree.seconds) * 1e6:.0f})")
    old, new = (tree.seconds for tree in trees)
    print(f"ratio {median(b / a for a, b in zip(old, new, strict=True)):.2f} (of the least: {min(new) / min(old):.2f})")


if __name__ == "__main__":
    main()
