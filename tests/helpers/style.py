"""Rules of style for every text that a person reads. A finding says what is wrong and what to write instead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpressure.settings.thresholds import builtin
from tests.helpers.prose import sentences

LONGEST: Final = 30  # words in a sentence

WORDS: Final[tuple[tuple[str, str], ...]] = (  # a private word as a regular expression, and what to write
    (r"\bcards?\b", "GPU"),
    (r"\bboards?\b", "dashboard"),
    (r"\bpushed out\b", "preempted"),
    (r"\bfullness\b|\bits level\b", "KV cache usage"),
    (r"\broom in the (?:KV )?(?:cache|pool)\b|\bhas room\b|\bno room\b", "free KV cache, or: does not fit"),
    (r"\bspeaks? (?:for|against|of)\b|\bspeaks\b", "supports, contradicts, or describes"),
    (
        (
            r"\b(?<!cannot )(?:tells?|told) (?:by|us|you|it|what|how|which|whether|nothing)\b|\bnobody tells\b|\bnot"
            r" told\b"
        ),
        "report",
    ),
    (r"\bthe (?:page|rule|driver|server|engine|exporter) (?:says|tells)\b", "report, publish"),
    (r"\bnobody (?:knows|publishes|reads|sees|hears|feels)\b", "unknown, or: no exporter publishes"),
    (r"\bnot known\b|\bno one knows\b", "unknown"),
    (r"\bfrom which on\b|\bfrom [^.;:]{1,20} on(?=[.,;)]| and )", "the threshold, or: N and later"),
    (r"\blately\b", "recent, with the time"),
    (r"\bis none\b|\band is no\b|\bare none of\b", "say what it is"),
    (r"\bwhat is normal for\b", "baseline"),
    (r"\btwo humps\b|\bhumps?\b", "bimodal"),
    (r"\bgrowth law\b", "token demand"),
    (r"\buseful happens\b|\bdims?\b", "no tokens are being produced"),
    (r"\b(?:finds|found) no node\b", "cannot be scheduled"),
    (r"\bforeseeable\b", "is not filling"),
    (r"\bno sign that\b|\bis no sign\b", "say what is known"),
    (r"\bfor sure\b|\bnot sure\b", "confident, low confidence"),
    (r"\bimmediate sign\b|\bsilent preemptions?\b", "preemptions inferred from queue movement"),
    (r"\bthe present\b|\bpresent (?:value|limit|load|rate|verdict)s?\b", "current"),
    (r"\bwho waits?\b", "waiting requests"),
    (r"\brequests? that (?:runs?|waits?)(?! too)\b", "running requests, waiting requests"),
    (r"\bstated instead\b|\bthe stated (?:load|verdict)\b", "assumed, required"),
    (r"\bstands? (?:in|beside|at|there|for)\b|\bstood\b", "is, is listed"),
    (r"\bbrings? in\b|\bhands? on\b", "adds, passes"),
    (r"\bwas ever read\b|\bnever read\b", "scraped"),
    (r"\bthe like\b", "name them, or leave it out"),
    (r"\bas (?:was|were) said\b", "leave it out"),
    (r"\bon and on\b|\bagain and again\b", "repeatedly"),
    (r"\bin no time\b|\bfor ever\b", "give the time"),
    (r"\bwhatever (?:comes|it is|they are)\b", "any"),
)


@dataclass(frozen=True, slots=True)
class Text:
    """One text with where it is from. ``kind``: page (Markdown), line (one string), message (a string of
    the code), help (``--help``), rendered (a sentence with its numbers) or shown (the triage page).
    """

    where: str
    text: str
    kind: str = "line"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a text."""

    rule: str
    where: str
    found: str
    say: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.found!r}; {self.say}"


def private_words(text: Text) -> Iterator[Finding]:
    """Private words, each with the word to write."""
    for sentence in sentences(text.text):
        for pattern, say in WORDS:
            if re.search(pattern, sentence, re.I):
                yield Finding("private word", text.where, sentence, f"/{pattern}/ -> {say}")


def long_sentences(text: Text) -> Iterator[Finding]:
    """Sentences of more than thirty words."""
    for sentence in sentences(text.text):
        words = len([word for word in sentence.split() if re.search(r"\w", word)])
        if words > LONGEST:
            yield Finding("long sentence", text.where, sentence, f"{words} words; at most {LONGEST}")


_DECIMAL: Final = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\.\d|\w)")


def precision(text: Text) -> Iterator[Finding]:
    """Decimals with more than three significant digits, in what is rendered from measurements."""
    if text.kind == "rendered":
        for number in _DECIMAL.findall(text.text):
            if len(number.replace(".", "").lstrip("0")) > 3:
                yield Finding("precision", text.where, number, f"two or three significant digits, in {text.text!r}")


def unknown_inside(text: Text) -> Iterator[Finding]:
    """An unknown value inside a sentence about a known one. "GPU activity: unknown (why)" is the form."""
    if text.kind == "rendered":
        for sentence in text.text.split("\n\n"):
            if re.search(r"\bnot known\b|\bnan\b|\bNone\b|\binf\b|(?<!: )(?<!^)\bunknown\b|(?<!\w)–(?!\w)", sentence):
                yield Finding("unknown inside", text.where, sentence, "give the unknown value its own sentence")


def said_twice(text: Text) -> Iterator[Finding]:
    """The same sentence twice on a page. Short headings and cells of tables may repeat."""
    if text.kind in ("page", "shown"):
        prose = re.sub(r"^\|.*$", "", text.text, flags=re.M)
        seen = Counter(sentence for sentence in sentences(prose) if len(sentence.split()) > 7)
        for sentence, count in seen.items():
            if count > 1:
                yield Finding("said twice", text.where, sentence, "say it once")


def mixed_units(text: Text) -> Iterator[Finding]:
    """GB and GiB on one page. A quoted guide, a product's name and the value of an option may use GB."""
    own = "\n".join(
        line for line in text.text.splitlines() if not re.search(r"[“\"'].*GB.*[”\"']|Finding the KV Cache", line)
    )
    own = re.sub(r"--[\w-]+ \S+", "", own)
    own = re.sub(r"\b\d+ GB (?:H100|A100|H200|L40S|MI\d+\w*)|(?:H100|A100|H200|L40S|MI\d+\w*)[ -]\d+ ?GB\b", "", own)
    if text.kind == "page" and re.search(r"\d ?GB\b", own) and re.search(r"\d ?GiB\b", own):
        found = re.findall(r".{0,30}\d ?GB\b.{0,20}", own)
        yield Finding("mixed units", text.where, found[0], "GiB everywhere on a page, or GB everywhere")


def allowed_twice(text: Text) -> Iterator[Finding]:
    """Two "allowed:" in one error."""
    if len(re.findall(r"\ballowed:", text.text)) > 1 and text.kind == "message":
        yield Finding("two allowed", text.where, text.text, "one list of what is allowed")


REWORDED: Final[tuple[tuple[str, str], ...]] = tuple(
    (before, after)
    for line in (Path(__file__).parents[1] / "docs/reworded.tsv").read_text(encoding="utf-8").splitlines()
    for before, _, after in [line.partition("\t")]
)
"""Sentences that readers misread or had to read twice, and what replaced them."""


def reworded(text: Text) -> Iterator[Finding]:
    """A sentence that was misread once."""
    for before, after in REWORDED:
        if before in text.text:
            yield Finding("misread before", text.where, before, f"write {after!r}")


_PLACEHOLDER: Final = re.compile(
    r"https?://(?:[\w-]+\.)*(?:example(?:\.(?:com|org|net))?|invalid|your-[\w.-]+)(?=[/:\s)\"'>?]|$)"
)


def placeholders(text: Text) -> Iterator[Finding]:
    """A placeholder domain where a reader would follow it: anywhere but in code."""
    if text.kind == "message":  # names of hosts in code are not links
        return
    shown = re.sub(r"^( *)(```|~~~).*?^\1\2[^\n]*$|`[^`\n]+`", "", text.text, flags=re.M | re.S)
    for found in _PLACEHOLDER.findall(shown):
        yield Finding("placeholder", text.where, found, "leave the link out until there is an address")


GUIDES: Final = tuple(
    sorted(
        {title for entry in builtin().entries() if entry.documented for title in re.findall(r"'(.+?)'", entry.source)}
    )
)
"""Titles of the guides, as the thresholds that come from them name them."""


_NEAR: Final = 200  # characters after the word in which the title may follow


def unattributed(text: Text) -> Iterator[Finding]:
    """A number that is called documented where no guide is named: before it on its page, or in the text itself. The
    documented signature is a name; the glossary says whose.
    """
    if text.kind in ("message", "rendered"):  # parts of a page or of an output, which are read whole
        return
    shown = re.sub(r"^( *)(```|~~~).*?^\1\2[^\n]*$|`[^`\n]+`|\]\([^)]*\)", "", text.text, flags=re.M | re.S)
    said = re.search(r"\bdocumented\b(?! (?:KV-pressure )?signature)", shown, re.I)
    if said and not any(guide in shown[: said.end() + _NEAR] for guide in GUIDES):
        yield Finding("unattributed", text.where, shown[said.start() :][:120], "name the guide by its title")


RULES: Final[tuple[Callable[[Text], Iterator[Finding]], ...]] = (
    private_words,
    long_sentences,
    precision,
    unknown_inside,
    said_twice,
    mixed_units,
    allowed_twice,
    reworded,
    placeholders,
    unattributed,
)


def findings(text: Text) -> list[Finding]:
    """Everything that the rules find in a text."""
    return [finding for rule in RULES for finding in rule(text)]
