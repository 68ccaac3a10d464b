"""The documents that people read: every file and heading they link is there, and they stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "alerts/*.md",
    "dashboards/*.md",
)
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))


def headings(document: Path) -> set[str]:
    """Anchors as the usual renderers make them of headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_file_and_heading_that_a_document_links_is_there() -> None:
    missing = []
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)", document.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            file = document.parent / name if name else document
            lost = anchor and file.suffix == ".md" and anchor not in headings(file)
            if "://" not in link and (not file.exists() or lost):
                missing.append(f"{document.relative_to(ROOT)}: {link}")
    assert missing == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        waiting += [
            (page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        ]
    assert {path.relative_to(ROOT) for path in DOCUMENTS} - {path.relative_to(ROOT) for path in reached} == set()


def test_the_accuracy_in_the_readme_is_that_of_the_score() -> None:
    page = (ROOT / "docs/reports/accuracy.md").read_text(encoding="utf-8").partition("## Simple rules")[2]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    def figures(rule: str) -> list[str]:
        """Found, windows with pressure, false, windows without."""
        row = re.search(rf"^\| {re.escape(rule)} \| (\d+) of (\d+) .*?\| (\d+) of (\d+) ", page, re.M)
        assert row, rule
        return list(row.groups())

    found, sick, _, _ = figures("documented signature")
    by_memory, _, false, healthy = figures("device memory > 90 %")
    ours, _, wrong, _ = figures("**kvpressure: `kv_pressure`**")
    assert found == "0"
    assert f"high memory with low utilization would miss all {sick} windows with pressure." in readme
    assert false == healthy
    by_memory = f"would find {by_memory} of these {sick} windows"
    alarms = f"An alert on memory above 90 % {by_memory}, but also fire in all {healthy} without pressure."
    assert alarms in readme
    assert (ours, wrong) == (sick, "0")
    assert f"The verdict found all {ours} pressure windows without a false alarm (" in readme


GENERATED = re.compile(
    r"page is gener|Generated (?:by|from|together)|Written by [`<]"
)  # said in the first lines of such a page
PARTS = re.compile(r"<!-- (\w+): written by .*?<!-- end of \1 -->", re.DOTALL)
BY_HAND = {  # page -> text without its generated parts
    path.relative_to(ROOT).as_posix(): PARTS.sub("", text)
    for path in DOCUMENTS
    for text in [path.read_text(encoding="utf-8")]
    if not GENERATED.search("\n".join(text.splitlines()[:8])) and not {"runbooks", "reports"} & set(path.parts)
}
REPORTS = sorted((ROOT / "docs/reports").glob("*.md"))


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.name)
def test_a_report_is_short_and_says_when_it_was_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert words(text) <= 600
    assert re.search(r"\b20\d\d\b", text.splitlines()[0])


def test_the_readme_alone_says_which_releases_are_tested() -> None:
    names = [path.name for path in (ROOT / "tests/fixtures").rglob("*.prom*")]
    for server, folder in (("vLLM", "vllm"), ("SGLang", "sglang")):
        found = [name for name in names if re.match(rf"{folder}-\d", name)]
        found += [path.name for path in (ROOT / f"tests/fixtures/{folder}").rglob("*.prom*")]
        releases = sorted({tuple(map(int, one)) for name in found for one in re.findall(r"(\d+)\.(\d+)\.(\d+)", name)})
        first, last = (".".join(map(str, one)) for one in (releases[0], releases[-1]))
        (row,) = re.findall(rf"^\| {server} \| (.+) \|$", BY_HAND["README.md"], re.M)
        assert f"metrics of {first} to {last} in tests" in row
        elsewhere = {page for page, text in BY_HAND.items() if re.search(rf"{server} \d[\d.]* to \d", text)}
        assert elsewhere == set()


def words(text: str) -> int:
    """Words of a page; the bars of tables are none."""
    return len(re.findall(r"\S*\w\S*", text))
