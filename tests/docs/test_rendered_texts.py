"""Every sentence about every recorded engine keeps the rules of style, in each state that it passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpressure.recording.reader import Reader
from tests.helpers import style, texts

pytestmark = pytest.mark.slow

FOLDERS = sorted({path.parent for path in texts.RECORDINGS.rglob("*.jsonl.gz")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_recording(folder: Path) -> None:
    said, found = 0, set()
    for path in sorted(folder.glob("*.jsonl.gz")):
        names = gpu_names(path)
        for text in texts.of_recording(path):
            said += 1
            own = re.sub("|".join(names) or "(?!)", "GPU", text.text)
            found |= {str(finding) for finding in style.findings(style.Text(text.where, own, text.kind))}
    assert said > 100
    assert not found, "\n".join(sorted(found)[:40])


def gpu_names(path: Path) -> list[str]:
    """Names that the driver gave the GPUs, as patterns: their words are not ours."""
    with Reader(path, on_problem=lambda _: None) as reader:
        first = next(iter(reader))
        return sorted({re.escape(gpu.name) for gpu in first.gpus if gpu.name}, key=len, reverse=True)
