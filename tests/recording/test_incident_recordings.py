"""The fresh and the untouched incidents are built from their facts. Nothing here scores them; that they are read
without a problem is checked in ``tests/accuracy``.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from lab.incidents.build import FOLDERS, build

pytestmark = pytest.mark.slow

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name, recordings decompressed: compressed bytes depend on the version of zlib."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    return {name: gzip.decompress(data) if name.endswith(".gz") else data for name, data in files.items()}


def test_the_checked_in_files_are_what_the_facts_and_specs_give(tmp_path: Path) -> None:
    build(tmp_path)
    for folder in FOLDERS:
        built, kept = contents(tmp_path / folder), contents(RECORDINGS / folder)
        assert built.keys() == kept.keys()
        assert [name for name in built if built[name] != kept[name]] == []
