"""The moment that a report of a period shows."""

from __future__ import annotations

import pytest

from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox.history import judge
from tests.recording.test_incident_recordings import RECORDINGS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["agents", "ngram", "priorities", "long-outputs", "engine-stopped"])
def test_the_moment_shown_is_one_at_which_the_row_held(name: str) -> None:
    """At the end of an episode the verdict stays for some seconds, while its own facts speak against it."""
    with Reader(RECORDINGS / f"vllm-cpu-fresh/{name}.jsonl.gz") as reader:
        (case, *_) = judge(reader, builtin())
    assert case.view.diagnosis.verdict not in ("healthy", "idle", "unknown")
    assert not case.view.diagnosis.held
