"""Build the site: ``python -m tools.site``, into build/site. Needs the packages of requirements/site.txt.

Sphinx reads a copy of the pages in the folders that they have here, with the files that they link, so that no link is
rewritten. Every warning is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Final

from tools.site import nav

ROOT: Final = nav.ROOT
_HERE: Final = Path(__file__).parent
_LINK: Final = re.compile(r"\]\(([^)#\s]+)")
_WIDE: Final = """\
@media (min-width: 100em) { .content { width: 62em; } }
.table-wrapper { overflow-x: auto; }
td:has(code) { min-width: 12em; }
td code { overflow-wrap: anywhere; }
"""
_INDEX: Final = """\
<!doctype html><meta charset="utf-8"><title>kvpressure</title>
<meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">kvpressure</a>
"""


def stage(target: Path) -> None:
    """Copy the pages, what they link, and the navigation into ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    for page in nav.pages():
        _copy(ROOT / page, target)
        for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            linked = (ROOT / page).parent / link
            if "://" not in link and linked.resolve().is_file():
                _copy(linked.resolve(), target)
    for copied in {path.relative_to(target).as_posix() for path in target.rglob("*.md")} - {*nav.pages()}:
        path = target / copied
        path.write_text(f"---\norphan: true\n---\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    for section in nav.sections():
        _add(target / nav.START, section.task[0].upper() + section.task[1:], section.pages)
    _add(target / nav.RUNBOOKS, "", nav.runbooks())
    (target / "_static").mkdir()
    (target / "_static/wide.css").write_text(_WIDE, encoding="utf-8")
    shutil.copy(_HERE / "conf.py", target / "conf.py")


def _copy(path: Path, target: Path) -> None:
    place = target / path.relative_to(ROOT)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def _add(page: Path, caption: str, pages: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> None:
    entries = [f"{_capital(label)} </{path.removesuffix('.md')}>" for label, path in pages]
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    tree = "\n".join(["", "```{toctree}", *head, "", *entries, "```", ""])
    page.write_text(page.read_text(encoding="utf-8") + tree, encoding="utf-8")


def _capital(label: str) -> str:
    """The label with a capital, unless its first word has one (vLLM)."""
    return label if label.split("-")[0] != label.split("-")[0].lower() else label[0].upper() + label[1:]


def main() -> int:
    """Build; 0 = without a warning."""
    from sphinx.cmd.build import build_main

    source, site = ROOT / "build/site-pages", ROOT / "build/site"
    stage(source)
    shutil.rmtree(site, ignore_errors=True)
    status: int = build_main(
        ["-q", "-W", "--keep-going", "-b", "html", "-d", str(ROOT / "build/site-cache"), str(source), str(site)]
    )
    if status == 0:
        (site / "index.html").write_text(_INDEX, encoding="utf-8")
        print(f"site: {site / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
