"""A small Kubernetes API server for tests: pods and nodes, list and watch, as the real one behaves towards a client.

Resource versions, bookmarks, 410 Gone (as status and as ERROR event), bearer tokens that expire, field and label
selectors, namespaces, and failures on demand. Loopback only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
BOOKMARK_SECONDS = 60.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    api: FakeApi

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up in the middle; that is what they are meant to do here."""


class FakeApi:
    """``with FakeApi() as api: api.apply(pod)``. ``url`` is where it listens."""

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        self.lock = threading.Condition()
        self.version = 100
        self.oldest = 100  # versions below are compacted
        self.objects: dict[str, Json] = {}
        self.events: list[tuple[int, str, Json, Json | None]] = []  # version, kind, object, as it was before
        self.tokens: set[str] | None = None  # None = no authentication
        self.status: dict[str, int] = {}  # by path, or by "watch" for all watches, "list" for all lists
        self.retry_after: str | None = None  # sent with these
        self.pages_from_cache = False  # take "limit" with resourceVersion=0, which older servers ignore
        self.expired_pages = 0  # so many continuations are answered with 410
        self.gone_as_event = False
        self.resets = False  # watches that are cut end with RST
        self.hang = False  # accept and say nothing
        self.html = False  # answer everything with a page, as a proxy in between does
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._generation = 0
        self._tls = tls
        self._server = self._listening(0)
        self._port = int(self._server.server_address[1])
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._port}"

    def _listening(self, port: int) -> _Server:
        server = _Server(("127.0.0.1", port), _Handler)
        server.api = self
        if self._tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        return server

    def __enter__(self) -> FakeApi:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen again, where it listened before."""
        self._server = self._listening(self._port)
        self.__enter__()

    def stop(self) -> None:
        """End the watches and refuse connections."""
        self.cut()
        self._server.shutdown()
        self._server.server_close()

    def apply(self, found: Json) -> None:
        with self.lock:
            self.version += 1
            key = f"{found['kind']}/{found['metadata'].get('namespace', '')}/{found['metadata']['name']}"
            kind = "MODIFIED" if key in self.objects else "ADDED"
            stored = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
            self.events.append((self.version, kind, stored, self.objects.get(key)))
            self.objects[key] = stored
            self.lock.notify_all()

    def delete(self, found: Json) -> None:
        with self.lock:
            self.version += 1
            key = f"{found['kind']}/{found['metadata'].get('namespace', '')}/{found['metadata']['name']}"
            stored = self.objects.pop(key)
            gone = {**stored, "metadata": {**stored["metadata"], "resourceVersion": str(self.version)}}
            self.events.append((self.version, "DELETED", gone, stored))
            self.lock.notify_all()

    def compact(self) -> None:
        """Forget the history: watches from older versions are answered with 410."""
        with self.lock:
            self.version += 1
            self.oldest = self.version
            self.events.clear()

    def forget_delivered(self) -> None:
        """Forget the history but for the last events, as the real one does after minutes."""
        with self.lock:
            del self.events[:-100]
            if self.events:
                self.oldest = self.events[0][0] - 1

    def cut(self) -> None:
        with self.lock:
            self._generation += 1
            self.lock.notify_all()

    def count(self, path: str, **parameters: str) -> int:
        """How many requests for ``path`` had these parameters."""
        return sum(1 for p, q in self.requests if p == path and parameters.items() <= q.items())

    def answer(self, handler: _Handler) -> None:
        generation = self._generation
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.requests.append((parts.path, query))
        if self.hang:
            time.sleep(3600)
        if self.html:
            self._send(handler, 200, None)
            return
        watch = query.get("watch") == "1"
        status = self.status.get(parts.path) or self.status.get("watch" if watch else "list")
        if "continue" in query and "resourceVersion" in query:
            status = 400  # as the real one does
        if "continue" in query and self.expired_pages:
            self.expired_pages -= 1
            status = 410
        if status is None and self.tokens is not None:
            token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
            status = None if token in self.tokens else 401
        if status is not None:
            self._send(handler, status, {"kind": "Status", "code": status})
        elif watch:
            self._watch(handler, parts.path, query, generation)
        else:
            with self.lock:
                items = [o for o in self.objects.values() if _matches(o, parts.path, query)]
                document = self._page(items, query)
            self._send(handler, 200, document)

    def _page(self, items: list[Json], query: dict[str, str]) -> Json:
        """A list, or the part of it that was asked for."""
        start, _, version = query.get("continue", f"0/{self.version}").partition("/")
        metadata: Json = {"resourceVersion": version}
        end = len(items)
        if "limit" in query and (self.pages_from_cache or query.get("resourceVersion") != "0"):
            end = int(start) + int(query["limit"])
        if end < len(items):
            metadata |= {"continue": f"{end}/{version}", "remainingItemCount": len(items) - end}
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items[int(start) : end]}

    def _send(self, handler: _Handler, status: int, document: Json | None) -> None:
        """A JSON document, or a proxy's page instead of one."""
        body = b"<html><h1>Sign in</h1></html>" if document is None else json.dumps(document).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "text/html" if document is None else "application/json")
        handler.send_header("Content-Length", str(len(body)))
        if status != 200 and self.retry_after is not None:
            handler.send_header("Retry-After", self.retry_after)
        handler.end_headers()
        handler.wfile.write(body)

    def _watch(self, handler: _Handler, path: str, query: dict[str, str], generation: int) -> None:
        seen = int(query["resourceVersion"])
        if seen < self.oldest and not self.gone_as_event:
            self._send(handler, 410, {"kind": "Status", "code": 410})
            return
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if seen < self.oldest:
            handler.chunk({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            handler.chunk(None)
            return
        ends = time.monotonic() + int(query["timeoutSeconds"])
        bookmark = time.monotonic() + BOOKMARK_SECONDS
        while generation == self._generation and time.monotonic() < ends:
            with self.lock:
                new = [event for event in self.events if event[0] > seen]
                if not new:
                    self.lock.wait(0.05)
            for version, kind, found, before in new:
                seen = version
                if _matches(found, path, query):
                    handler.chunk({"type": kind, "object": found})
                elif before is not None and _matches(before, path, query):  # it left the selector
                    handler.chunk({"type": "DELETED", "object": found})
            if new or time.monotonic() >= bookmark:
                bookmark = time.monotonic() + BOOKMARK_SECONDS
                metadata = {"resourceVersion": str(seen)}
                handler.chunk({"type": "BOOKMARK", "object": {"metadata": metadata}})
        if self.resets and generation != self._generation:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            return
        handler.chunk(None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            self.server.api.answer(self)

    def chunk(self, document: Json | None) -> None:
        """One event as a chunk; None ends the body."""
        body = b"" if document is None else json.dumps(document).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Silence."""


def _matches(found: Json, path: str, query: dict[str, str]) -> bool:
    if f"{found['kind'].lower()}s" != path.rsplit("/", 1)[1]:
        return False
    metadata, spec = found["metadata"], found.get("spec", {})
    fields = {"spec.nodeName": spec.get("nodeName"), "metadata.name": metadata["name"]}
    if "/namespaces/" in path and metadata["namespace"] != path.split("/namespaces/")[1].split("/")[0]:
        return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        if fields[name] != value:
            return False
    labels = metadata.get("labels", {})
    return all(
        labels.get(term.partition("=")[0]) == term.partition("=")[2]
        for term in filter(None, query.get("labelSelector", "").split(","))
    )
