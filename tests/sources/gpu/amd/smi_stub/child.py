"""Reads a few times through an ``AmdSource`` and prints the readings as one JSON list."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvpressure.sources.base import SourceError
from kvpressure.sources.gpu.amd.source import AmdSource


def main() -> None:
    """Arguments: the sysfs root, the backend, how many readings, seconds between them."""
    clock = [0.0]
    settings = SimpleNamespace(host_sys=Path(sys.argv[1]), amd_backend=sys.argv[2], node_name="node")
    source = AmdSource(settings, lambda: clock[0])
    results: list[dict[str, Any]] = []
    for _ in range(int(sys.argv[3])):
        try:
            reading = source.read()
            results.append(
                {
                    "gpus": [dataclasses.asdict(gpu) for gpu in reading.gpus or ()],
                    "errors": reading.errors,
                    "imported": "amdsmi" in sys.modules,
                }
            )
        except SourceError as error:
            results.append({"reason": error.reason, "detail": error.detail})
        clock[0] += float(sys.argv[4])
    source.close()
    print(json.dumps(results))


main()
