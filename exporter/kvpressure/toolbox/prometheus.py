"""Reads the past from a Prometheus that scrapes vLLM: raw samples become expositions, and these snapshots; or that
scrapes exporters: the series of one scrape become the entry that an exporter's document has of an engine.

Samples are queried as range vectors, which have the time of their scrape. Each scraped server is judged apart, in
periods of ``CHUNK_SECONDS``, which bounds memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvpressure import redaction
from kvpressure.advice.action import HARMS
from kvpressure.advice.wording import words
from kvpressure.diagnosis.findings import reasons
from kvpressure.engines.registry import dialect, dialects, samples
from kvpressure.errors import InputError, shown
from kvpressure.model import ceilings
from kvpressure.model.readings import RUNNING, Snapshot
from kvpressure.parsed import items, json_of, mapping
from kvpressure.printable import say
from kvpressure.publish.metrics import ENGINE, PREFIXED
from kvpressure.recording.timeline import clock
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import FIVE_MINUTES
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.toolbox.live_pages import Around, GivenGpu, snapshot

CHUNK_SECONDS: Final = 600
MAX_SERVERS: Final = 16
TIMEOUT_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 60.0  # for an answer as a whole, however slowly it comes
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # ten minutes of 64 engines at one scrape a second have 40 MiB
"""An answer of Prometheus to a command. Beyond: one error line."""
_PART_BYTES: Final = 256 * 1024

Pod = tuple[str, str]  # namespace and name
_SERVER: Final = ("instance", "job", "namespace", "pod", "container")
_CLIENT_LABELS: Final = frozenset({"model_name", "le", "status", "method", "handler", "quantile"})


@dataclass(frozen=True, slots=True)
class Query:
    """Which servers, the moment to report, and how far back from there. ``model``: only engines of this name;
    ``args``: their command line, if stated.
    """

    url: str
    at: float
    since_seconds: float
    namespace: str | None = None
    pod: str | None = None
    model: str | None = None
    token: str | None = None
    args: tuple[str, ...] = ()


class Prometheus:
    """The HTTP API of Prometheus or a compatible server. Raises ``InputError`` for every failure."""

    def __init__(self, query: Query) -> None:
        import requests

        parts = urlsplit(query.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"--prometheus: {shown(query.url)} is not an address; allowed: http://HOST[:PORT][/PREFIX] or https://..."
            )
        self._url = query.url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Accept-Encoding"] = "identity"  # what is packed has no size until it is unpacked
        if query.token is not None:
            self._session.headers["Authorization"] = f"Bearer {query.token}"

    def query(self, text: str, at: float) -> Sequence[Mapping[str, Any]]:
        """The result of an instant query."""
        import requests
        import urllib3

        where = f"--prometheus: {redaction.value(self._url)}"
        try:
            with self._session.post(
                f"{self._url}/api/v1/query",
                data={"query": text, "time": f"{at:.3f}"},
                timeout=TIMEOUT_SECONDS,
                stream=True,
                allow_redirects=False,
            ) as answer:
                packed = answer.headers.get("Content-Encoding", "identity").lower() != "identity"
                body = b"" if packed else _bounded(answer.raw, time.monotonic() + ANSWER_SECONDS)
        except requests.RequestException as error:
            raise InputError(f"{where}: no answer ({_reason(error)}); is a Prometheus running there?") from error
        except (OSError, urllib3.exceptions.HTTPError) as error:
            raise InputError(f"{where}: the connection was closed before the answer was complete ({error})") from error
        if body is None:
            raise InputError(f"{where}: the answer takes longer than {ANSWER_SECONDS:.0f} s")
        if len(body) > MAX_ANSWER_BYTES:
            raise InputError(f"{where}: more than {MAX_ANSWER_BYTES} bytes; narrow it down with --pod or --model")
        document = None if packed else json_of(body)
        if not isinstance(document, dict) or document.get("status") != "success":
            detail = mapping(document).get("error") or ("a packed answer" if packed else f"status {answer.status_code}")
            raise InputError(f"{where}: {str(detail)[:200]}; allowed: the address of a running Prometheus")
        return [mapping(item) for item in items(mapping(document.get("data")).get("result"))]


def _bounded(raw: Any, until: float) -> bytes | None:
    """The body, up to one byte beyond the limit; ``None`` if incomplete at ``until`` (monotonic seconds)."""
    parts, size = [], 0
    while size <= MAX_ANSWER_BYTES:
        part = raw.read1(_PART_BYTES, decode_content=False)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if time.monotonic() > until:
            return None
    return b"".join(parts)


def servers(prometheus: Prometheus, query: Query, within: float, but: Collection[Pod]) -> list[Mapping[str, str]]:
    """Identifying labels of every matching vLLM server that was scraped ``within`` these seconds, without those of
    ``but``. Raises ``InputError`` for none at all or too many.
    """
    wanted = (("namespace", query.namespace), ("pod", query.pod), ("model_name", query.model))
    labels = {name: value for name, value in wanted if value}
    selector = _selector(_running_names(), labels)
    found = prometheus.query(
        f"group by ({','.join(_SERVER)}) (last_over_time({selector}[{_seconds(within)}]))", query.at
    )
    result = [{name: str(value) for name, value in mapping(item.get("metric")).items()} for item in found]
    result = [server for server in result if pod_of(server) not in but]
    if not result and not but:
        raise InputError(
            f"--prometheus: {query.url}: no series like {selector} in the {within:.0f} s before {clock(query.at)}"
        )
    if len(result) > MAX_SERVERS:
        raise InputError(
            f"--prometheus: {len(result)} inference servers match; allowed: up to {MAX_SERVERS}; choose servers"
            " with --pod or --model"
        )
    return sorted(result, key=lambda item: sorted(item.items()))


def pod_of(server: Mapping[str, str]) -> Pod:
    """Namespace and pod of a server, as far as its labels say."""
    return server.get("namespace", ""), server.get("pod") or server.get("instance", "")


def snapshots(
    prometheus: Prometheus, query: Query, server: Mapping[str, str], gpu: GivenGpu | None
) -> Iterator[Snapshot]:
    """Scrapes of one server in order of time."""
    around = Around(gpu=gpu)
    scanner = Scanner()
    begin = query.at - query.since_seconds
    while begin < query.at:
        end = min(query.at, begin + CHUNK_SECONDS)
        rows = prometheus.query(f"{_selector(_names(), server)}[{_seconds(end - begin)}]", end)
        for t, text in _pages(rows, begin, end):
            page = parse_scrape(
                text,
                target=server.get("instance", ""),
                time=t,
                namespace=pod_of(server)[0],
                pod=pod_of(server)[1],
                container=server.get("container", ""),
                args=query.args,
                scanner=scanner,
            )
            yield snapshot(t, (page,), around, first=False)
        begin = end


def _pages(rows: Sequence[Mapping[str, Any]], begin: float, end: float) -> Iterator[tuple[float, str]]:
    """The samples of each scrape as an exposition."""
    scrapes: dict[float, list[str]] = {}
    for metric, samples_of in _sampled(rows, begin, end):
        name = _series(metric)
        for t, value in samples_of:
            scrapes.setdefault(t, []).append(f"{name} {value}")
    for t in sorted(scrapes):
        yield t, "\n".join(scrapes[t]) + "\n"


def _sampled(
    rows: Sequence[Mapping[str, Any]], begin: float, end: float
) -> Iterator[tuple[Mapping[str, Any], list[tuple[float, str]]]]:
    """The labels of each series with its samples. A range includes its ends, so the first moment belongs to the range
    before.
    """
    for row in rows:
        pairs = [pair for pair in items(row.get("values")) if len(items(pair)) == 2]
        times = [(ceilings.number(pair[0], end), str(pair[1])) for pair in pairs]
        yield mapping(row.get("metric")), [(t, value) for t, value in times if t is not None and t > begin]


def published(prometheus: Prometheus, query: Query, t: Thresholds) -> list[tuple[float, dict[str, Any]]]:
    """What exporters published of each engine last, up to five minutes before the moment: the time of that scrape, and
    an entry like those of an exporter's document, with ``cause``.
    """
    selector = _selector(f"kvpressure_({'|'.join(_OWN)})", {"model_name": query.model} if query.model else {})
    rows = prometheus.query(f"{selector}[{_seconds(FIVE_MINUTES)}]", query.at)
    engines: dict[tuple[str, ...], dict[float, list[_OwnSample]]] = {}
    for metric, samples_of in _sampled(rows, query.at - FIVE_MINUTES, query.at):
        labels = {name: str(metric.get(PREFIXED.get(name, name)) or value) for name, value in metric.items()}
        name = labels.get("__name__", "").removeprefix("kvpressure_")
        place = tuple(labels.get(label, "") for label in ("cluster", *ENGINE))
        value = ceilings.number_in(samples_of[-1][1], ceilings.FINITE) if samples_of else None
        if value is not None and name in _OWN and query.namespace in (None, place[1]):
            engines.setdefault(place, {}).setdefault(samples_of[-1][0], []).append((name, labels, value))
    newest = (max(scrapes.items()) for scrapes in engines.values())
    entries = [(moment, _entry(scrape, reasons(t))) for moment, scrape in newest]
    return [(moment, entry) for moment, entry in entries if {"verdict", "since"} <= entry.keys()]


_OwnSample = tuple[str, Mapping[str, str], float]  # name without prefix, labels, value
_OWN: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "engine_up": ("", ("pool", "role")),
    "engine_info": ("", ("version", "flavour", "container", "target")),
    "cause_info": ("confidence", (*ENGINE, "verdict", "stage", "cause")),
    "verdict_since_timestamp_seconds": ("since", ()),
    "verdict_reason": ("", ()),
    "finding": ("", ()),
    "harm": ("", ()),
}
"""Series that say what kvpressure found -> what their value and their labels are called in a document."""


def _entry(scrape: Sequence[_OwnSample], said: Mapping[str, str]) -> dict[str, Any]:
    named = [(*_OWN[name], labels, value) for name, labels, value in scrape]
    conditions = {labels["finding"]: value == 1 for _, labels, value in scrape if "finding" in labels}
    harms = {labels["harm"]: value for _, labels, value in scrape if labels.get("harm") in HARMS}
    behind = {said[labels["reason"]]: value for _, labels, value in scrape if labels.get("reason") in said}
    return {
        **{called: value for called, _, _, value in named if called},
        **{label: labels.get(label) for _, shown, labels, _ in named for label in shown},
        "up": any(name == "engine_up" and value == 1 for name, _, value in scrape),
        "mitigation": {"actions": [{"title": labels["action"]} for _, labels, _ in scrape if labels.get("action")]},
        "supporting": [
            *(
                f"users: {words(harm)}, {say(value, HARMS[harm].unit)}"
                for harm, value in harms.items()
                if HARMS[harm].value
            ),
            *(f"{value:.3g} {name}" for name, value in behind.items()),
        ],
        "missing": ["evidence in sentences, triage, limits: on the exporter's page, not in its series"],
        "conditions": conditions,
        "condition_texts": dict.fromkeys(conditions, "as the exporter found it"),
    }


def _series(metric: Mapping[str, Any]) -> str:
    name = str(metric.get("__name__", ""))
    sample = samples().get(name)
    is_config = sample is not None and sample.family.kind == "config"  # its labels are its content
    of_page = _CLIENT_LABELS | dialect(sample.dialect if sample else "").series_labels
    kept = {
        label: str(value)
        for label, value in metric.items()
        if label in of_page or (is_config and label not in ("__name__", *_SERVER))
    }
    return name + "{" + ",".join(f"{label}={_quoted(value)}" for label, value in sorted(kept.items())) + "}"


def _names() -> str:
    """Regular expression of the series names of any engine and its process."""
    return "|".join(
        [
            *(one.series_pattern for one in dialects() if one.series_pattern),
            "process_(cpu_seconds_total|start_time_seconds|resident_memory_bytes)|http_requests_total",
        ]
    )


def _running_names() -> str:
    """Gauges of running requests; every engine has one of them."""
    patterns = [re.compile(one.series_pattern) for one in dialects() if one.series_pattern]
    return "|".join(
        name
        for name, sample in samples().items()
        if sample.family.canonical == RUNNING and any(pattern.fullmatch(name) for pattern in patterns)
    )


def _selector(names: str, labels: Mapping[str, str]) -> str:
    matchers = (f"{name}={_quoted(value)}" for name, value in sorted(labels.items()) if name != "__name__")
    return "{" + ",".join((f'__name__=~"{names}"', *matchers)) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _seconds(value: float) -> str:
    return f"{max(1, round(value))}s"


def _reason(error: Exception) -> str:
    """The innermost cause of an error."""
    words = ("Connection refused", "Name or service not known", "timed out", "certificate verify failed")
    return next((word.lower() for word in words if word in str(error)), type(error).__name__)
