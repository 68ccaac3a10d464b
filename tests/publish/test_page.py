"""The page: right, escaped, and complete for people without colours or scripts."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model.readings import EngineKey, GpuReading, SourceHealth
from kvpressure.model.state import Diagnosis, Found, GpuState, State
from kvpressure.printable import visible_lines
from kvpressure.publish.links import Links
from kvpressure.publish.page.render import page_headers, render_page
from kvpressure.publish.page.view import ViewContext
from tests.publish.states import NOW, full_engine, full_state, unknown_engine

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


def html(state: State, links: Links | None = None) -> str:
    return render_page(state, "node-1", ViewContext(links=links or Links()))


def page(state: State, links: Links | None = None) -> Document:
    return Document(html(state, links))


def test_it_says_the_verdict_and_what_speaks_for_and_against_it() -> None:
    text = page(full_state()).text
    parts = (
        *("kvpressure on node-1", "org/model", "prod/chat-0", "KV pressure (saturated)", "confidence 90 %"),
        *("(for 1 min 30 s)", "KV usage reached 99 %.", "Few preemptions.", "the start-up log"),
        *("Documented signature: not met", "GPU utilization low: yes", "72.0 GiB of 80.0 GiB", "97 %", "prod/other-0"),
        *("Why signature and verdict differ: The cache is preallocated.", "down: library missing", "library missing 9"),
    )
    assert [part for part in parts if part not in text] == []


def test_it_links_to_metrics_and_json_and_to_nothing_elsewhere() -> None:
    links = page(full_state()).links
    assert {"/metrics", "/api/v1/diagnosis"} <= set(links)
    assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in links)


def test_what_is_not_known_is_said_and_not_shown_as_zero() -> None:
    lost = GpuState(GpuReading("GPU-9", 3, "nvidia", error="lost"))
    bare = GpuState(GpuReading("GPU-8", 2, "nvidia"))
    text = page(State(time=NOW, engines=(unknown_engine(up=False),), gpus=(lost, bare))).text
    assert "Down since 2023-11-14 22:13:20 UTC (connection refused)" in text
    assert "Documented signature: cannot be evaluated" in text
    assert "not available: lost" in text
    assert "unknown of unknown" in text
    assert " 0 %" not in text.replace("confidence 0 %", "")


def test_a_source_with_nothing_to_read_is_not_one_without_a_response() -> None:
    health = {
        "amd": SourceHealth("amd", None, "no_devices"),
        "nvidia": SourceHealth("nvidia"),
        "engines": SourceHealth("engines", True, last_success=NOW),
    }
    text = " ".join(page(State(time=NOW, health=health)).text.split())
    for row in ("amd not on this node: no devices unknown", "nvidia no response yet unknown", "engines up 2023"):
        assert row in text


def test_an_empty_node_has_a_page() -> None:
    text = page(State(time=NOW)).text
    assert "No engine found on this node." in text
    assert "Kubernetes" not in text
    text = page(State(time=NOW, health={"pods": SourceHealth("pods", True)})).text
    assert "check the Kubernetes source below" in text
    assert "No GPU found." in text


@pytest.mark.attack("HTML and script in names, labels and log lines", "escaped; the policy allows no foreign script")
@pytest.mark.slow
@given(st.text(max_size=60).map(lambda text: f"</article><script>alert(1)</script>{text}\"'&"))
def test_names_and_sentences_from_outside_are_escaped(text: str) -> None:
    engine = full_engine()
    diagnosis = replace(engine.diagnosis, supporting=(text,), missing=(f"{text}?",), signature_note=text, verdict=text)
    state = State(
        time=NOW,
        engines=(
            replace(
                engine, key=EngineKey(text, text, text, text), error=text, up=False, target=text, diagnosis=diagnosis
            ),
        ),
        gpus=(GpuState(GpuReading(text, 0, text, name=text, error=text)),),
    )
    document = page(state)
    assert document.tags.count("script") == 1
    assert document.words.count(visible_lines(text)) >= 2
    assert visible_lines(f"{text}?") in document.words
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") for char in document.text)


@pytest.mark.parametrize(
    ("verdict", "confidence", "first"),
    [
        ("kv_pressure", 0.9, "First: Lower max_num_seqs"),
        ("concurrency_limited", 0.9, "First: Cap input and output tokens"),
        ("concurrency_limited with room", 0.9, "First: Raise max_num_seqs --max-num-seqs 128"),
        ("stalled", 0.9, "if not, save the evidence and restart it kubectl exec -n prod pod/chat-0 -- curl -s"),
        ("compute_bound", 0.5, "First: check the triage steps below; confidence in the verdict is low."),
        ("unknown", 0.3, "First: Provide the missing inputs"),
        ("healthy", 0.9, ""),
    ],
)
def test_the_first_action_stands_beside_the_verdict_if_that_is_sure(
    verdict: str, confidence: float, first: str
) -> None:
    engine = full_engine()
    evidence = engine.diagnosis.evidence
    if verdict.endswith(" with room"):
        verdict, evidence = verdict.removesuffix(" with room"), {"kv_full": Found("kv_full", False, "not full")}
    answer = replace(
        engine.diagnosis, verdict=verdict, confidence=confidence, evidence=evidence, conditions={}, beside={}
    )
    text = page(State(time=NOW, engines=(replace(engine, diagnosis=answer),))).text
    before_the_evidence = text[: text.index("Evidence for")]
    assert first in before_the_evidence
    assert ("First:" in text) is bool(first)


def test_the_top_names_and_links_the_engines_in_trouble() -> None:
    calm = replace(full_engine("calm-0"), diagnosis=Diagnosis("healthy", 0.9, None, NOW))
    text = html(State(time=NOW, engines=(calm, full_engine("worse-0"), full_engine("worse-1"))))
    top = text[: text.index("</header>")]
    assert re.findall(r'<a href="#(engine-\w+)">prod/(worse-\d)</a>: KV pressure', top) == [
        (anchor, f"worse-{index}")
        for index, anchor in enumerate(re.findall(r'<article class="bad" id="(engine-\w+)"', text))
    ]
    assert "calm-0" not in top


def test_with_addresses_dashboards_and_runbooks_are_links() -> None:
    links = page(full_state(), Links("https://runbooks.example/r", "https://grafana.example")).links
    assert "https://runbooks.example/r/InferenceKVCachePressure.md" in links
    assert (
        "https://grafana.example/d/kvpressure-incident?var-namespace=prod&var-model=org%2Fmodel&var-pod=chat-0" in links
    )
    assert "https://grafana.example/d/kvpressure-detail" in links


def test_the_page_loads_nothing_from_elsewhere() -> None:
    import base64
    import hashlib

    text, policy = html(full_state()), page_headers()["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert " src=" not in text
    for tag in ("style", "script"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert body is not None
        assert base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode() in policy
    assert " style=" not in text


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_have_contrast_in_both_themes() -> None:
    themes = re.findall(r":root \{(.*?)\}", html(State(time=NOW)), re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        color = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        pairs = [
            (text, back)
            for text in ("text", "quiet", "link", "bad", "warn", "fine", "unknown")
            for back in ("card", "page")
        ]
        pairs += [("text", "code"), ("quiet", "code")]
        pairs += [("on", tone) for tone in ("bad", "warn", "fine", "calm", "unknown")]
        for text, back in pairs:
            light, dark = sorted((luminance(color[text]), luminance(color[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back)
