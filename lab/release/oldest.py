#!/usr/bin/env python3
"""Print the oldest release of each dependency that ``pyproject.toml`` allows, as requirements: oldest.py PYPROJECT."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_LOWER = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def oldest(pyproject: Path) -> list[str]:
    """``name==version`` for each run-time dependency. Raises ``ValueError`` for one without a lower bound."""
    found = []
    for dependency in tomllib.loads(pyproject.read_text())["project"]["dependencies"]:
        match = _LOWER.match(dependency)
        if match is None:
            raise ValueError(f"{pyproject}: {dependency}: no lower bound")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    print(*oldest(Path(sys.argv[1])), sep="\n")
