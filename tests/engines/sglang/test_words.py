"""Whatever is said of an SGLang engine uses SGLang's words and names SGLang's flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from lab.accuracy.data import RECORDINGS

from kvpressure.advice.mitigation import MitigationPlan, plan
from kvpressure.advice.triage import steps
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin

pytestmark = pytest.mark.slow

OF_VLLM = re.compile(
    r"vLLM|preempt|max[_-]num|gpu[_-]memory[_-]util|max[_-]model[_-]len|watermark|kv_cache_memory|enable-chunked"
    r"|override-generation",
    re.I,
)
ALLOWED = re.compile(
    r"Measured on a vLLM test server: [^.]*(?:\.\d[^.]*)*\."
    r"|only the plugin inside vLLM reports it|(?:vLLM's|SGLang's) plugin"
)


def foreign(text: str) -> list[str]:
    return [line for line in re.split(r"\n\n|(?<=\.) ", ALLOWED.sub("", text)) if OF_VLLM.search(line)]


def said_of(recording: Path) -> Iterator[tuple[str, MitigationPlan]]:
    """Evidence, triage, plan and page of each verdict that an engine of the recording passes, and the plan itself."""
    pipeline, thresholds, passed = Pipeline(), builtin(), set()
    with Reader(recording) as snapshots:
        for snapshot in snapshots:
            state = pipeline.observe(snapshot)
            for engine in state.engines:
                verdict = (engine.diagnosis.verdict, engine.diagnosis.grade, engine.up)
                if verdict in passed:
                    continue
                passed.add(verdict)
                made = plan(engine, thresholds)
                told = [str(evidence.text) for evidence in engine.diagnosis.evidence.values()]
                told += [text for step in steps(engine, state, thresholds) for text in (step.question, *step.answers)]
                told += [text for action in made.actions for text in (action.title, action.text)]
                html = render_page(replace(state, engines=(engine,)), "node-1", ViewContext(thresholds))
                shown = re.sub(r"<(script|style|svg|head|code|pre).*?</\1>", "", html, flags=re.S)
                yield "\n\n".join((*told, unescape(re.sub(r"\s*<[^>]*>\s*", "\n\n", shown)))), made


def test_what_is_said_of_an_sglang_engine_and_what_to_set_and_run_is_sglang_s() -> None:
    said = [one for path in sorted((RECORDINGS / "sglang-incidents").glob("*.gz"))[::2] for one in said_of(path)]
    assert {line for text, _ in said for line in foreign(text)} == set()
    assert any("max_running_requests" in text for text, _ in said)
    actions = [action for _, made in said for action in made.actions]
    assert {flag.partition(" ")[0] for action in actions for flag in action.flags} == {"--max-running-requests"}
    commands = {line for action in actions for line in action.commands if "py-spy" in line}
    assert commands
    assert all("^sglang::|" in line and "vllm" not in line for line in commands)
