"""What the results were made on, and whether there is a GPU at all. No names of hosts, no serial numbers.

``python -m lab.gpu.machine`` prints it, or ends with one line.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pynvml

from kvpressure.sources.gpu.nvidia import codes


class NoGpu(Exception):
    """There is no NVIDIA GPU to ask; the text says why."""


def describe() -> dict[str, Any]:
    """GPU, driver, kernel and versions of what takes part. Raises ``NoGpu``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpu(f"NVML does not open: {codes.reason_of(error.value)}") from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        if not count:
            raise NoGpu("NVML knows no GPU")
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        raise NoGpu(f"GPU 0 does not answer: {codes.reason_of(error.value)}") from error
    finally:
        pynvml.nvmlShutdown()
    return {
        "gpus": count,
        "name": name,
        "driver": driver,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nvidia-ml-py": _version("nvidia-ml-py"),
        "torch": _version("torch"),
        "uid": os.getuid(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    try:
        print(json.dumps(describe()), flush=True)
    except NoGpu as reason:
        sys.exit(str(reason))
