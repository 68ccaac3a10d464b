"""Loads on GPU 0 by torch, of known kind: ``python -m lab.gpu.load [--device cuda] [--gib 8]``.

Reads kinds from stdin, one a line, and works on the last one until ``stop``:

* ``tensor``: products of large bf16 matrices, bound by the tensor cores (a prefill);
* ``dram``: products of a few rows with several GiB of weights, bound by reading them (decode);
* ``host``: tiny kernels and then a pause, bound by the host;
* ``hold``: the memory of the weights and nothing else;
* ``idle``: nothing.

Prints one JSON line when ready (``{"ready": ...}`` or ``{"error": why}``), and one each second:
``{"t": Unix seconds, "kind", "seconds", "steps", "flops", "bytes"}``. Plain allocations only, at most ``--gib`` and a
half.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from lab.gpu.children import Child, ChildError, module

GIB: Final = 2**30
START_SECONDS: Final = 120.0  # torch may come from a cold disk
SHARE_OF_FREE: Final = 0.5
ROWS: Final = 4
HOST_PAUSE_SECONDS: Final = 0.03
HOST_KERNELS: Final = 5


@dataclass
class Work:
    """One kind of load. ``step`` does a bit of it; ``flops`` and ``bytes`` are those of a step."""

    step: Callable[[], None]
    flops: float = 0.0
    bytes: float = 0.0


@dataclass
class Loads:
    """The kinds, made when first wanted."""

    torch: Any
    device: str
    gib: float
    side: int
    _weights: list[Any] = field(default_factory=list)
    _made: dict[str, Work] = field(default_factory=dict)

    def get(self, kind: str) -> Work:
        """The work of that kind; ``KeyError`` for another."""
        if kind not in self._made:
            makers = {"tensor": self._tensor, "dram": self._dram, "host": self._host, "hold": self._hold, "idle": _idle}
            self._made[kind] = makers[kind]()
        return self._made[kind]

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)

    def _tensor(self) -> Work:
        left, right = self._random(self.side, self.side), self._random(self.side, self.side)
        out = self.torch.empty_like(left)
        return Work(lambda: self.torch.mm(left, right, out=out), 2.0 * self.side**3, 6.0 * self.side**2)

    def _fill(self) -> list[Any]:
        if not self._weights:
            layers = max(1, int(self.gib * GIB / (8 * self.side**2)))
            self._weights = [self._random(self.side, 4 * self.side) for _ in range(layers)]
        return self._weights

    def _dram(self) -> Work:
        weights, rows = self._fill(), self._random(ROWS, self.side)

        def step() -> None:
            for weight in weights:
                self.torch.mm(rows, weight)

        size = sum(weight.numel() * 2.0 for weight in weights)
        return Work(step, ROWS * size, size)

    def _host(self) -> Work:
        tiny = self._random(16, 16)

        def step() -> None:
            for _ in range(HOST_KERNELS):
                tiny.mul_(1.0)
            self.wait()
            time.sleep(HOST_PAUSE_SECONDS)

        return Work(step)

    def _hold(self) -> Work:
        self._fill()
        return _idle()


def _idle() -> Work:
    return Work(lambda: time.sleep(0.1))


class Running:
    """The load in a process of its own, with the reports it made. Use as a context manager.

    Raises ``ChildError`` at the start where there is no torch, or none that can use the GPU.
    """

    def __init__(self, *arguments: str) -> None:
        self._child = Child(module("load", *arguments))
        self.reports: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Running:
        try:
            self.facts = self._child.answer(START_SECONDS)["ready"]
        except ChildError:
            self._child.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__(None, None, None)

    @property
    def pid(self) -> int:
        """Of the process that holds the GPU."""
        return self._child.process.pid

    def switch(self, kind: str) -> None:
        """Do another kind from now on."""
        self._child.tell(kind)

    def collect(self) -> list[dict[str, Any]]:
        """All reports so far. Raises ``ChildError`` when the load has died."""
        self.reports += [json.loads(line) for line in self._child.heard()]
        if self._child.process.poll() is not None:
            raise ChildError(f"the load ended: {self._child.last_words()}")
        return self.reports

    def rates(self, kind: str, since: float, until: float) -> list[dict[str, float]]:
        """Steps, FLOPs and bytes per second of each report of that kind that lies in the time."""
        return [
            {name: report[name] / report["seconds"] for name in ("steps", "flops", "bytes")}
            for report in self.collect()
            if report["kind"] == kind
            and report["seconds"] > 0
            and since <= report["t"] - report["seconds"]
            and report["t"] <= until
        ]


def _start(arguments: argparse.Namespace) -> Loads:
    torch: Any = importlib.import_module("torch")
    if arguments.device == "cpu":
        return Loads(torch, "cpu", arguments.gib, 128)
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    return Loads(torch, arguments.device, min(arguments.gib, SHARE_OF_FREE * free / GIB), 8192)


def _work(loads: Loads, wanted: list[str]) -> None:
    while (kind := wanted[-1]) != "stop":
        work = loads.get(kind)
        work.step()
        loads.wait()
        began, steps = time.time(), 0
        while time.time() - began < 1.0 and wanted[-1] == kind:
            work.step()
            loads.wait()
            steps += 1
        now = time.time()
        print(
            json.dumps(
                {
                    "t": now,
                    "kind": kind,
                    "seconds": now - began,
                    "steps": steps,
                    "flops": steps * work.flops,
                    "bytes": steps * work.bytes,
                }
            ),
            flush=True,
        )


def main() -> None:
    """Work until told to stop, or until nobody is there to tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=8.0)
    wanted = ["idle"]

    def listen() -> None:
        for line in sys.stdin:
            wanted.append(line.strip())
        wanted.append("stop")

    try:
        loads = _start(parser.parse_args())
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    name = loads.torch.cuda.get_device_name() if loads.device != "cpu" else "cpu"
    print(json.dumps({"ready": {"torch": loads.torch.__version__, "device": name, "gib": loads.gib}}), flush=True)
    threading.Thread(target=listen, daemon=True).start()
    _work(loads, wanted)


if __name__ == "__main__":
    main()
