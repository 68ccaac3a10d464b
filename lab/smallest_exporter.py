"""The least that a Python GPU exporter can be: four values of each GPU, read through the binding when it is scraped.

``python smallest_exporter.py PORT``. What others are compared with, not a recommendation: it knows no failure.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pynvml
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import GaugeMetricFamily


class Gpus:
    """Collects on every scrape."""

    def collect(self) -> Iterator[Any]:
        """The four families."""
        names = ("memory_total_bytes", "memory_used_bytes", "utilization_ratio", "power_watts")
        families = [GaugeMetricFamily(f"gpu_{name}", name, labels=["uuid"]) for name in names]
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            values = (
                memory.total,
                memory.used,
                pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            )
            for family, value in zip(families, values, strict=True):
                family.add_metric([pynvml.nvmlDeviceGetUUID(gpu)], value)
        yield from families


if __name__ == "__main__":
    pynvml.nvmlInit()
    REGISTRY.register(Gpus())
    start_http_server(int(sys.argv[1]), "127.0.0.1")
    threading.Event().wait()
