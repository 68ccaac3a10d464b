"""Known vulnerabilities of the locked dependencies, asked of pip-audit where it and its data can be had.

    python -m lab.supply.advisories

Exit status: 0 none is known, 1 some are (pip-audit lists them), 3 it could not be checked, which one line says.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from lab.supply.lock import LOCK

UNKNOWN: Final = 3
SECONDS: Final = 300


def check(lock: Path = LOCK) -> int:
    """Run pip-audit over the lock; the exit status."""
    if find_spec("pip_audit") is None:
        return _unknown("pip-audit is not installed (pip install pip-audit)")
    command = [sys.executable, "-m", "pip_audit", "--strict", "--require-hashes", "--disable-pip", "-r", str(lock)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return _unknown(f"pip-audit had no answer within {SECONDS} s")
    if ran.returncode == 0:
        print("advisories: no known vulnerability")
        return 0
    if "Found " in ran.stderr and "vulnerabilit" in ran.stderr:
        print(ran.stdout, end="")
        return 1
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    return _unknown(f"pip-audit could not get its data ({lines[-1].strip()[:160] if lines else 'no reason given'})")


def _unknown(why: str) -> int:
    print(f"advisories: not checked: {why}", file=sys.stderr)
    return UNKNOWN


if __name__ == "__main__":
    sys.exit(check())
