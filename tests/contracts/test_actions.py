"""Every command of an action stands in every face."""

from __future__ import annotations

import html
import json
from dataclasses import replace

import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import VERDICTS, Diagnosis, EngineState, State
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox import mitigation_report, report
from kvpressure.toolbox.engine_view import engine_view
from kvpressure.toolbox.history import Case, FoundEngines
from tests.publish.states import full_engine

HOSTILE = EngineKey("prod", "chat-0", "m'$(id); x", "0")
ON_A_HOST = EngineKey("", "10.0.0.5:8000", "m", "0")


def engines() -> list[EngineState]:
    """Each verdict, in a pod and on a host, and a target that cannot be scraped."""
    found = []
    for key in (HOSTILE, ON_A_HOST):
        for verdict in VERDICTS:
            engine = replace(full_engine(), key=key, target="http://10.0.0.5:8000/metrics")
            found.append(replace(engine, diagnosis=replace(engine.diagnosis, verdict=verdict, confidence=0.95)))
        down = replace(full_engine(), key=key, up=False, error="refused", target="http://10.0.0.5:8000/metrics")
        found.append(replace(down, diagnosis=Diagnosis("unknown", 0.0, None, 0.0)))
    return found


@pytest.mark.parametrize("engine", engines(), ids=lambda e: f"{e.key.pod}-{e.diagnosis.verdict}-{e.up}")
def test_every_command_is_in_every_face(engine: EngineState) -> None:
    state, around = State(time=1_700_000_000.0, engines=(engine,)), ViewContext()
    view = engine_view(engine, state, around)
    found = FoundEngines((Case(view),), "URL", {})
    answered = report.answers(found, builtin())
    shown = {
        "page": html.unescape(render_page(state, "node", around)),
        "terminal": report.as_text(found, answered),
        "JSON of diagnose": json.dumps(report.as_json(found, answered)["engines"][0]["next_steps"]),
        "JSON of the exporter": json.dumps(diagnosis_document(state, "node", around)["engines"][0]["mitigation"]),
    }
    if engine.diagnosis.verdict != "kv_pressure":
        shown["mitigate"] = "\n".join(mitigation_report.not_pressure(view, (), "URL"))
    for action in plan(engine, builtin()).actions:
        for command in action.commands if action.title != "Verify" else ():
            for face, text in shown.items():
                wanted = json.dumps(command)[1:-1] if "JSON" in face else command
                assert wanted in text, f"{face}: {command}"
