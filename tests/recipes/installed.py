"""Toy packages of this folder as if they were installed: their code and their entry points, for one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(package: str, *arguments: str, extensions: str = "") -> subprocess.CompletedProcess[str]:
    """``kvpressure ARGUMENTS`` where the toy package is installed."""
    path = os.pathsep.join([str(HERE / package), os.environ.get("PYTHONPATH", ""), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path} | ({"KVPRESSURE_EXTENSIONS": extensions} if extensions else {})
    command = [sys.executable, "-m", "kvpressure", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def written_files(package: str) -> list[str]:
    """What somebody writes for it, beside the packaging."""
    root = HERE / package
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.py") if "dist-info" not in str(path))
