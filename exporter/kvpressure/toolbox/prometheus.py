"""Judges the past from a Prometheus that scrapes vLLM: raw samples become expositions, and these snapshots.

Samples are queried as range vectors, which have the time of their scrape. Each scraped server is judged apart, in
periods of ``CHUNK_SECONDS``, which bounds memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from kvpressure import redaction
from kvpressure.engines.registry import dialect, dialects, samples
from kvpressure.errors import InputError, shown
from kvpressure.model import ceilings
from kvpressure.model.readings import RUNNING, Scrape, Snapshot
from kvpressure.parsed import items, json_of, mapping
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.toolbox.live_pages import Around, GivenGpu, snapshot

CHUNK_SECONDS: Final = 600
MAX_SERVERS: Final = 16
TIMEOUT_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 60.0  # for an answer as a whole, however slowly it comes
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # ten minutes of 64 engines at one scrape a second have 40 MiB
"""An answer of Prometheus to a command. Beyond: one error line."""
_PART_BYTES: Final = 256 * 1024

_SERVER: Final = ("instance", "job", "namespace", "pod", "container")
_OF_PAGE: Final = "process_(cpu_seconds_total|start_time_seconds|resident_memory_bytes)|http_requests_total"
_CLIENT_LABELS: Final = frozenset({"model_name", "le", "status", "method", "handler", "quantile"})


@dataclass(frozen=True, slots=True)
class Query:
    """Which servers, and how far back. ``model``: only engines of this name; ``args``: their
    command line, if stated.
    """

    url: str
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


def servers(prometheus: Prometheus, query: Query, now: float) -> list[Mapping[str, str]]:
    """Identifying labels of every matching vLLM server. Raises ``InputError`` for none or too many."""
    wanted = (("namespace", query.namespace), ("pod", query.pod), ("model_name", query.model))
    labels = {name: value for name, value in wanted if value}
    selector = _selector(_running_names(), labels)
    found = prometheus.query(
        f"group by ({','.join(_SERVER)}) (last_over_time({selector}[{_seconds(query.since_seconds)}]))", now
    )
    result = [{name: str(value) for name, value in mapping(item.get("metric")).items()} for item in found]
    if not result:
        raise InputError(
            f"--prometheus: {query.url}: no series like {selector} in the last {query.since_seconds:.0f} s"
        )
    if len(result) > MAX_SERVERS:
        raise InputError(
            f"--prometheus: {len(result)} inference servers match; allowed: up to {MAX_SERVERS}; choose servers"
            " with --pod or --model"
        )
    return sorted(result, key=lambda item: sorted(item.items()))


def snapshots(
    prometheus: Prometheus, query: Query, server: Mapping[str, str], now: float, gpu: GivenGpu | None
) -> Iterator[Snapshot]:
    """Scrapes of one server in order of time."""
    around = Around(gpu=gpu)
    scanner = Scanner()
    begin = now - query.since_seconds
    while begin < now:
        end = min(now, begin + CHUNK_SECONDS)
        rows = prometheus.query(f"{_selector(_names(), server)}[{_seconds(end - begin)}]", end)
        for t, text in _pages(rows, begin, end):
            page = parse_scrape(
                text,
                target=server.get("instance", ""),
                time=t,
                namespace=server.get("namespace", ""),
                pod=server.get("pod") or server.get("instance", ""),
                container=server.get("container", ""),
                args=query.args,
                scanner=scanner,
            )
            yield snapshot(t, (_only(page, query.model),), around, first=False)
        begin = end


def _only(page: Scrape, model: str | None) -> Scrape:
    if model is None:
        return page
    return replace(page, engines=tuple(engine for engine in page.engines if engine.model_name == model))


def _pages(rows: Sequence[Mapping[str, Any]], begin: float, end: float) -> Iterator[tuple[float, str]]:
    """The samples of each scrape as an exposition. A range includes its ends, so the first moment belongs to the
    chunk before.
    """
    scrapes: dict[float, list[str]] = {}
    for row in rows:
        name = _series(mapping(row.get("metric")))
        for pair in items(row.get("values")):
            t = ceilings.number(pair[0], end) if len(items(pair)) == 2 else None
            if t is not None and t > begin:
                scrapes.setdefault(t, []).append(f"{name} {pair[1]}")
    for t in sorted(scrapes):
        yield t, "\n".join(scrapes[t]) + "\n"


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
    return "|".join([*(one.series_pattern for one in dialects() if one.series_pattern), _OF_PAGE])


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


def wall() -> float:
    """Unix time now."""
    return time.time()
