"""The site has every page exactly once, by task, and no link of it leads out of what is copied."""

from __future__ import annotations

import re
from pathlib import Path

from tools.site import nav
from tools.site.__main__ import stage

from tests.docs.test_documents import DOCUMENTS

ROOT = Path(__file__).parents[2]
TASKS = ["start", "install", "use in an incident", "understand a verdict", "tune", "operate", "extend"]


def test_the_navigation_lists_every_page_exactly_once() -> None:
    pages = nav.pages()
    assert sorted(pages) == sorted({*pages})
    chart = ROOT / "deploy/helm/kvpressure/README.md"
    assert {*pages} == {path.relative_to(ROOT).as_posix() for path in (*DOCUMENTS, chart)}


def test_it_is_by_task_with_reference_and_reports_apart() -> None:
    assert [section.task for section in nav.sections()] == [*TASKS, "reference (generated)", "reports (generated)"]


def test_what_a_page_links_is_copied_and_every_page_is_in_one_tree(tmp_path: Path) -> None:
    stage(tmp_path / "site")
    missing, listed = [], []
    for page in sorted((tmp_path / "site").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        links = (link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link)
        missing += [(page.name, link) for link in links if not (page.parent / link).is_file()]
        listed += re.findall(r"^.+ </(.+)>$", text, re.MULTILINE)
    assert missing == []
    assert sorted(f"{page}.md" for page in listed) == sorted(page for page in nav.pages() if page != nav.START)
    orphans = [path for path in (tmp_path / "site").rglob("*.md") if path.read_text().startswith("---\norphan: true")]
    assert [path.name for path in orphans] == ["families.md"]
