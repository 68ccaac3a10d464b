"""Names, times, reasons and harm in words, for page, triage, mitigation and alerts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from kvpressure.diagnosis.finding import PHASES
from kvpressure.engines.other_software import SOFTWARE
from kvpressure.engines.registry import dialect, dialects
from kvpressure.model.readings import EngineKey
from kvpressure.model.reasons import NOT_METRICS, in_words
from kvpressure.model.signals import CacheSignals
from kvpressure.model.state import ACTIONABLE, CALM, Cause, EngineState
from kvpressure.printable import UNKNOWN, Asked, capital, command, say, visible, without_markup
from kvpressure.signals.kv import MEASURED


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


@dataclass(frozen=True, slots=True)
class Harm:
    """What an alert reads of a finding while it holds: ``name``, ``level``, the number users feel (``value``, in
    ``unit``; ``None`` = the finding alone), and what the alert says: ``head``, which the number follows, and ``more``,
    of both without the parts between commas that have an unknown number. ``otherwise``: what to do first where the
    verdict asks for nothing; ``first``: what to do first whatever it asks for.
    """

    name: str
    level: str
    head: str
    more: str = ""
    value: Callable[[EngineState], float | None] | None = None
    unit: str = ""
    otherwise: str = "compare with the other engines of the pool, and look in front of them: gateway, network, clients"
    first: str = ""


def _slow(level: str) -> Harm:
    def seconds(engine: EngineState) -> float | None:
        return engine.diagnosis.slow.seconds if engine.diagnosis.slow else None

    return Harm("slow", level, "{phase} of {who} at p95, {usual}", "", seconds, "seconds")


def _losing(level: str) -> Harm:
    return Harm(
        "losing_requests",
        level,
        "Requests of {who} that end without an answer",
        "Most of them {lost}, usual share of abandoned ones: {usual_abandoned}",
        lambda e: e.signals.requests.requests_lost_ratio,
        "ratio",
        "read the server's log ({log}), and the gateway's for its time limit",
    )


HARMS: Final[Mapping[str, Harm]] = {
    "slow": _slow("warning"),
    "slow_badly": _slow("critical"),
    "losing_requests": _losing("warning"),
    "losing_requests_badly": _losing("critical"),
    "stuck": Harm(
        "stuck",
        "critical",
        "{who} answers nothing, {in_flight} requests in flight",
        "No token has come and no request has finished. Health checks may still pass",
        lambda e: e.signals.progress.seconds_without_progress,
        "seconds",
        "save the stacks and the log ({log}), then restart the engine",
    ),
    "answers_suspect": Harm(
        "answers_suspect",
        "critical",
        "Answers of {who} may be wrong: KV blocks were read after they were freed",
        "Another server read KV blocks whose lease had expired, so they may have held another prompt. These requests"
        " end with HTTP 200, and neither latency nor errors show it",
        lambda e: e.signals.transfers.read_after_expiry,
        first="take the pair out of service until its decode side fetches in time",
    ),
    "kv_pressure": Harm("kv_pressure", "warning", "KV cache of {who} is full, {kv_used}"),
    "reuse_lost": Harm(
        "reuse_lost",
        "warning",
        "{who} computes prompts again that it had cached, hit ratio {hit_ratio}",
        "Users wait for prefill of prompts whose KV blocks were evicted before they came back, {repeated} of the"
        " prefill is repeated, hit ratio with twice the KV memory: {hit_ratio_twice}",
    ),
    "host_bound": Harm(
        "host_bound",
        "warning",
        "GPU of {who} waits for the CPU, {throttled} of the CPU periods throttled",
        "The KV cache is not the cause, even if GPU memory is high and GPU utilization low",
    ),
    "kv_transfers_failing": Harm(
        "kv_transfers_failing",
        "warning",
        "KV blocks do not get through between {who} and its peer, {transfers_failed} of the transfers fail",
        "Transfers fail or stand still, prompts are thrown away before the other side has them, or the decode side"
        " computes them itself. Each fault is counted on one of the two servers: look at both",
    ),
}
"""Findings that are published once more while they hold: rules then read the few series of engines that are in trouble,
and find in them what to say.
"""


_ABSENT: Final = "\0"  # which no name has


def _about(value: float | None, unit: str = "", digits: int = 1) -> str:
    """A number as a label may have it: with few digits, so that it rarely changes."""
    return _ABSENT if value is None else say(float(f"{value:.{digits}g}"), unit)


def _usual(engine: EngineState) -> str:
    slow = engine.diagnosis.slow
    return (
        "usual value not known yet" if not slow or slow.usual is None else f"usually {_about(slow.usual, 'seconds', 2)}"
    )


def _log(engine: EngineState) -> str:
    namespace, pod = engine.key.namespace, engine.key.pod or ""
    return command("kubectl", "-n", namespace, "logs", pod, "--since=15m") if namespace else "journalctl or docker logs"


def _lost(engine: EngineState) -> str:
    requests = engine.signals.requests
    fail = (requests.failed_ratio or 0.0) >= (requests.abandoned_more_ratio or 0.0)
    return "fail" if fail else "are abandoned by their clients"


_SAID: Final[Mapping[str, Callable[[EngineState], str]]] = MappingProxyType(
    {
        "who": lambda e: f"{e.key.model_name} ({'/'.join(filter(None, (e.key.namespace, e.key.pod)))})",
        "rank": lambda e: e.key.engine,
        "phase": lambda e: capital(PHASES[e.diagnosis.slow.phase]) if e.diagnosis.slow else "Latency",
        "usual": _usual,
        "lost": _lost,
        "log": _log,
        "in_flight": lambda e: _about(e.signals.load.in_flight),
        "waiting": lambda e: _about(e.signals.load.waiting),
        "running": lambda e: _about(e.signals.load.running),
        "usual_abandoned": lambda e: _about(e.signals.requests.abandoned_usual_ratio, "ratio"),
        "kv_used": lambda e: _about(e.signals.kv.kv_used_ratio_max, "ratio"),
        "hit_ratio": lambda e: _about(e.signals.kv.prefix_hit_ratio.get(MEASURED), "ratio"),
        "hit_ratio_twice": lambda e: _about(e.signals.kv.prefix_hit_ratio.get("2"), "ratio"),
        "repeated": lambda e: _about(e.signals.kv.prefill_repeated_ratio, "ratio"),
        "throttled": lambda e: _about(e.signals.host.cpu_throttled_ratio, "ratio"),
        "transfers_failed": lambda e: _about(e.signals.transfers.transfers_failed_ratio, "ratio"),
    }
)
"""What an alert says of an engine, in words that change rarely, because they are a label."""


def _cause(engine: EngineState, cause: Cause) -> str:
    found = engine.diagnosis
    if found.verdict in CALM:
        return f"none seen in the engine, whose verdict is {found.verdict}"
    if found.verdict == UNKNOWN:
        return f"unknown ({cause.cause})"
    sure = say(found.confidence, "ratio")
    if found.published.get("verdict_confident"):
        return f"{cause.cause} ({sure} certain)"
    return f"not certain; most likely {cause.cause} ({sure})"


def told(engine: EngineState, harm: Harm, cause: Cause) -> str:
    """What an alert about this harm says: what users feel, where, requests, why, what to do first, what to type. The
    first sentence is the summary.
    """
    values = Asked(lambda name: _SAID[name](engine))

    def known(text: str) -> str:
        filled = (part.format_map(values) for part in text.split(", "))
        return ", ".join(part for part in filled if _ABSENT not in part)

    key, asks = engine.key, engine.diagnosis.verdict in ACTIONABLE or bool(harm.first)
    where = (*(("-n", key.namespace) if key.namespace else ()), "--pod", key.pod or "")
    sentences = (
        known(harm.head),
        known(harm.more),
        known("Engine {rank}: about {waiting} requests wait, {running} run"),
        "Cause: " + _cause(engine, cause),
        "First action: " + (harm.first or cause.action or harm.otherwise.format_map(values)),
        "Run: " + command("kvpressure", "mitigate" if asks else "diagnose", *where),
    )
    return without_markup(". ".join(filter(None, sentences)))
