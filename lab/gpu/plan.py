"""The parts, how long they take, and how one is run."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lab.gpu.children import ChildError
from lab.gpu.machine import describe
from lab.gpu.options import Options
from lab.gpu.result import Result

TORCH_SECONDS: Final = 20.0
SPARE: Final = 1.5  # a part may take so much longer than planned, and a minute, before it is ended


@dataclass(frozen=True)
class Part:
    """A module of this folder with ``run(result, options)``. ``seconds``: how long it takes with these options."""

    name: str
    module: str
    what: str
    seconds: Callable[[Options], float]

    def limit(self, options: Options) -> float:
        """After so many seconds it hangs."""
        return SPARE * self.seconds(options) + 60


def _load(options: Options) -> float:
    return options.settle + options.phase


PARTS: Final = (
    Part(
        "calls",
        "calls",
        "every NVML call timed: as started, as uid 65532, as root without capabilities, under load; a fixture "
        "of the GPU",
        lambda o: TORCH_SECONDS + 4 * (0.17 * o.reads + 3),
    ),
    Part(
        "counters",
        "counters",
        "utilization, memory, power and activity beside nvidia-smi query and dmon, in four loads",
        lambda o: TORCH_SECONDS + 6 + 4 * _load(o),
    ),
    Part(
        "loads",
        "levels",
        "a tensor-bound, a DRAM-bound and a host-bound load by each level of evidence",
        lambda o: TORCH_SECONDS + 3 * _load(o),
    ),
    Part(
        "allocator",
        "allocator",
        "torch's allocator in real fragmentation: torch, plugin, exporter, alert, NVML",
        lambda _: TORCH_SECONDS + 40,
    ),
    Part(
        "processes",
        "processes",
        "memory by process beside nvidia-smi, from a pid namespace too; start times",
        lambda _: TORCH_SECONDS + 25,
    ),
    Part(
        "leak",
        "leak",
        "readings each second beside a load: memory, threads, files, throughput with and without",
        lambda o: TORCH_SECONDS + 60 * 1.2 * o.leak_minutes,
    ),
)
NAMES: Final = tuple(part.name for part in PARTS)


def named(name: str) -> Part:
    """The part of that name."""
    return next(part for part in PARTS if part.name == name)


def run_here(part: Part, options: Options) -> Result:
    """Run a part in this process and write its result, whatever happens in it. Raises ``NoGpu``."""
    result = Result(part.name, machine=describe())
    try:
        importlib.import_module(f"lab.gpu.{part.module}").run(result, options)
    except ChildError as error:
        result.failed = str(error)
    except Exception:
        result.failed = traceback.format_exc()
    if result.failed:
        print(f"  FAIL {part.name}: {result.failed.strip().splitlines()[-1]}", flush=True)
    result.write(options.results)
    return result


def listing(options: Options) -> str:
    """What would be done and how long it takes."""
    lines = [f"{part.name:<10} {part.seconds(options) / 60:5.1f} min  {part.what}" for part in PARTS]
    total = sum(part.seconds(options) for part in PARTS) / 60
    return "\n".join([*lines, f"{'all':<10} {total:5.1f} min  (--leak-minutes {options.leak_minutes:g})"])
