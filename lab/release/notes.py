#!/usr/bin/env python3
"""Print the changelog's section of a release; fail where a file names another version: release_notes.py VERSION."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "plugin/pyproject.toml": r'^version = "(.+)"$',
    "deploy/helm/kvpressure/Chart.yaml": r"^version: (.+)$",
}


def other_versions(version: str) -> list[str]:
    """One line for each file that says another version."""
    found = {name: re.search(pattern, (ROOT / name).read_text(), re.M) for name, pattern in VERSIONS.items()}
    return [
        f"{name}: {match[1] if match else 'none'}" for name, match in found.items() if not match or match[1] != version
    ]


def notes(version: str) -> str:
    """The section of CHANGELOG.md, without its heading. Empty if there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return section[1].strip() + "\n" if section else ""


def main(version: str) -> int:
    """0 and the notes, or 1 and what is wrong."""
    problems = other_versions(version) + ([] if notes(version) else [f"CHANGELOG.md: no section for {version}"])
    print("\n".join(f"{version} expected; {problem}" for problem in problems) or notes(version))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
