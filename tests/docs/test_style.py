"""Every text that a person reads keeps the rules of style: plain words, short sentences, numbers as people
read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.helpers import style, texts
from tests.helpers.style import Text

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "gather",
    [texts.pages, texts.rules, texts.declarations, texts.helps, texts.dashboards, texts.messages],
    ids=lambda gather: gather.__name__,
)
def test_texts(gather: Callable[[], Iterator[Text]]) -> None:
    count, found = 0, []
    for text in gather():
        count += 1
        found += style.findings(text)
    assert count > 10
    assert not found, "\n".join(sorted({str(finding) for finding in found})[:40])


PAGE = "A full sentence that a page has no need to say."
WRONG = {
    "private_words": [
        Text("x", word)
        for word in (
            "it runs on one card",
            "see the incident board",
            "a request is pushed out",
            "alert on fullness",
            "there is room in the cache",
            "what speaks against it",
            "nobody tells how many",
            "nobody sees it",
            "as was said",
            "the page says why",
            "the limit is not known",
            "from 97 % on, it is full",
            "none was seen lately",
            "a hint that is over is none",
            "what is normal for it",
            "prompts in two humps",
            "the growth law",
            "nothing useful happens",
            "the pod finds no node",
            "full in no foreseeable time",
            "no sign that it waits",
            "it says it for sure",
            "one by the immediate sign",
            "share who waits",
            "half of the present value",
            "requests that wait for it",
            "the stated load",
            "it stands beside the verdict",
            "a variable brings in arguments",
            "no page was ever read",
            "disks, networks and the like",
            "it restarts again and again",
            "waits for ever",
            "whatever it is",
        )
    ],
    "long_sentences": [Text("x", "word " * 31), Text("x", "| a | " + "word " * 31 + "|", "page")],
    "precision": [Text("x", "1178.3 s", "rendered"), Text("x", "used 91.24 %", "rendered")],
    "unknown_inside": [
        Text("x", "7 running of unknown", "rendered"),
        Text("x", "used – of 97 %", "rendered"),
        Text("x", "nan requests", "rendered"),
    ],
    "said_twice": [Text("x", f"{PAGE}\n\n{PAGE}", "page"), Text("x", f"{PAGE}\n\n* {PAGE}", "shown")],
    "mixed_units": [Text("x", "3.3 GB are short\n\nof 80 GiB", "page")],
    "allowed_twice": [Text("x", "7 is wrong; allowed: 1; allowed: 2", "message")],
    "reworded": [Text("x", f"Note: {before}") for before, _ in style.REWORDED],
    "unattributed": [
        Text("x", "Memory 93 % (documented: 80 %)"),
        Text("x", "# Page\n\nThe documented 80 %.\n\n" + "word " * 60 + '"KV Cache Diagnostics"', "page"),
    ],
    "placeholders": [
        Text("x", "see [the runbook](https://docs.example.com/runbook)", "page"),
        Text("x", "http://grafana.example/d/7"),
    ],
}


@pytest.mark.parametrize("rule", style.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_is_wrong(rule: Callable[[Text], Iterator[style.Finding]]) -> None:
    for text in WRONG[rule.__name__]:
        assert list(rule(text)), text


def test_every_private_word_has_a_counterexample() -> None:
    unproved = [
        pattern
        for pattern, _ in style.WORDS
        if not any(re.search(pattern, one.text, re.I) for one in WRONG["private_words"])
    ]
    assert unproved == []


def test_what_is_right_passes() -> None:
    right = (
        Text("x", "KV cache 98 % now, recent peak 99 % (full at 97 %)", "rendered"),
        Text("x", "GPU activity: unknown (no GPU mapped to this engine)", "rendered"),
        Text("x", "296 576 tokens, 0.035 s, vLLM 0.32.0", "rendered"),
        Text("x", '# Page\n\n"KV Cache Diagnostics" has 80 %.\n\n' + "word " * 20 + "the documented 80 %.", "page"),
        Text("x", f"{PAGE}\n\n| a | 7 GiB |\n|---|---|\n| {PAGE} | 8 GiB |\n\n`curl http://x.example.com`", "page"),
        Text("x", "7 is wrong; allowed: 1 or 2", "message"),
    )
    assert [finding for text in right for finding in style.findings(text)] == []
