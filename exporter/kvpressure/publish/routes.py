"""What is served at which path, rendered once per state.

A request never waits for a driver or an engine: it renders the last tick's state, or gets the bytes already rendered
for it. ``X-Prometheus-Scrape-Timeout-Seconds`` is therefore ignored.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from kvpressure.model.state import State
from kvpressure.publish.collector import collect
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.exposition import CLASSIC_TYPE, OPENMETRICS_TYPE, Encoder, wants_openmetrics
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.web.hosts import Hosts
from kvpressure.publish.web.http import HttpRequest, Response, text_response

GZIP_LEVEL: Final = 2  # on such repetitive text as good as 6, at half the time


class Site:
    """Answers requests. Not thread-safe: only the server's loop calls it. ``rendering``: held meanwhile."""

    def __init__(
        self,
        state: Callable[[], State],
        *,
        why_unhealthy: Callable[[], str | None],
        why_not_ready: Callable[[], str | None],
        node_name: str = "",
        around: ViewContext | None = None,
        hosts: Hosts | None = None,
        renamed: Mapping[str, str] | None = None,
        rendering: AbstractContextManager[object] | None = None,
    ) -> None:
        self._state = state
        self._rendering = rendering or nullcontext()
        self._why_unhealthy = why_unhealthy
        self._why_not_ready = why_not_ready
        self._node_name = node_name
        self._around = around or ViewContext()
        self._hosts = hosts or Hosts((node_name,))
        self._encoder = Encoder(renamed)
        self._rendered_of: State | None = None
        self._rendered: dict[str, bytes] = {}  # packed, by content type
        self._routes: dict[str, Callable[[HttpRequest], Response]] = {
            "/metrics": self._metrics,
            "/": self._page,
            "/api/v1/diagnosis": self._diagnosis,
            "/-/healthy": lambda _: _check(self._why_unhealthy(), "healthy"),
            "/-/ready": lambda _: _check(self._why_not_ready(), "ready"),
        }

    def answer(self, request: HttpRequest) -> Response:
        """The response to ``request``; HEAD gets that of GET (the server omits the body)."""
        route = self._routes.get(request.path)
        if route is None:
            return text_response(404)
        if (refused := self._hosts.refuses(request.headers)) is not None:
            return text_response(421, f"host name {refused[:253]!a} is not allowed; see --web.allowed-hosts")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, headers={"Allow": "GET, HEAD"})
        return route(request)

    def _metrics(self, request: HttpRequest) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        state = self._state()

        def render() -> bytes:
            return self._encoder.encode(collect(state, self._around.guard), openmetrics=openmetrics)

        kind = OPENMETRICS_TYPE if openmetrics else CLASSIC_TYPE
        return self._cached(state, kind, render, request, {"Vary": "Accept, Accept-Encoding"})

    def _diagnosis(self, request: HttpRequest) -> Response:
        state = self._state()

        def render() -> bytes:
            return json.dumps(diagnosis_document(state, self._node_name, self._around), allow_nan=False).encode()

        return self._cached(state, "application/json", render, request, {"Vary": "Accept-Encoding"})

    def _page(self, request: HttpRequest) -> Response:
        from kvpressure.publish.page.render import page_headers, render_page

        state = self._state()
        return self._cached(
            state,
            "text/html; charset=utf-8",
            lambda: render_page(state, self._node_name, self._around).encode(),
            request,
            {"Vary": "Accept-Encoding", **page_headers()},
        )

    def _cached(
        self,
        state: State,
        content_type: str,
        render: Callable[[], bytes],
        request: HttpRequest,
        headers: dict[str, str],
    ) -> Response:
        if state is not self._rendered_of:
            self._rendered_of, self._rendered = state, {}
        packed = self._rendered.get(content_type)
        if packed is None:
            with self._rendering:
                plain = render()
            packed = self._rendered[content_type] = gzip.compress(plain, GZIP_LEVEL, mtime=0)
        if not _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(200, gzip.decompress(packed), content_type, headers)
        return Response(200, packed, content_type, {**headers, "Content-Encoding": "gzip"})


def _check(problem: str | None, fine: str) -> Response:
    return text_response(200, fine) if problem is None else text_response(503, problem)


def _accepts_gzip(accept_encoding: str) -> bool:
    for part in accept_encoding.lower().split(","):
        name, _, parameters = part.partition(";")
        if name.strip() in ("gzip", "x-gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
