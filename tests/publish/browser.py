"""A real Chromium without a window: what it makes of a page, and what it complains about."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.render.chrome import BROWSER


@dataclass(frozen=True, slots=True)
class Visit:
    """The document after scripts ran, and the lines of its console."""

    dom: str
    console: tuple[str, ...]


def visit(url: str, profile: Path, *flags: str, seconds: float = 1.0) -> Visit:
    """Open ``url`` and let ``seconds`` of the page's own time pass."""
    command = [
        *BROWSER,
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        f"--virtual-time-budget={1000 * seconds:.0f}",
        *flags,
        "--dump-dom",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return Visit(done.stdout, tuple(re.findall(r"CONSOLE[^\"]*\"(.*?)\", source", done.stderr)))
