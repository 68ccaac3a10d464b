"""Names, times and reasons in words, for page, triage and mitigation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from kvpressure.engines.other_software import SOFTWARE
from kvpressure.engines.registry import dialect, dialects
from kvpressure.model.readings import EngineKey
from kvpressure.model.reasons import NOT_METRICS, in_words
from kvpressure.model.signals import CacheSignals
from kvpressure.model.state import EngineState
from kvpressure.printable import UNKNOWN, visible


def clock_text(time: float | None) -> str:
    """Date and time in UTC."""
    return UNKNOWN if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def name_of(key: EngineKey) -> str:
    """Namespace, pod, model and rank, as far as known, on one line."""
    pod = "/".join(part for part in (key.namespace, key.pod) if part)
    rank = f"engine {key.engine}" if key.engine else ""
    return visible(" ".join(part for part in (pod, key.model_name, rank) if part)) or "engine"


def words(name: str | None) -> str:
    """A name in words: ``kv_pressure`` -> ``KV pressure``."""
    return UNKNOWN if name is None else " ".join(_CAPITAL.get(word, word) for word in name.split("_"))


def no_events(cache: CacheSignals) -> str:
    """Why KV events do not show what is in the prefix cache, "" = they do."""
    if not cache.events_complete:
        return "no KV events are read"
    reason = next(iter(cache.events_complete))
    return reason and f"KV events are incomplete ({in_words(reason)})"


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


def scrape_error(engine: EngineState) -> str:
    """Why the last scrape of an engine failed, in words."""
    if engine.rival_label:
        return f"series collide in label {engine.rival_label}, which is not known"
    return reason_text(engine.error, engine.dialect)


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
