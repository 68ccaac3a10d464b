"""The page: right, escaped, and complete for people without colours or scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.publish.page import bytes_text, clock_text, duration_text, percent_text, render_page
from kvpressure.readings import EngineKey, GpuReading
from kvpressure.state import Diagnosis, GpuState, State
from publish.states import NOW, full_engine, full_state, unknown_engine

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Document(HTMLParser):
    """Elements and text; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page(state: State) -> Document:
    return Document(render_page(state, "node-1", "/metrics"))


def test_it_says_the_verdict_and_what_speaks_for_and_against_it() -> None:
    text = page(full_state()).text
    for part in ("kvpressure on node-1", "org/model", "prod/chat-0", "kv pressure (saturated)", "confidence 90 %",
                 "(1 min 30 s)", "KV usage reached 99 %.", "Few preemptions.", "the start-up log",
                 "Documented signature: not met", "gpu utilization low: yes",
                 "Why signature and verdict differ: The cache is preallocated.", "72.0 GiB of 80.0 GiB", "97 %",
                 "prod/other-0", "down: library missing", "library missing 9"):
        assert part in text, part


def test_it_links_to_metrics_and_json_and_to_nothing_elsewhere() -> None:
    links = page(full_state()).links
    assert {"/metrics", "/api/v1/diagnosis"} <= set(links)
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in links)


def test_what_is_not_known_is_said_and_not_shown_as_zero() -> None:
    lost = GpuState(GpuReading("GPU-9", 3, "nvidia", error="gpu_lost"))
    bare = GpuState(GpuReading("GPU-8", 2, "nvidia"))
    text = page(State(time=NOW, engines=(unknown_engine(up=False),), gpus=(lost, bare))).text
    assert "cannot be read: refused" in text
    assert "Documented signature: cannot be evaluated" in text
    assert "cannot be read: gpu lost" in text
    assert "– of –" in text
    assert " 0 %" not in text.replace("confidence 0 %", "")


def test_an_empty_node_has_a_page() -> None:
    text = page(State(time=NOW)).text
    assert "No engine is known on this node." in text
    assert "No GPU was read." in text


@given(st.text(max_size=60).map(lambda text: f"</article><script>alert(1)</script>{text}\"'&"))
def test_names_and_sentences_from_outside_are_escaped(text: str) -> None:
    engine = full_engine()
    diagnosis = replace(engine.diagnosis, supporting=(text,), missing=(text,), signature_note=text, verdict=text)
    state = State(time=NOW, engines=(replace(engine, key=EngineKey(text, text, text, text), error=text, up=False,
                                             target=text, diagnosis=diagnosis),),
                  gpus=(GpuState(GpuReading(text, 0, text, name=text, error=text)),))
    document = page(state)
    assert "script" not in document.tags


def test_every_verdict_renders_without_optional_parts() -> None:
    for verdict in ("idle", "healthy", "stalled", "unknown"):
        engine = replace(full_engine(), diagnosis=Diagnosis(verdict, 0.5, None, NOW))
        assert verdict in page(State(time=NOW, engines=(engine,))).text


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (80 * 2**30, "80.0 GiB"), (2**60, "1048576.0 TiB"),
    (-2048, "-2.0 KiB")])
def test_bytes(value: float | None, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (90, "1 min 30 s"), (3600, "1 h"), (90061, "1 d 1 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_ratios_and_times() -> None:
    assert (percent_text(None), percent_text(0.976)) == ("–", "98 %")
    assert (clock_text(None), clock_text(NOW)) == ("–", "2023-11-14 22:13:20 UTC")
