"""Whatever is said of an SGLang engine uses SGLang's words and names SGLang's flags."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
from benchmarks.accuracy.data import RECORDINGS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.advice.mitigation import plan
from kvpressure.cli import main
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


# --- audit ------------------------------------------------------------------------------------------------

OPTIONS = {
    "--model-path": ["m", "Qwen/Qwen3-32B-FP8", "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-R1"],
    "--mem-fraction-static": ["0.6", "0.65", "0.88", "1.5", "abc", "$SHARE"],
    "--max-running-requests": ["16", "100000", "abc"],
    "--chunked-prefill-size": ["-1", "4", "8192", "abc"],
    "--context-length": ["8192", "131072", "abc"],
    "--tp": ["2", "3", "8"],
    "--dp-size": ["2"],
    "--quantization": ["fp8"],
}
SWITCHES = ["--enable-metrics", "--allow-auto-truncate", "--enable-dp-attention", "--trust-remote-code"]


@st.composite
def command_lines(draw: st.DrawFn) -> str:
    words = [draw(st.sampled_from(["python3 -m sglang.launch_server", "sglang serve"]))]
    for option in draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True)):
        words += [option, draw(st.sampled_from(OPTIONS[option]))]
    return " ".join([*words, *draw(st.lists(st.sampled_from(SWITCHES), unique=True))])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    command=command_lines(),
    gpu=st.sampled_from([[], ["--gpu", "H100:80"], ["--gpu", "L4:24"], ["--gpu", "T4:1"]]),
    version=st.sampled_from([[], ["--sglang-version", "0.4.9"], ["--sglang-version", "0.5.19"]]),
    more=st.sampled_from([[], ["--context", "3000"], ["--demanding"]]),
)
def test_an_audit_of_an_sglang_server_has_no_word_of_vllm(
    command: str, gpu: list[str], version: list[str], more: list[str]
) -> None:
    arguments = ["audit", f"--args={command}", *gpu, *version, *more]
    for form in (["--all"], ["--format", "junit"], ["--format", "sarif"], ["--format", "json"]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*arguments, *form]) in (0, 1)
        assert not re.search("vllm", out.getvalue(), re.I)
        if form == ["--all"]:
            assert foreign(out.getvalue()) == []
            assert f"\n  SGLang {version[1] if version else 'of unknown version'}, GPU " in out.getvalue()
