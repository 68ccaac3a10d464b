"""Numbers and reasons in words, for page, triage and mitigation; an unknown number is a dash."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from kvpressure.diagnosis.numbers import percent, seconds, size
from kvpressure.engines.other_software import SOFTWARE
from kvpressure.engines.registry import dialect, dialects
from kvpressure.model import ceilings
from kvpressure.model.reasons import NOT_METRICS, in_words
from kvpressure.printable import grouped

UNKNOWN: Final = "–"


def bytes_text(value: float | None) -> str:
    """Bytes in binary units (KiB, MiB, ...)."""
    return UNKNOWN if value is None else size(value)


def percent_text(value: float | None) -> str:
    """A ratio as a whole percentage."""
    return UNKNOWN if value is None else percent(value)


def number_text(value: float | None) -> str:
    """A count without decimals, a small number with one or two; thousands are separated."""
    if value is None or not ceilings.is_finite(value):
        return UNKNOWN
    if value == int(value) or abs(value) >= 100:
        return grouped(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")


def counted(count: float | None, one: str) -> str:
    """``1 restart``, ``3 restarts``."""
    return f"{number_text(count)} {one}{'' if count == 1 else 's'}"


def seconds_text(value: float | None) -> str:
    """Seconds; milliseconds below 1 s."""
    return UNKNOWN if value is None else seconds(value)


def duration_text(total: float) -> str:
    """A duration in its two largest units."""
    left = max(0, int(total))
    parts = []
    for name, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length:
            parts.append(f"{left // length} {name}")
            left %= length
    return " ".join(parts[:2]) or "0 s"


def clock_text(time: float | None) -> str:
    """Date and time in UTC."""
    return UNKNOWN if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def named(name: str, text: str) -> str:
    """A number with its name: ``peak 97 %``, ``peak: unknown``."""
    return f"{name}: unknown" if text in (UNKNOWN, "unknown") else f"{name} {text}"


def capital(text: str) -> str:
    """``text`` with a capital at its beginning."""
    return f"{text[:1].upper()}{text[1:]}"


def words(name: str | None) -> str:
    """A name in words: ``kv_pressure`` -> ``KV pressure``."""
    if name is None:
        return UNKNOWN
    return " ".join(_CAPITAL.get(word, word) for word in name.split("_"))


def reason_text(reason: str | None, engine: str = "") -> str:
    """Why a scrape failed, in words: ``refused`` -> ``connection refused``; ``no response yet`` for None. ``engine``:
    the dialect of the server, "" = unknown.
    """
    if reason is None:
        return "no response yet"
    software = SOFTWARE.get(reason)
    if software is not None:
        return f"this is {software.title}: {software.advice}"
    if reason in _SWITCHED_OFF:
        return f"{_SWITCHED_OFF[reason]}: start {switches(engine)})"
    return in_words(reason)


def other_place(reason: str | None) -> str:
    """What to scrape instead where something else answers at the target; "" where nothing does, or an engine."""
    software = SOFTWARE.get(reason or "")
    if software is not None:
        return software.instead
    return "the metrics endpoint of an engine" if reason in NOT_METRICS or reason in _SWITCHED_OFF else ""


def switches(engine: str = "") -> str:
    """How to start a server so that it publishes metrics: ``vLLM without --flag``; all servers for ""."""
    known = (dialect(engine),) if engine else dialects()
    return ", ".join(f"{one.title} {one.metrics_switch}" for one in known if one.metrics_switch)


_SWITCHED_OFF: Final = {
    "http_404": "HTTP 404 response (another path, or the server's metrics are switched off",
    "no_engine_metrics": "no engine metrics there (another service, or the server's metrics are switched off",
}
_CAPITAL: Final = {"kv": "KV", "gpu": "GPU", "cpu": "CPU", "oom": "OOM", "cuda": "CUDA", "api": "API"}
