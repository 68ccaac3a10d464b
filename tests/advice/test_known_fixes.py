"""The plan holds the fix of incidents whose fix is known (``incident_fixes.yaml``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.command import Capsys, answer
from tests.recording.test_incident_recordings import RECORDINGS

pytestmark = pytest.mark.slow

INCIDENTS: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_name("incident_fixes.yaml").read_text())


def advised(capsys: Capsys, incident: dict[str, str]) -> list[str]:
    """Title and arguments of each action that applies, of the engine in trouble."""
    name = incident.get("recording", incident["id"])
    _, document = answer(capsys, "diagnose", RECORDINGS / f"incidents/{name}.jsonl.gz")
    steps: list[dict[str, Any]] = document["engines"][0]["next_steps"]
    return [" ".join((step["title"], *step["flags"])) for step in steps]


@pytest.mark.parametrize("incident", INCIDENTS, ids=[incident["id"] for incident in INCIDENTS])
def test_the_plan_holds_the_known_fix_and_nothing_that_makes_it_worse(capsys: Capsys, incident: dict[str, str]) -> None:
    actions = advised(capsys, incident)
    assert [action for action in actions if re.search(incident["wrong"], action)] == []
    holds = any(re.search(incident["accepted"], action) for action in actions)
    assert holds is ("missing" not in incident), actions
