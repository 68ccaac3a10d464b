"""Reads a few times through an ``AmdSource`` and prints the readings as one JSON list."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvpressure.sources.gpu.amd.source import AmdSource


def main() -> None:
    """Arguments: the sysfs root, how many readings, seconds between them."""
    clock = [0.0]
    said = io.StringIO()
    logging.basicConfig(stream=said, level=logging.INFO)
    settings = SimpleNamespace(host_sys=Path(sys.argv[1]), node_name="node")
    source = AmdSource(settings, lambda: clock[0])
    results: list[dict[str, Any]] = []
    for _ in range(int(sys.argv[2])):
        reading = source.read()
        results.append(
            {
                "gpus": [dataclasses.asdict(gpu) for gpu in reading.gpus or ()],
                "errors": reading.errors,
                "imported": "amdsmi" in sys.modules,
                "log": said.getvalue(),
            }
        )
        clock[0] += float(sys.argv[3])
    source.close()
    print(json.dumps(results))


main()
