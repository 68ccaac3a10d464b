"""Whatever is said of an SGLang engine uses SGLang's words and names SGLang's flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from lab.accuracy.data import RECORDINGS

from kvpressure.advice.mitigation import plan
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


def said_of(recording: Path) -> Iterator[str]:
    """Evidence, triage, plan and page of each verdict that an engine of the recording passes."""
    pipeline, thresholds, passed = Pipeline(), builtin(), set()
    with Reader(recording) as snapshots:
        for snapshot in snapshots:
            state = pipeline.observe(snapshot)
            for engine in state.engines:
                verdict = (engine.diagnosis.verdict, engine.diagnosis.grade, engine.up)
                if verdict in passed:
                    continue
                passed.add(verdict)
                yield from (str(evidence.text) for evidence in engine.diagnosis.evidence.values())
                for step in steps(engine, state, thresholds):
                    yield from (step.question, *step.answers)
                for action in plan(engine, thresholds).actions:
                    yield from (action.title, action.text)
                html = render_page(replace(state, engines=(engine,)), "node-1", ViewContext(thresholds))
                shown = re.sub(r"<(script|style|svg|head|code|pre).*?</\1>", "", html, flags=re.S)
                yield unescape(re.sub(r"\s*<[^>]*>\s*", "\n\n", shown))


def test_sentences_about_an_sglang_engine_have_no_word_of_vllm() -> None:
    texts = [text for path in sorted((RECORDINGS / "sglang-incidents").glob("*.gz"))[::2] for text in said_of(path)]
    assert {line for text in texts for line in foreign(text)} == set()
    assert "max_running_requests" in "\n".join(texts)


def test_what_to_set_and_to_run_is_sglang_s() -> None:
    texts = set()
    for path in sorted((RECORDINGS / "sglang-incidents").glob("*.gz"))[::2]:
        pipeline = Pipeline()
        with Reader(path) as recording:
            for snapshot in recording:
                for engine in pipeline.observe(snapshot).engines:
                    for action in plan(engine, builtin()).actions:
                        texts |= {flag.partition(" ")[0] for flag in action.flags}
                        texts |= {line for line in action.commands if "py-spy" in line}
    commands = {text for text in texts if not text.startswith("--")}
    assert texts - commands == {"--max-running-requests"}
    assert commands
    assert all("^sglang::|" in line and "vllm" not in line for line in commands)
