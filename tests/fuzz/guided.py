"""``make fuzz ARGS="--guided"``: the same subjects, with cases that coverage guides: what reaches new code is varied.

Needs the package ``atheris`` (libFuzzer for Python, Apache-2.0), which nothing else does. The fuzzer's bytes stand for
the random numbers that a subject draws its case with, so that cases keep their structure. Each subject has a process
of its own, and its corpus under ``build/guided``.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Final

CORPUS: Final = Path(__file__).parents[2] / "build" / "guided"
BYTES: Final = 4096  # of a case; what is drawn beyond follows from these


class DrawnFrom(Random):
    """Random numbers made of bytes: the same bytes draw the same case, and a change of one changes a part of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(hashlib.sha256(data).hexdigest())  # for what is drawn when the bytes are over
        self._bits = int.from_bytes(data)
        self._left = 8 * len(data)

    def getrandbits(self, count: int) -> int:
        """The next bits."""
        if self._left < count:
            return super().getrandbits(count)
        self._left -= count
        found = self._bits & ((1 << count) - 1)
        self._bits >>= count
        return found

    def random(self) -> float:
        """A number below 1."""
        return self.getrandbits(16) / 2**16


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one subject in this process, which ends then."""
    import atheris

    with atheris.instrument_imports(include=["kvpressure"], enable_loader_override=False):
        from tests.fuzz.run import SUBJECTS, failure, keep, quiet

    subject, places = SUBJECTS[name], set[str]()

    def check(data: bytes) -> None:
        case = subject.make(DrawnFrom(data))
        place = failure(subject, case)
        if place is not None and place not in places:
            places.add(place)
            print(f"{name}: {place}: {keep(subject, case)}", flush=True)

    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-max_len={BYTES}", "-print_final_stats=1", "-rss_limit_mb=0"]
    with quiet():
        atheris.Setup([name, *options, str(corpus)], check)
        atheris.Fuzz()


def fuzz_each(names: Iterable[str], minutes: float) -> bool:
    """Fuzz each subject in a process of its own; whether every case held."""
    if find_spec("atheris") is None:
        raise SystemExit("coverage-guided fuzzing needs the package atheris: python -m pip install atheris")
    sound = True
    for name in names:
        command = [sys.executable, "-m", "tests.fuzz.guided", name, str(int(60 * minutes))]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")]
        cases = re.search(r"number_of_executed_units: +(\d+)", done.stderr)
        reached = re.findall(r" cov: (\d+)", done.stderr)
        if cases is None or not reached:
            found.append(f"{name}: ended with status {done.returncode}: {done.stderr[-500:]}")
        else:
            print(f"{name}: {int(cases[1]):,} cases reached {reached[-1]} places", flush=True)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        sound = sound and not found
    return sound


if __name__ == "__main__":
    fuzz(sys.argv[1], int(sys.argv[2]))
