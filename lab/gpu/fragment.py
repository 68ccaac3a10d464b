"""Drives torch's caching allocator into fragmentation, with kvpressure's plugin in the process as it is in vLLM.

Reads commands from stdin (``fill``, ``fragment``, ``fail``, ``release``) and answers each with one JSON line: torch's
own figures under the plugin's names, and what the driver says is free. Bounded by ``set_per_process_memory_fraction``;
plain allocations only.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Final

from kvpressure_vllm import register
from kvpressure_vllm.allocator import KEYS

COUNTS: Final = (("alloc_retries", "num_alloc_retries"), ("ooms", "num_ooms"))  # of allocations, which torch keeps
GIB: Final = 2**30
WEIGHTS_BYTES: Final = GIB
PIECE_BYTES: Final = 5 * 2**20  # four share one of torch's 20 MiB segments, so that three of them cannot be given back
KEPT_OF: Final = 4
MOST_BYTES: Final = 10 * GIB
SHARE_OF_FREE: Final = 0.6
ROOM_BYTES: Final = 256 * 2**20


class Fragments:
    """The process's memory: weights that stay, and pieces that come and go."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info()
        self.limit = int(min(MOST_BYTES, SHARE_OF_FREE * free))
        torch.cuda.set_per_process_memory_fraction(self.limit / total)
        self._weights = self._bytes(WEIGHTS_BYTES)
        self._pieces: list[Any] = []

    def fill(self) -> None:
        """Take pieces up to the limit."""
        while self._torch.cuda.memory_reserved() + ROOM_BYTES < self.limit:
            self._pieces.append(self._bytes(PIECE_BYTES))

    def fragment(self) -> None:
        """Keep one piece of each segment."""
        self._pieces = self._pieces[::KEPT_OF]

    def fail(self) -> str:
        """Ask for half of the limit: free in total, but nowhere in one piece. What torch says."""
        try:
            self._bytes(self.limit // 2)
        except self._torch.cuda.OutOfMemoryError as error:
            return str(error).split(" See documentation", 1)[0]
        return ""

    def release(self) -> None:
        """Give all pieces back to the driver."""
        self._pieces = []
        self._torch.cuda.empty_cache()

    def figures(self) -> dict[str, int]:
        """Torch's figures by the plugin's names, and its counts."""
        stats = self._torch.cuda.memory_stats()
        free, total = self._torch.cuda.mem_get_info()
        return {**{name: int(stats[key]) for name, key in (*KEYS, *COUNTS)}, "device_used_bytes": total - free}

    def _bytes(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device="cuda")


def main() -> None:
    """Answer commands until the input ends."""
    try:
        torch: Any = importlib.import_module("torch")
        fragments = Fragments(torch)
    except (ImportError, RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    register()
    print(json.dumps({"limit": fragments.limit, **fragments.figures()}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        said = {
            "fill": fragments.fill,
            "fragment": fragments.fragment,
            "fail": fragments.fail,
            "release": fragments.release,
        }[command]()
        print(json.dumps({"said": said, **fragments.figures()}), flush=True)


if __name__ == "__main__":
    main()
