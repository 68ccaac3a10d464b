"""Whatever is said of an SGLang engine uses SGLang's words and names SGLang's flags."""

from __future__ import annotations

import re

import pytest
from benchmarks.accuracy.data import RECORDINGS

from kvpressure.advice.mitigation import plan
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from tests.helpers.texts import of_recording

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


def test_sentences_about_an_sglang_engine_have_no_word_of_vllm() -> None:
    said = [one for path in sorted((RECORDINGS / "sglang-incidents").glob("*.gz")) for one in of_recording(path)]
    assert {line for one in said for line in foreign(one.text)} == set()
    everything = "\n".join(one.text for one in said)
    for word in (
        "max_running_requests was reached for most of the last 15 s",
        "were retracted in the last minute",
        "Retractions per second",
        "being retracted",
        "Lower max_running_requests",
        "lower chunked-prefill-size",
        "Lower mem-fraction-static",
    ):
        assert word in everything, word


def test_what_to_set_and_to_run_is_sglang_s() -> None:
    texts = set()
    for path in sorted((RECORDINGS / "sglang-incidents").glob("*.gz")):
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


def test_the_words_are_found_where_they_are() -> None:
    assert foreign(
        "Lower max_num_seqs. Measured on a vLLM test server: 5 preemptions instead of 40 and 5.5 % less."
    ) == ["Lower max_num_seqs."]
