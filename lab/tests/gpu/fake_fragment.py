"""Stands in for ``lab.gpu.fragment`` where there is no GPU: the real plugin over a torch that tells figures from
here.

Shows nothing about torch; it shows that the part asks, compares and judges. ``lie`` as argument makes the allocator's
figures differ from those that are answered.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from kvpressure_vllm import register
from kvpressure_vllm.allocator import KEYS

GIB = 2**30
FIGURES = {
    "start": (GIB, GIB, 0, 0, 0),
    "fill": (9 * GIB, 9 * GIB, 0, 0, 0),
    "fragment": (3 * GIB, 9 * GIB, 6 * GIB, 0, 0),
    "fail": (3 * GIB, 9 * GIB, 6 * GIB, 1, 1),
    "release": (GIB, GIB, 0, 1, 1),
}
now = dict.fromkeys((key for _, key in KEYS), 0)


def figures(step: str) -> dict[str, int]:
    """Make them torch's, and answer them by the plugin's names."""
    told = dict(zip((name for name, _ in KEYS), FIGURES[step], strict=True))
    now.update({key: told[name] for name, key in KEYS})
    if "lie" in sys.argv:
        now["allocated_bytes.all.current"] += 1
    return {**told, "device_used_bytes": told["reserved_bytes"]}


sys.modules["torch"] = SimpleNamespace(
    cuda=SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, memory_stats=lambda _: dict(now))
)
print(json.dumps({"limit": 10 * GIB, **figures("start")}), flush=True)
register()
for line in sys.stdin:
    said = "CUDA out of memory. Tried to allocate 5.00 GiB." if line.strip() == "fail" else ""
    print(json.dumps({"said": said, **figures(line.strip())}), flush=True)
