"""A dialect is one folder and a row of the registry: SGLang is taken as the example of one that was added."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = "exporter/kvpressure/engines/sglang"
PROGRAM = ("alerts", "dashboards", "deploy", "exporter", "lab", "plugin")
TEXT = {
    ".py",
    ".j2",
    ".yaml",
    ".yml",
    ".json",
    ".md",
    ".toml",
    ".tpl",
    ".txt",
    ".sh",
    ".js",
    ".css",
    ".service",
    ".jsx",
}
KNOWN = {
    "exporter/kvpressure/engines/registry.py": "its row",
    "exporter/kvpressure/engines/other_software.py": "its router, which is no engine; and what to point at",
    "exporter/kvpressure/model/reasons.py": "the failure reason that names its router",
    "exporter/kvpressure/capacity/models.json": "a source of some models' figures has it in its path",
    "lab/accuracy/digests.txt": "names of recordings",
    "lab/incidents/build_sglang.py": "writes the fixtures of its incidents",
    "lab/incidents/sglang_incidents.py": "the same",
    "lab/incidents/sglang_model.py": "the same",
}


def files() -> Iterator[Path]:
    for top in PROGRAM:
        for path in (ROOT / top).rglob("*"):
            if (
                path.is_file()
                and path.suffix in TEXT
                and not {"node_modules", "kvpressure.egg-info", "tests"} & set(path.relative_to(ROOT).parts)
            ):
                yield path


def test_no_other_file_of_the_program_knows_it() -> None:
    named = {
        str(path.relative_to(ROOT)) for path in files() if re.search("sglang|sgl_", path.read_text(), re.IGNORECASE)
    }
    own = {name for name in named if name.startswith(FOLDER)}
    assert own
    assert named - own == set(KNOWN)
