"""``fixtures/engine-pages/families.md`` lists every family of the pages under ``fixtures``: read, or not and why."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvpressure.engines.registry import samples

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
DOCUMENT = (FIXTURES / "engine-pages" / "families.md").read_text()
VLLM = ("vllm/**/*.prom.gz", "engine-pages/vllm-[0-9da]*.prom", "pages-2026/*vllm-*.*")
PAGES = {
    "vLLM": ("vllm:", VLLM),
    "NVIDIA NIM": ("", ("engine-pages/nim.prom",)),
    "SGLang": ("sglang:", ("sglang/pages/*", "engine-pages/sglang-[0-9dpt]*.prom", "pages-2026/*sglang-*.*")),
}
every_server = pytest.mark.parametrize("server", PAGES)


@cache
def text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


@cache
def on_pages(server: str) -> frozenset[str]:
    """Families by their ``# TYPE`` lines, without the server's prefix."""
    prefix, globs = PAGES[server]
    found = {
        name.removeprefix(prefix)
        for glob in globs
        for path in FIXTURES.glob(glob)
        for name in re.findall(r"^# TYPE (\S+)", text(path), re.MULTILINE)
        if name.startswith(prefix)
    }
    return frozenset(name for name in found if not name.endswith("_created"))


def is_read(name: str) -> bool:
    return any(f"{name}{part}" in samples() for part in ("", "_total", "_bucket", "_sum", "_count"))


def rows(server: str) -> Iterator[tuple[str, str]]:
    section = DOCUMENT.partition(f"## {server}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("|") and "`" in line:
            first, second = line.strip("| ").split(" | ")
            yield first, second


def said_read(server: str) -> list[str]:
    return [name for kind, names in rows(server) if "`" not in kind for name in re.findall(r"`([^`]+)`", names)]


def said_unread(server: str) -> list[tuple[str, str]]:
    return [(name, why) for names, why in rows(server) for name in re.findall(r"`([^`]+)`", names) if "`" in names]


@every_server
def test_each_family_of_a_page_is_listed_once_and_is_read_as_it_says(server: str) -> None:
    listed = [*said_read(server), *(name for name, _ in said_unread(server))]
    assert len(listed) == len(set(listed))
    assert sorted(on_pages(server) - set(listed)) == []
    prefix = PAGES[server][0]
    assert [name for name in said_read(server) if not is_read(prefix + name)] == []
    assert [name for name, why in said_unread(server) if is_read(prefix + name) or not why] == []
