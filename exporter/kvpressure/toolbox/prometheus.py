"""Judging the past from a Prometheus that scrapes vLLM: raw samples become pages again, pages become snapshots.

The samples are asked for as range vectors, so that they come with the time at which they were scraped. Each scraped server is
judged on its own, a stretch of ``CHUNK_SECONDS`` at a time, which bounds memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from kvpressure.cli import UsageError
from kvpressure.readings import EnginePage, Snapshot
from kvpressure.sources.vllm import Scanner, page_from_text
from kvpressure.toolbox.beside import Beside
from kvpressure.toolbox.live import Around, Card, snapshot
from kvpressure.toolbox.view import items, mapping

CHUNK_SECONDS: Final = 600
MAX_SERVERS: Final = 16
TIMEOUT_SECONDS: Final = 20.0
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024

_SERVER: Final = ("instance", "job", "namespace", "pod", "container")
_NAMES: Final = (
    "(ray_)?vllm[:_].+|process_(cpu_seconds_total|start_time_seconds|resident_memory_bytes)|http_requests_total"
)
_RUNNING: Final = "(ray_)?vllm[:_]num_requests_running"
_PAGE_LABELS: Final = frozenset(
    {
        "engine",
        "model_name",
        "le",
        "reason",
        "finished_reason",
        "source",
        "status",
        "method",
        "handler",
        "quantile",
        "sleep_state",
    }
)
_INFO: Final = "cache_config_info"  # its labels are its content


@dataclass(frozen=True, slots=True)
class Query:
    """Which servers, and how far back. ``model`` keeps engines of that name only; ``args`` is their command line, if stated."""

    url: str
    since_seconds: float
    namespace: str | None = None
    pod: str | None = None
    model: str | None = None
    token: str | None = None
    args: tuple[str, ...] = ()


class Prometheus:
    """The HTTP API of Prometheus (or of what speaks like it). Raises ``UsageError`` for everything that goes wrong."""

    def __init__(self, query: Query) -> None:
        import requests

        parts = urlsplit(query.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"--prometheus: {query.url!r:.120} is no address; allowed: http://HOST[:PORT][/PREFIX] or https://..."
            )
        self._url = query.url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False
        if query.token is not None:
            self._session.headers["Authorization"] = f"Bearer {query.token}"

    def query(self, text: str, at: float) -> Sequence[Mapping[str, Any]]:
        """The result of an instant query."""
        import requests

        where = f"--prometheus: {self._url}"
        try:
            with self._session.post(
                f"{self._url}/api/v1/query",
                data={"query": text, "time": f"{at:.3f}"},
                timeout=TIMEOUT_SECONDS,
                stream=True,
                allow_redirects=False,
            ) as answer:
                body = answer.raw.read(MAX_ANSWER_BYTES + 1, decode_content=True)
        except requests.RequestException as error:
            raise UsageError(
                f"{where}: no answer ({_reason(error)}); allowed: the address of a running Prometheus"
            ) from error
        except OSError as error:
            raise UsageError(f"{where}: the answer broke off ({error})") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise UsageError(f"{where}: more than {MAX_ANSWER_BYTES} bytes; narrow it down with --pod or --model")
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict) or document.get("status") != "success":
            detail = mapping(document).get("error") or f"status {answer.status_code}"
            raise UsageError(f"{where}: {str(detail)[:200]}; allowed: the address of a running Prometheus")
        return [mapping(item) for item in items(mapping(document.get("data")).get("result"))]


def servers(prometheus: Prometheus, query: Query, now: float) -> list[Mapping[str, str]]:
    """Identifying labels of every vLLM server that matches. Raises ``UsageError`` for none or too many."""
    labels = {**_matchers(query), **({"model_name": query.model} if query.model else {})}
    selector = _selector(_RUNNING, labels)
    found = prometheus.query(
        f"group by ({','.join(_SERVER)}) (last_over_time({selector}[{_seconds(query.since_seconds)}]))", now
    )
    result = [{name: str(value) for name, value in mapping(item.get("metric")).items()} for item in found]
    if not result:
        raise UsageError(
            f"--prometheus: {query.url}: no series like {selector} in the last {query.since_seconds:.0f} s"
        )
    if len(result) > MAX_SERVERS:
        raise UsageError(
            f"--prometheus: {len(result)} servers match; allowed: up to {MAX_SERVERS}, choose with --pod or --model"
        )
    return sorted(result, key=lambda item: sorted(item.items()))


def beside_of(server: Mapping[str, str]) -> Beside:
    """What else may be known about a server's pod."""
    return Beside(server.get("namespace", ""), server.get("pod", ""), server.get("container", ""))


def snapshots(
    prometheus: Prometheus, query: Query, server: Mapping[str, str], now: float, card: Card | None, beside: Beside
) -> Iterator[Snapshot]:
    """What was scraped of one server, in order of time, with what ``beside`` finds around it."""
    around = Around(card=card)
    scanner = Scanner()
    begin = now - query.since_seconds

    def ask(names: str, labels: Mapping[str, str], begin: float, end: float) -> Sequence[Mapping[str, Any]]:
        return prometheus.query(f"{_selector(names, labels)}[{_seconds(end - begin)}]", end)

    while begin < now:
        end = min(now, begin + CHUNK_SECONDS)
        rows = ask(_NAMES, server, begin, end)
        beside.load(ask, begin, end)
        for t, text in _pages(rows, begin, end):
            page = page_from_text(
                text,
                target=server.get("instance", ""),
                time=t,
                namespace=server.get("namespace", ""),
                pod=server.get("pod") or server.get("instance", ""),
                container=server.get("container", ""),
                args=query.args,
                scanner=scanner,
            )
            yield _joined(snapshot(t, (_only(page, query.model),), around, first=False), beside)
        begin = end


def _joined(tick: Snapshot, beside: Beside) -> Snapshot:
    """``tick`` with the container and the GPUs that other exporters told; a GPU that was stated gives way to a seen one."""
    gpus, containers = beside.gpus(tick.time), beside.containers(tick.time)
    if gpus:
        owned = tuple(gpu.uuid for gpu in gpus)
        tick = replace(tick, gpus=gpus, pages=tuple(replace(page, gpus=owned) for page in tick.pages))
    return replace(tick, containers=containers) if containers else tick


def _only(page: EnginePage, model: str | None) -> EnginePage:
    if model is None:
        return page
    return replace(page, engines=tuple(engine for engine in page.engines if engine.model_name == model))


def _pages(rows: Sequence[Mapping[str, Any]], begin: float, end: float) -> Iterator[tuple[float, str]]:
    """The samples of each scrape as an exposition. A range includes its ends, so the first moment belongs to the chunk
    before.
    """
    scrapes: dict[float, list[str]] = {}
    for row in rows:
        name = _series(mapping(row.get("metric")))
        for pair in items(row.get("values")):
            if len(items(pair)) == 2 and isinstance(pair[0], int | float) and begin < pair[0] <= end:
                scrapes.setdefault(float(pair[0]), []).append(f"{name} {pair[1]}")
    for t in sorted(scrapes):
        yield t, "\n".join(scrapes[t]) + "\n"


def _series(metric: Mapping[str, Any]) -> str:
    name = str(metric.get("__name__", ""))
    kept = {
        label: str(value)
        for label, value in metric.items()
        if label in _PAGE_LABELS or (name.endswith(_INFO) and label not in ("__name__", *_SERVER))
    }
    return name + "{" + ",".join(f"{label}={_quoted(value)}" for label, value in sorted(kept.items())) + "}"


def _matchers(query: Query) -> dict[str, str]:
    return {name: value for name, value in (("namespace", query.namespace), ("pod", query.pod)) if value}


def _selector(names: str, labels: Mapping[str, str]) -> str:
    """A label that ends with ``=~`` is matched as an expression."""
    matchers = [
        f'__name__=~"{names}"',
        *(
            f"{name if name.endswith('=~') else name + '='}{_quoted(value)}"
            for name, value in sorted(labels.items())
            if name != "__name__"
        ),
    ]
    return "{" + ",".join(matchers) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _seconds(value: float) -> str:
    return f"{max(1, round(value))}s"


def _reason(error: Exception) -> str:
    """The innermost cause, which is what a person can act on."""
    text = str(error)
    for word in ("Connection refused", "Name or service not known", "timed out", "certificate verify failed"):
        if word in text:
            return word.lower()
    return type(error).__name__


def wall() -> float:
    """Now, for the end of the stretch."""
    return time.time()
