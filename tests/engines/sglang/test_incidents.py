"""Public SGLang incidents, labelled before any rule judged them: right in nine of ten, never wrong and confident."""

from __future__ import annotations

import pytest
from lab.accuracy.data import RECORDINGS, Incident, incidents
from lab.accuracy.incidents import Answer, judge
from lab.accuracy.run import Run, Tick

from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader

pytestmark = pytest.mark.slow

FOLDER = "sglang-incidents"
RIGHT = 0.90


def answered(asked: Incident) -> Answer:
    pipeline, ticks, start = Pipeline(), [], None
    with Reader(RECORDINGS / asked.name) as recording:
        for snapshot in recording:
            start = snapshot.time if start is None else start
            engines = pipeline.observe(snapshot).engines
            said = engines[0].diagnosis if engines else None
            ticks.append(
                Tick(
                    snapshot.time - start,
                    said.verdict if said else "unknown",
                    said.confidence if said else 0.0,
                    conditions=said.conditions if said else {},
                )
            )
    return judge(asked, Run(asked.name, {}, {"0": ticks}))


def test_nine_of_ten_are_right_and_none_is_wrong_and_confident() -> None:
    answers = [answered(asked) for asked in incidents((FOLDER,))]
    assert len(answers) == 21
    assert [each.incident.id for each in answers if each.wrong_and_confident] == []
    missed = [f"{each.incident.id}: {each.verdict}" for each in answers if not each.right]
    assert len(missed) <= (1 - RIGHT) * len(answers), missed
