"""The exporter's own page: one node's answer with nothing but a browser. Renders the published state only."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvpressure import __version__
from kvpressure.state import State

if TYPE_CHECKING:
    from jinja2 import Template

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@lru_cache(maxsize=1)
def _template() -> Template:
    """The compiled page. jinja2 is imported by the first view, so that an exporter nobody looks at is lighter."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("kvpressure.publish"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bytes=bytes_text, percent=percent_text, duration=duration_text, clock=clock_text,
                               words=words)
    return environment.get_template("page.html.j2")


def render_page(state: State, node_name: str, telemetry_path: str) -> str:
    """The page for ``state`` as HTML, every value escaped."""
    return _template().render(state=state, node=node_name, telemetry_path=telemetry_path, version=__version__)


def bytes_text(value: float | None) -> str:
    """Bytes in binary units; a dash when not known."""
    if value is None:
        return "–"
    size, unit = float(value), 0
    while abs(size) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_BYTE_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_BYTE_UNITS[unit]}"


def percent_text(value: float | None) -> str:
    """A ratio as a percentage; a dash when not known."""
    return "–" if value is None else f"{100 * value:.0f} %"


def duration_text(seconds: float) -> str:
    """A duration in its two largest units."""
    left = max(0, int(seconds))
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size} {name}")
            left %= size
    return " ".join(parts[:2]) or "0 s"


def clock_text(time: float | None) -> str:
    """Date and time in UTC; a dash when there is none."""
    return "–" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def words(name: str | None) -> str:
    """A name of the model in words: ``kv_pressure`` -> ``kv pressure``."""
    return "–" if name is None else name.replace("_", " ")
