"""The least that a Python process can pay for the same readings: ``python -m lab.floor URL...``.

Once a second six calls for each GPU through the binding, one after another a page from each engine over a kept
connection, and its lines taken apart into numbers. No window, no verdict, no server, no protection: what the exporter's
CPU is compared with.
"""

from __future__ import annotations

import http.client
import sys
import time
from urllib.parse import urlsplit

import pynvml

CALLS = (
    pynvml.nvmlDeviceGetMemoryInfo,
    pynvml.nvmlDeviceGetUtilizationRates,
    pynvml.nvmlDeviceGetPowerUsage,
    pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    pynvml.nvmlDeviceGetComputeRunningProcesses,
    lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
)


def driver(gpus: list[object]) -> int:
    """Ask the driver everything; how many calls were answered."""
    answered = 0
    for gpu in gpus:
        for call in CALLS:
            try:
                call(gpu)
                answered += 1
            except pynvml.NVMLError:
                pass  # not supported, as a driver may say
    return answered


def scan(text: str) -> dict[str, float]:
    """The numbers of a page by what stands before them."""
    values = {}
    for line in text.split("\n"):
        if line and line[0] != "#":
            key, _, number = line.rpartition(" ")
            values[key] = float(number)
    return values


def main() -> None:
    """Read for ever."""
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    connections = [http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=5) for url in sys.argv[1:]]
    due = time.monotonic()
    while True:
        driver(gpus)
        for connection in connections:
            connection.request("GET", "/metrics")
            scan(connection.getresponse().read().decode())
        due += 1.0
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
