"""A small Kubernetes client over ``http.client``: list and watch only.

The official client costs 50 MiB and 8 times the CPU. The service account's token is read again for every request (it
is rotated about once an hour), the CA for every connection; there are no redirects or proxies; answers are bounded in
time and size. ``Watcher`` keeps a view of one collection: list, watch from the list's version with bookmarks, list
again after 410 Gone, back off with jitter unless the watch worked, for as long as ``Retry-After`` asks.

A list is answered from the API server's cache, in pages where the server can (it is read item by item anyway). Version
0, as for the kubelet, is the only one with which ``limit`` does not send older servers to etcd; what the cache lacks
comes with the watch. Only after 410 Gone to a list, whose continuation is forgotten, the next one is consistent and
without pages. A restarted API server answers every watch with 410, so a list that replaces a view waits for 10 to 30 s.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from kvpressure import __version__
from kvpressure.files import checked, read_file
from kvpressure.parsed import json_of, mapping, text
from kvpressure.sources.base import SourceError, reason_of
from kvpressure.sources.kubernetes.json_list import CHUNK, read_list

log = logging.getLogger(__name__)

TOKEN_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"
CA_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"

REASONS: Final = (
    "not_in_cluster",
    "api_unreachable",
    "api_timeout",
    "api_tls",
    "api_unauthorized",
    "api_forbidden",
    "api_not_found",
    "api_throttled",
    "api_gone",
    "api_error",
    "api_bad_answer",
)
"""Why the API server did not answer. ``api_gone``: the version that a watch begins with has expired."""

MAX_TOKEN_BYTES: Final = 64 * 1024
MAX_LIST_BYTES: Final = 1024 * 1024 * 1024  # of a list, of which one item at a time is in memory
MAX_EVENT_BYTES: Final = 8 * 1024 * 1024  # an object in etcd has at most 1.5 MiB
PAGE_ITEMS: Final = 50
MAX_PAGES: Final = 1000
REQUEST_SECONDS: Final = 10.0  # of silence
SYNC_SECONDS: Final = 5.0  # how long the first read waits for the first list
LIST_SECONDS: Final = 300.0  # for a list or one page of it, however slowly it comes
RETRY_AFTER_SECONDS: Final = 120.0  # the longest wait that the server may ask for
SILENCE_SECONDS: Final = 120.0  # bookmarks come about once a minute; longer silence = connect again
WATCH_SECONDS: Final = (600, 1200)  # asked of the server, drawn at random so that nodes do not reconnect together
BACKOFF_SECONDS: Final = (0.5, 30.0)
WORKED_SECONDS: Final = 30.0  # a watch that lasted this long worked, even without an event

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_STATUS: Final = {401: "api_unauthorized", 403: "api_forbidden", 404: "api_not_found", 429: "api_throttled"}


class Gone(SourceError):
    """410: the requested version is too old; list again."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("api_gone", detail or "410 Gone")


class Throttled(SourceError):
    """The server asks to wait ``retry_after`` seconds."""

    def __init__(self, reason: str, detail: str, retry_after: float) -> None:
        super().__init__(reason, detail)
        self.retry_after = retry_after


class KubeApi:
    """Requests to one API server. Thread-safe."""

    def __init__(
        self,
        url: str | None = None,
        token_file: str | Path = TOKEN_FILE,
        ca_file: str | Path = CA_FILE,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """``url`` None = the cluster this process runs in."""
        self._token_file = Path(token_file)
        self._ca_file = Path(ca_file)
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._url = url or (
            f"https://[{host}]:{port}" if host and ":" in host else f"https://{host}:{port}" if host else None
        )

    def items(self, path: str, parameters: Mapping[str, str]) -> Generator[dict[str, Any], None, Mapping[str, Any]]:
        """The objects of a list as they arrive; returns the list's metadata. Raises ``SourceError`` with one of
        ``REASONS``.
        """
        with self._answer(path, parameters) as (response, connection):
            return (yield from read_list(_chunks(response, connection), MAX_EVENT_BYTES))

    def watch(
        self,
        path: str,
        parameters: Mapping[str, str],
        opened: Callable[[socket.socket | None], None],
    ) -> Iterator[Mapping[str, Any]]:
        """Events of a watch until the server ends it. ``opened`` gets the socket, so that another thread can shut it
        down.

        Raises ``Gone`` for 410, else ``SourceError`` with one of ``REASONS``.
        """
        asked = {**parameters, "watch": "1", "allowWatchBookmarks": "true"}
        with self._answer(path, asked) as (response, connection):
            opened(connection.sock)
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(SILENCE_SECONDS)
                while line := response.readline(MAX_EVENT_BYTES):
                    if not line.endswith(b"\n"):
                        raise SourceError("api_bad_answer", "event cut off or too large")
                    yield _event(line)
            except TimeoutError:
                return  # silent for longer than bookmarks take: connect again
            finally:
                opened(None)

    @contextmanager
    def _answer(
        self, path: str, parameters: Mapping[str, str]
    ) -> Iterator[tuple[http.client.HTTPResponse, http.client.HTTPConnection]]:
        """The answer to one request, on a connection of its own. Raises ``SourceError``."""
        connection = self._connect(REQUEST_SECONDS)
        try:
            yield self._request(connection, path, parameters), connection
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(reason_of(error, _FAILURES, "api_bad_answer"), f"{path}: {error}") from error
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._url is None:
            raise SourceError("not_in_cluster", "KUBERNETES_SERVICE_HOST is not set")
        parts = urlsplit(self._url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port or 80, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=checked(self._ca_file))
        except (OSError, ssl.SSLError) as error:
            raise SourceError("api_tls", f"{self._ca_file}: {error}") from error
        return http.client.HTTPSConnection(host, parts.port or 443, timeout=timeout, context=context)

    def _request(
        self, connection: http.client.HTTPConnection, path: str, parameters: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        connection.connect()
        if connection.sock is not None:
            _keep_alive(connection.sock)
        connection.request("GET", f"{path}?{urlencode(parameters)}", headers=self._headers(connection))
        response = connection.getresponse()
        if response.status == 410:
            raise Gone
        if response.status != 200:
            raise _refusal(response.status, f"{path}: status {response.status}", response.getheader("Retry-After"))
        return response

    def _headers(self, connection: http.client.HTTPConnection) -> dict[str, str]:
        """The token is sent only over TLS or to this machine (a local proxy)."""
        headers = {"Accept": "application/json", "User-Agent": f"kvpressure/{__version__}"}
        if not isinstance(connection, http.client.HTTPSConnection) and connection.host not in _LOOPBACK:
            return headers
        try:
            token = read_file(self._token_file, MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return headers  # the server answers 401, which says it better
        return {**headers, "Authorization": f"Bearer {token}"} if token else headers


def _keep_alive(sock: socket.socket) -> None:
    """Detect within half a minute that the other side is gone, even when nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _chunks(response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> Iterator[bytes]:
    """The body of a list as it arrives: all of it in ``LIST_SECONDS``, without a pause longer than
    ``REQUEST_SECONDS``.
    """
    size, deadline = 0, time.monotonic() + LIST_SECONDS
    while True:
        left = min(deadline - time.monotonic(), REQUEST_SECONDS)
        if left <= 0:
            raise TimeoutError("answer too slow")
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = response.read1(CHUNK)
        if not part:
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return
        size += len(part)
        if size > MAX_LIST_BYTES:
            raise SourceError("api_bad_answer", "answer too large")
        yield part


def _refusal(status: object, detail: str, retry_after: object) -> SourceError:
    """The error for a status other than 200; ``retry_after``: the server's ``Retry-After`` in seconds, if any."""
    reason = _STATUS.get(status if isinstance(status, int) else 0, "api_error")
    wish = str(retry_after)
    if wish.isascii() and wish.isdecimal() and len(wish) < 10:
        return Throttled(reason, detail, min(float(wish), RETRY_AFTER_SECONDS))
    return SourceError(reason, detail)


_FAILURES: Final[Mapping[type[Exception], str]] = {
    TimeoutError: "api_timeout",
    ssl.SSLError: "api_tls",
    OSError: "api_unreachable",
}


def _event(line: bytes) -> Mapping[str, Any]:
    """One watch event; an ERROR event raises its exception."""
    event = mapping(json_of(line))
    found = event.get("object")
    if not isinstance(event.get("type"), str) or not isinstance(found, dict):
        raise SourceError("api_bad_answer", "no watch event")
    if event["type"] == "ERROR":
        if found.get("code") == 410:
            raise Gone(str(found.get("message", "")))
        wish = mapping(found.get("details")).get("retryAfterSeconds")
        raise _refusal(found.get("code"), str(found.get("message", "")), wish)
    return event


def version_of(found: Mapping[str, Any]) -> str:
    """``metadata.resourceVersion`` of an object or list; "" without one."""
    return text(mapping(found.get("metadata")).get("resourceVersion"))


class Watcher:
    """Follows one collection in its own thread.

    ``replace(items)`` gets the whole collection as an iterator that it must exhaust; the iterator raises
    ``SourceError`` when the list breaks off. ``change(type, object)`` is called for every ADDED, MODIFIED and
    DELETED. ``error``: why the view may be out of date, None while it is current.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        parameters: Mapping[str, str],
        replace: Callable[[Iterator[dict[str, Any]]], None],
        change: Callable[[str, dict[str, Any]], None],
        backoff_seconds: tuple[float, float] = BACKOFF_SECONDS,
    ) -> None:
        self.error: str | None = None
        self.errors: dict[str, int] = {}
        self._told: Counter[str] = Counter()  # of these errors
        self._synced = threading.Event()  # the first list has succeeded or failed
        self._api = api
        self._path = path
        self._parameters = dict(parameters)
        self._replace = replace
        self._change = change
        self._least, self._most = backoff_seconds
        self._idle = 4 * self._least  # after a watch that ended at once without an error
        self._version = ""
        self._consistent = False  # the next list may not come from the server's cache
        self._listed = False  # there is a view
        self._followed = False  # a watch has worked since
        self._worked = False  # the last watch brought an event or lasted
        self._stop = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch{path.replace('/', '-')}", daemon=True)

    def start(self) -> None:
        """Start to list and watch, unless it was started."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait for the answer to the first list. Raises ``SourceError``."""
        self.start()
        if not self._synced.wait(SYNC_SECONDS):
            raise SourceError("api_timeout", "the first list has not been answered")

    def new_errors(self) -> Counter[str]:
        """Failures since the last call, by reason."""
        errors = Counter(self.errors)
        new, self._told = errors - self._told, errors
        return new

    def close(self) -> None:
        """Stop, also during a watch."""
        self._stop.set()
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        failing, idle = self._least, self._idle
        while not self._stop.is_set():
            self._worked, failed, asked = False, True, 0.0
            try:
                if not self._version:
                    self._list()
                self._follow()
                failed = False
            except Gone as error:
                failed = False
                self._version = ""
                self._fail(error, outdated=not self._followed)
            except SourceError as error:
                asked = error.retry_after if isinstance(error, Throttled) else 0.0
                if error.reason in ("api_error", "api_bad_answer") and failing >= self._most:
                    self._version = ""  # the server may reject the version: start over
                self._fail(error)
            except Exception as error:
                log.exception("watch of %s failed", self._path)
                self._version = ""
                self._fail(SourceError("api_bad_answer", str(error)))
            if self._worked:
                failing, idle = self._least, self._idle
            wait = failing if failed else self._least if self._worked else idle
            spread = random.uniform(self._most / 3, self._most) if self._listed and not self._version else 0.0
            # jitter: a little sooner than the back-off, a little later than the server asks
            self._stop.wait(max(wait * random.uniform(0.75, 1.0), asked * random.uniform(1.0, 1.25), spread))
            failing, idle = (
                (min(self._most, failing * 2), self._idle) if failed else (self._least, min(self._most, idle * 2))
            )

    def _list(self) -> None:
        self._followed = False
        try:
            with closing(self._pages()) as items:
                self._replace(items)
        except Gone:
            self._consistent = True
            raise
        self._listed, self._consistent = True, False
        self._good()

    def _pages(self) -> Generator[dict[str, Any], None, None]:
        """Every item of the collection; the version is set after the last one."""
        cached = {"limit": str(PAGE_ITEMS), "resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"}
        first = {} if self._consistent else cached
        metadata = yield from self._api.items(self._path, {**self._parameters, **first})
        pages = 1
        while token := metadata.get("continue"):
            if self._stop.is_set():
                return
            pages += 1
            if pages > MAX_PAGES:
                raise SourceError("api_bad_answer", f"{self._path}: more than {MAX_PAGES} pages")
            more = {"limit": str(PAGE_ITEMS), "continue": str(token)}
            metadata = yield from self._api.items(self._path, {**self._parameters, **more})
        version = version_of({"metadata": metadata})
        if not version:
            raise SourceError("api_bad_answer", f"{self._path}: no list")
        self._version = version

    def _follow(self) -> None:
        parameters = {
            **self._parameters,
            "resourceVersion": self._version,
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),
        }
        started = time.monotonic()
        try:
            for event in self._api.watch(self._path, parameters, self._opened):
                self._good()
                self._worked = True
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    self._change(event["type"], event["object"])
                self._version = version_of(event["object"]) or self._version
                if self._stop.is_set():
                    return
        finally:
            self._worked = self._worked or time.monotonic() - started > WORKED_SECONDS
            self._followed = self._followed or self._worked

    def _opened(self, sock: socket.socket | None) -> None:
        self._sock = sock
        if sock is not None:
            self._good()
            if self._stop.is_set():
                self.close()

    def _good(self) -> None:
        self.error = None
        self._synced.set()

    def _fail(self, error: SourceError, outdated: bool = True) -> None:
        if self._stop.is_set():
            return
        log.debug("watch of %s: %s", self._path, error)
        if outdated:
            self.error = error.reason
        self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
        self._synced.set()
