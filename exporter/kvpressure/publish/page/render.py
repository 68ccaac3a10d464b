"""The exporter's own page: one node's answer with nothing but a browser. Renders the published state only.

It works without scripts and loads nothing: style, script and charts are in the page, and its Content-Security-Policy
allows exactly these by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpressure import __version__
from kvpressure.publish import wording
from kvpressure.publish.sparkline import HEIGHT, MINUTES, WIDTH, Sparkline, sparkline
from kvpressure.publish.view import EngineView, Surroundings, boards, engine_views, headline
from kvpressure.state import State

if TYPE_CHECKING:
    from jinja2 import Template

_FOLDER: Final = Path(__file__).with_name("templates")
FINDINGS: Final = {"fine": "fine", "look": "look here", "bad": "bad", "unknown": "not known"}


@lru_cache(maxsize=1)
def _template() -> Template:
    """The compiled page. jinja2 is imported by the first view, so that an exporter nobody looks at is lighter."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
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
    )
    return environment.get_template("page.html.j2")


@lru_cache(maxsize=2)
def _asset(name: str) -> str:
    """Style or script as it stands in the page, so also as it is hashed."""
    return (_FOLDER / name).read_text(encoding="utf-8").strip()


@lru_cache(maxsize=1)
def page_headers() -> dict[str, str]:
    """Headers that let the page do what it does and nothing else."""
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
    """One sparkline with its words."""

    title: str
    now: str
    highest: str
    line: Sparkline


def render_page(state: State, node: str, telemetry_path: str, around: Surroundings) -> str:
    """The page for ``state`` as HTML, every value escaped."""
    from markupsafe import Markup

    def charts(view: EngineView) -> list[Chart]:
        return _charts(view, around)

    return _template().render(
        state=state,
        node=node,
        telemetry_path=telemetry_path,
        version=__version__,
        headline=headline(state),
        engines=engine_views(state, around),
        boards=boards(around),
        links=around.links,
        charts=charts,
        findings=FINDINGS,
        confident=around.thresholds["confident"],
        width=WIDTH,
        height=HEIGHT,
        minutes=MINUTES,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
    )


def _charts(view: EngineView, around: Surroundings) -> list[Chart]:
    """The engine's last minutes; without history the present values."""
    t, signals = around.thresholds, view.state.signals
    limit = signals.load.max_num_seqs
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
        ("Preemptions per second", "preemption_rate", signals.kv.preemption_rate, {}, wording.number_text),
    )
    found = []
    for title, name, present, scale, text in rows:
        line = sparkline(view.history.get(name, (present,)), **scale)
        found.append(Chart(title, text(present), text(line.highest), line))
    return found
