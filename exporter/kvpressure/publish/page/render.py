"""The triage page: one node's state, readable with nothing but a browser.

It works without scripts and loads nothing: style and script are inline, and its Content-Security-Policy
allows exactly these by hash.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpressure import __version__
from kvpressure.advice import wording
from kvpressure.engines.registry import dialect
from kvpressure.model.isolation import CONTAINER, GPU, SOURCE, container_name
from kvpressure.model.state import EngineState, GpuState, State
from kvpressure.printable import duration, say, visible_lines
from kvpressure.publish.page.view import PageEngine, ViewContext, dashboards, headline, rendered_engines

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
        bytes=partial(say, unit="bytes"),
        percent=partial(say, unit="ratio"),
        duration=duration,
        clock=wording.clock_text,
        number=say,
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


def render_page(state: State, node: str, around: ViewContext) -> str:
    """The page for ``state`` as HTML; every value is escaped."""
    from markupsafe import Markup

    def part(template: str, **values: object) -> Markup:
        return Markup(_template(template).render(state=state, **values))

    def article(view: PageEngine) -> Markup:
        return part(
            "engine.html.j2",
            view=view,
            load=_load(view.state),
            findings=FINDINGS,
            confident=around.thresholds["confident"],
        )

    each = around.guard.each
    engines = rendered_engines(state.engines, state, around, article)
    parts = {
        "engines": sorted(engines, key=lambda one: one[0].worst_first),
        "gpus": each(
            GPU,
            state.gpus,
            lambda gpu: gpu.reading.uuid,
            lambda gpu: part("gpu.html.j2", gpu=gpu),
            GpuState.without_values,
        ),
        "discovered": each(
            CONTAINER, state.discovered, container_name, lambda one: part("discovered.html.j2", found=one)
        ),
        "sources": each(
            SOURCE,
            state.health.items(),
            lambda one: one[0],
            lambda one: part("source.html.j2", name=one[0], health=one[1]),
        ),
    }
    return _template("page.html.j2").render(
        state=state,
        node=node,
        version=__version__,
        headline=headline((view.said for view, _ in engines), len(state.engines)),
        dashboards=dashboards(around),
        links=around.links,
        failures=[*state.failures, *around.guard.counts],  # last: what failed above is among them
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        **parts,
    )


def _load(engine: EngineState) -> dict[str, str]:
    """The engine's load now, by what it is."""
    signals = engine.signals
    limit = signals.load.max_num_seqs
    return {
        "KV cache, maximum": say(signals.kv.kv_used_ratio_max, "ratio"),
        "Running" if limit is None else f"Running (limit {say(limit)})": say(signals.load.running),
        "Waiting": say(signals.load.waiting),
        "Batch, p95": say(signals.batch.batch_p95),
        f"{dialect(engine.dialect).called('preemptions').capitalize()} per second": say(signals.kv.preemption_rate),
    }
