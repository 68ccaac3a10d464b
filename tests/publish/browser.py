"""A real Chromium without a window: what it makes of a page, and what it complains about."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.render.chrome import BROWSER

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (*BROWSER[1:], "--enable-logging=stderr")


@dataclass(frozen=True, slots=True)
class Visit:
    """The document after scripts ran, and the lines of its console."""

    dom: str
    console: tuple[str, ...]


def program() -> str:
    """Chromium. Raises ``RuntimeError`` where none is installed."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed; Debian: apt install chromium")
    return found


def visit(url: str, profile: Path, *flags: str, seconds: float = 1.0) -> Visit:
    """Open ``url`` and let ``seconds`` of the page's own time pass."""
    command = [
        program(),
        *FLAGS,
        f"--user-data-dir={profile}",
        f"--virtual-time-budget={1000 * seconds:.0f}",
        *flags,
        "--dump-dom",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return Visit(done.stdout, tuple(re.findall(r"CONSOLE[^\"]*\"(.*?)\", source", done.stderr)))
