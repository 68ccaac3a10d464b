"""The triage page: one node's state, readable with nothing but a browser.

It works without scripts and loads nothing: style, script and charts are inline, and its Content-Security-Policy
allows exactly these by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpressure import __version__
from kvpressure.advice import wording
from kvpressure.engines.registry import dialect
from kvpressure.model.isolation import CONTAINER, ENGINE, GPU, PAGE, SOURCE, Failure, container_name, engine_name
from kvpressure.model.readings import Discovered, SourceHealth
from kvpressure.model.state import GpuState, State
from kvpressure.printable import visible_lines
from kvpressure.publish.page.sparkline import HEIGHT, MINUTES, WIDTH, Sparkline, sparkline
from kvpressure.publish.page.view import PageEngine, ViewContext, dashboards, engine_views, headline

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_FOLDER: Final = Path(__file__).with_name("templates")
FINDINGS: Final = {"fine": "fine", "look": "look here", "bad": "bad", "unknown": "unknown"}


def _visible(value: object) -> object:
    """A template's value without control characters; markup is ours."""
    return visible_lines(value) if type(value) is str else value


def _advice(reason: str | None, source: str) -> str:
    """What to do about a source that is down; "" = unknown."""
    from kvpressure.publish.failure_reasons import action  # only a page with a failing source needs the table

    return action(source, reason or "")


@lru_cache(maxsize=8)
def _template(name: str) -> Template:
    """A compiled template. jinja2 is imported by the first view, because the exporter needs less memory without it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=wording.bytes_text,
        percent=wording.percent_text,
        duration=wording.duration_text,
        clock=wording.clock_text,
        number=wording.number_text,
        words=wording.words,
        reason=wording.reason_text,
        advice=_advice,
    )
    return environment.get_template(name)


@lru_cache(maxsize=2)
def _asset(name: str) -> str:
    """Style or script exactly as in the page, which is what its hash covers."""
    return (_FOLDER / name).read_text(encoding="utf-8").strip()


@lru_cache(maxsize=1)
def page_headers() -> dict[str, str]:
    """Security headers of the page."""
    style, script = (_hash(_asset(name)) for name in ("page.css", "page.js"))
    return {
        "Content-Security-Policy": f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Frame-Options": "deny",
        "Referrer-Policy": "no-referrer",
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True, slots=True)
class Chart:
    """One sparkline with its texts."""

    title: str
    now: str
    highest: str
    line: Sparkline


def render_page(state: State, node: str, telemetry_path: str, around: ViewContext) -> str:
    """The page for ``state`` as HTML; every value is escaped."""
    from markupsafe import Markup

    parts = _Parts(state, around)
    return _template("page.html.j2").render(
        state=state,
        node=node,
        telemetry_path=telemetry_path,
        version=__version__,
        headline=headline(state, around.guard),
        engines=engine_views(state, around),
        dashboards=dashboards(around),
        links=around.links,
        article=parts.article,
        gpu_row=parts.gpu_row,
        source_row=parts.source_row,
        discovered_row=parts.discovered_row,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
    )


class _Parts:
    """Parts of the page, each rendered apart; one that fails becomes a line that says so."""

    def __init__(self, state: State, around: ViewContext) -> None:
        self._state = state
        self._around = around

    def article(self, view: PageEngine) -> Markup:
        """One engine."""
        key = view.state.key
        return self._part(
            ENGINE,
            engine_name(key),
            '<article class="unknown"><h3>{}</h3><p><strong>{}</strong></p></article>',
            "engine.html.j2",
            lambda: {
                "view": view,
                "charts": _charts(view, self._around),
                "findings": FINDINGS,
                "confident": self._around.thresholds["confident"],
                "width": WIDTH,
                "height": HEIGHT,
                "minutes": MINUTES,
            },
        )

    def gpu_row(self, gpu: GpuState) -> Markup:
        """One GPU."""
        return self._part(
            GPU,
            gpu.reading.uuid,
            '<tr><th scope="row">{}</th><td colspan="6">{}</td></tr>',
            "gpu.html.j2",
            lambda: {"gpu": gpu},
        )

    def source_row(self, name: str, health: SourceHealth) -> Markup:
        """One source."""
        return self._part(
            SOURCE,
            name,
            '<tr><th scope="row">{}</th><td colspan="3">{}</td></tr>',
            "source.html.j2",
            lambda: {"name": name, "health": health},
        )

    def discovered_row(self, found: Discovered) -> Markup:
        """One container that has a GPU or looks like an inference server."""
        return self._part(
            CONTAINER,
            container_name(found),
            '<tr><th scope="row">{}</th><td colspan="5">{}</td></tr>',
            "discovered.html.j2",
            lambda: {"found": found},
        )

    def _part(self, kind: str, name: str, instead: str, template: str, values: Callable[[], dict[str, Any]]) -> Markup:
        from markupsafe import Markup

        def render() -> str:
            return _template(template).render(state=self._state, **values())

        found = self._around.guard.run(PAGE, kind, lambda: name, render)
        return Markup(instead).format(name, found.text) if isinstance(found, Failure) else Markup(found)


def _charts(view: PageEngine, around: ViewContext) -> list[Chart]:
    """The engine's charts; without history, of the current values."""
    t, signals = around.thresholds, view.state.signals
    limit, lost = signals.load.max_num_seqs, dialect(view.state.dialect).called("preemptions")
    rows: tuple[tuple[str, str, float | None, dict[str, Any], Any], ...] = (
        (
            "KV cache, maximum",
            "kv_used_ratio_max",
            signals.kv.kv_used_ratio_max,
            {"top": 1.0, "mark": t["kv_full_ratio"]},
            wording.percent_text,
        ),
        (
            "Running" if limit is None else f"Running of {wording.number_text(limit)}",
            "running",
            signals.load.running,
            {"mark": limit},
            wording.number_text,
        ),
        ("Waiting", "waiting", signals.load.waiting, {}, wording.number_text),
        ("Batch, p95", "batch_p95", signals.batch.batch_p95, {}, wording.number_text),
        (f"{lost.capitalize()} per second", "preemption_rate", signals.kv.preemption_rate, {}, wording.number_text),
    )
    found = []
    for title, name, present, scale, text in rows:
        line = sparkline(view.history.get(name, (present,)), **scale)
        found.append(Chart(title, text(present), text(line.highest), line))
    return found
