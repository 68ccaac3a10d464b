"""The page in a real browser: refreshes in place, works without scripts, is not fooled by hostile labels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.model.readings import EngineKey
from kvpressure.model.state import Diagnosis
from kvpressure.publish.web.http import HttpRequest, Response
from tests.publish.browser import visit
from tests.publish.conftest import Published, Start
from tests.publish.states import NOW, full_engine

pytestmark = pytest.mark.live

UNSAFE = "default-src 'unsafe-inline'"
NO_SCRIPT = "script-src 'none'"


class Changing:
    """The site, with something done before the second and every later view of the page."""

    def __init__(self, published: Published, then: Callable[[int], Response | None]) -> None:
        self._site = published.site()
        self._then = then
        self.views = 0

    def answer(self, request: HttpRequest) -> Response:
        if request.path == "/":
            self.views += 1
            if self.views > 1 and (other := self._then(self.views)) is not None:
                return other
        return self._site.answer(request)


def test_it_refreshes_in_place(start: Start, published: Published, tmp_path: Path) -> None:
    def recover(_: int) -> None:
        well = replace(full_engine(), diagnosis=Diagnosis("healthy", 0.9, None, NOW + 7))
        published.state = replace(published.state, time=NOW + 12, engines=(well,))

    changing = Changing(published, recover)
    found = visit(f"http://127.0.0.1:{start(changing)}/", tmp_path, seconds=7)
    assert found.console == ()
    assert changing.views == 2
    assert "1 engine: 1 healthy." in found.dom
    assert "2023-11-14 22:13:32 UTC" in found.dom
    assert "KV pressure (saturated)" not in found.dom
    assert "Refreshes every 5 s." in found.dom
    assert re.search(r'-triage" open', found.dom), "what the reader saw open stays open"


def test_it_says_when_the_exporter_is_gone_and_comes_back(start: Start, published: Published, tmp_path: Path) -> None:
    changing = Changing(published, lambda _: Response(503, b"no\n"))
    found = visit(f"http://127.0.0.1:{start(changing)}/", tmp_path, seconds=7)
    assert "The exporter does not answer (status 503). What you see is old." in found.dom
    assert "KV pressure (saturated)" in found.dom
    changing = Changing(published, lambda view: Response(503, b"no\n") if view == 2 else None)
    found = visit(f"http://127.0.0.1:{start(changing)}/", tmp_path, seconds=12)
    assert changing.views == 3
    assert "Refreshes every 5 s." in found.dom


class Altered:
    """The site with the page's policy replaced."""

    def __init__(self, published: Published, policy: str) -> None:
        self._site, self._policy = published.site(), policy

    def answer(self, request: HttpRequest) -> Response:
        response = self._site.answer(replace(request, headers={}))
        return replace(response, headers={**response.headers, "Content-Security-Policy": self._policy})


def test_without_scripts_everything_is_there(start: Start, published: Published, tmp_path: Path) -> None:
    found = visit(f"http://127.0.0.1:{start(Altered(published, NO_SCRIPT))}/", tmp_path)
    assert all("script" in line for line in found.console), "only the script that was forbidden is missed"
    for part in (
        "KV pressure (saturated)",
        "Check the transfers first",
        "The eight triage steps",
        "Reload to refresh.",
    ):
        assert part in found.dom
    assert re.search(r'id="pause"[^>]* hidden', found.dom), "no button that does nothing"


class Framed:
    """The site without its policy, and at ``/frame`` a page that shows it as wide as a phone (windows are wider)."""

    def __init__(self, published: Published, width: int) -> None:
        self._site = published.site()
        self._frame = (
            f"<iframe src='/' style='border:0;width:{width}px;height:900px' "
            'onload="const all = this.contentDocument.documentElement;'
            'document.body.id = `width-${all.scrollWidth}-of-${all.clientWidth}`"></iframe>'
        ).encode()

    def answer(self, request: HttpRequest) -> Response:
        if request.path == "/frame":
            return Response(200, self._frame, "text/html")
        response = self._site.answer(replace(request, headers={}))
        return replace(response, headers={"Content-Security-Policy": UNSAFE})


def test_it_fits_on_a_phone(start: Start, published: Published, tmp_path: Path) -> None:
    long = replace(full_engine(), key=EngineKey("n" * 63, "p" * 63, "organisation/" + "m" * 90, "0"))
    published.state = replace(published.state, engines=(long, full_engine()))
    found = visit(f"http://127.0.0.1:{start(Framed(published, 360))}/frame", tmp_path)
    assert re.findall(r'id="width-(\d+)-of-(\d+)"', found.dom) == [("360", "360")]
