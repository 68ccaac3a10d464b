"""The parent's side of ``nvml_stub.child``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.sources.gpu.nvml_stub import World, environment, write

ROOT = Path(__file__).parents[4]


class Child:
    """A process with an ``NvidiaSource`` over the stub. Use as a context manager."""

    def __init__(self, library: Path | None, world_path: Path, world: World | None = None, **settings: Any) -> None:
        self.world_path = world_path
        if world is not None:
            self.set(world)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sources.gpu.nvml_stub.child"],
            cwd=ROOT,
            env=environment(library, world_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.begin(**settings)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, **settings: Any) -> None:
        """Close the source and begin with a fresh one, as in a new process except for hung threads."""
        self._tell({"op": "new", "settings": settings})

    def set(self, world: World) -> None:
        write(self.world_path, world)

    def read(self) -> dict[str, Any]:
        """One reading: gpus, errors, expected; or reason, fatal, detail; and seconds, threads."""
        return self._tell({"op": "read"})

    def gpus(self) -> list[dict[str, Any]]:
        got = self.read()
        assert "gpus" in got, got
        return got["gpus"]

    def advance(self, seconds: float, drift: float = 0.0) -> None:
        """Move the source's clock, and let it go on by ``drift`` seconds each time it is asked from now on."""
        self._tell({"op": "advance", "seconds": seconds, "drift": drift})

    def calls(self) -> dict[str, int]:
        return self._tell({"op": "calls"})

    def sweep(self, worlds: list[World], reads: int, **settings: Any) -> list[dict[str, Any]]:
        """Readings of a fresh source for each world, ``reads`` apiece, one second apart."""
        texts = [world.render() for world in worlds]
        return self._tell(
            {"op": "sweep", "worlds": texts, "reads": reads, "path": str(self.world_path), "settings": settings}
        )

    def close_source(self) -> None:
        self._tell({"op": "close"})

    def _tell(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"child ended with {self._process.wait()}"
        answer = json.loads(line)
        assert "crash" not in answer, answer["crash"]
        return answer


StartChild = Callable[..., Child]
"""What the fixture ``start`` gives: ``start(world, missing=(), **settings)``."""
