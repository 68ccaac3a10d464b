"""The web server: one loop in one thread, built for clients that are silent, slow, half closed or hostile.

A connection costs no thread. Each of its phases (TLS handshake, request head, writing the answer, waiting for the
next request) has a total deadline, so that dripping does not prolong it. When all places are taken, the peer
(address) with the most connections loses the one that has waited longest for its client: silent clients only evict
each other, and a scrape, which takes milliseconds, gets through. Answers under way have places of their own by the
same rule. Request bodies are never read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvpressure.publish.web.auth import Authenticator
from kvpressure.publish.web.http import (
    HEAD_LIMIT,
    BadRequest,
    HttpRequest,
    Response,
    head_of,
    parse_head,
    text_response,
)
from kvpressure.publish.web.webconfig import WebConfig, WebConfigFile
from kvpressure.settings.kinds import ListenAddress

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 5.0
HEAD_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 30.0
WRITE_SECONDS: Final = 10.0
STOP_SECONDS: Final = 0.8
CONNECTIONS: Final = 256
"""Web connections. Beyond: the address with the most loses its oldest.
Shown as: `web_refused_total{reason="connections"}`.
"""
PEER_CONNECTIONS: Final = 128  # of one address
"""Web connections of one address. Beyond: it loses its oldest. Shown as: `web_refused_total{reason="address"}`."""
TLS_CONNECTIONS: Final = 64  # with TLS, where one takes 0.3 MiB
"""Web connections with TLS. Beyond: the address with the most loses its oldest.
Shown as: `web_refused_total{reason="connections"}`.
"""
PEER_TLS_CONNECTIONS: Final = 32
"""Web connections with TLS of one address. Beyond: it loses its oldest.
Shown as: `web_refused_total{reason="address"}`.
"""
PASSWORDS_WAITING: Final = 8  # comparisons with bcrypt that may wait; further unknown logins get 503
"""Password checks waiting. Beyond: status 503. Shown as: `web_refused_total{reason="passwords"}`."""
REASONS: Final = (
    "address",
    "connections",
    "answers",
    "descriptors",
    "handshake_timeout",
    "request_timeout",
    "answer_timeout",
    "passwords",
)
"""Why a connection was closed or a request refused. Closing an idle connection is not counted."""
HEALTH_PATHS: Final = ("/-/healthy", "/-/ready")
CHUNK: Final = 64 * 1024  # bytes that an answer may hold in memory beyond the shared body


class ListenError(Exception):
    """Cannot listen on ``address``; the text is one line."""

    def __init__(self, address: ListenAddress, problem: str) -> None:
        super().__init__(f"cannot listen on {address}: {problem}")
        self.address = address


class Handler(Protocol):
    """Serves requests: ``kvpressure.publish.routes.Site``."""

    def answer(self, request: HttpRequest) -> Response:
        """The response, without waiting for anything."""
        ...


@dataclass(frozen=True, slots=True)
class _Door:
    """What a listener serves, and under which web configuration."""

    handler: Handler
    web: WebConfigFile


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    peer: str  # IP address
    door: _Door
    since: float  # when the current phase began, or bytes last moved in an answer
    task: asyncio.Task[None] | None = None
    opened: bool = False  # from then on the loop's transport owns the socket
    answering: bool = False


class HealthOnly:
    """A handler that serves only the health checks of another."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def answer(self, request: HttpRequest) -> Response:
        """The handler's response to a health check; 404 to all else."""
        return self._handler.answer(request) if request.path in HEALTH_PATHS else text_response(404)


class Server:
    """Serves ``handler`` on ``addresses``, and its health checks alone, without TLS and password, on ``health``.

    ``start`` binds and returns; ``stop`` takes about ``STOP_SECONDS`` at most. One loop serves both, so that an
    answered health check proves that scrapes are answered.
    """

    def __init__(
        self,
        addresses: Sequence[ListenAddress],
        handler: Handler,
        web: WebConfigFile | None = None,
        max_requests: int = 20,
        health: Sequence[ListenAddress] = (),
    ) -> None:
        front = _Door(handler, web or WebConfigFile(None))
        side = _Door(HealthOnly(handler), WebConfigFile(None))
        self._requested = [(address, front) for address in addresses] + [(address, side) for address in health]
        self._max_requests = max_requests
        self._auth = Authenticator()
        self._passwords_waiting = 0
        self._refused: Counter[str] = Counter()
        self._connections: dict[_Connection, None] = {}
        self._places = _places()
        self._listeners: dict[socket.socket, _Door] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="password")

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections closed and requests refused since the start, by reason. Thread-safe."""
        return dict(self._refused)

    def start(self) -> list[ListenAddress]:
        """Listen and serve; returns the bound addresses with their real ports, those of health checks last. Raises
        ``ListenError``.
        """
        try:
            for address, door in self._requested:
                self._listeners |= dict.fromkeys(_listen(address), door)
        except ListenError:
            self._close_listeners()
            raise
        self._thread.start()
        return [ListenAddress(*listener.getsockname()[:2]) for listener in self._listeners]

    def stop(self) -> None:
        """Close the listeners, let answers under way finish, then close what is left."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_SECONDS + 1)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda _, context: log.debug("connection: %s", context.get("message")))
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        acceptors = [asyncio.create_task(self._accept(*entry)) for entry in self._listeners.items()]
        await self._stopping.wait()
        for acceptor in acceptors:
            acceptor.cancel()
        await asyncio.gather(*acceptors, return_exceptions=True)
        self._close_listeners()
        tasks = {connection.task for connection in self._connections if connection.task and connection.answering}
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        rest = [connection.task for connection in self._connections if connection.task]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=STOP_SECONDS / 4)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket, door: _Door) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(listener)
                self._admit(client, str(address[0]), door)
            except OSError as error:  # no descriptors left, most likely: make room, and do not spin
                log.debug("accepting a connection failed: %s", error)
                self._evict(self._connections, "descriptors")
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)  # a flood of connections must not keep the others from their turn

    def _admit(self, client: socket.socket, peer: str, door: _Door) -> None:
        tls = door.web.current().tls is not None
        places = min(self._places, TLS_CONNECTIONS) if tls else self._places
        of_peer = [one for one in self._connections if one.peer == peer]
        if len(of_peer) >= min(places, PEER_TLS_CONNECTIONS if tls else PEER_CONNECTIONS):
            self._evict(of_peer, "address")
        while len(self._connections) >= places:
            self._evict(self._connections, "connections")
        connection = _Connection(client, peer, door, self._loop.time())
        self._connections[connection] = None
        connection.task = self._loop.create_task(self._attend(connection))
        with contextlib.suppress(OSError):  # the client may be gone already
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the tail of an answer must not wait

    def _evict(self, among: Collection[_Connection], reason: str) -> None:
        """Close one connection of the peer that has most among these: the one that waited longest for its client,
        answers under way last.
        """
        of_peer = Counter(one.peer for one in among)
        victim = min(among, key=lambda one: (-of_peer[one.peer], one.answering, one.since), default=None)
        if victim is not None:
            self._refused[reason] += 1
            self._drop(victim)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        if connection.task is not None:
            connection.task.cancel()
        if not connection.opened:
            connection.socket.close()

    async def _attend(self, connection: _Connection) -> None:
        """Serve one connection from handshake to end; its errors stay in here."""
        writer: asyncio.StreamWriter | None = None
        try:
            config = connection.door.web.current()
            connection.opened = True
            reader, writer = await self._open(connection.socket, config)
            if _san_allowed(writer, config):
                await self._converse(connection, reader, writer)
        except (TimeoutError, OSError, EOFError):  # ssl.SSLError is an OSError
            pass
        except Exception:
            log.exception("serving a connection failed")
        finally:
            self._connections.pop(connection, None)
            if writer is not None:
                writer.transport.abort()

    async def _open(
        self, client: socket.socket, config: WebConfig
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=HEAD_LIMIT, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        timeouts: dict[str, Any] = {}
        if config.tls is not None:
            timeouts = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": HANDSHAKE_SECONDS}
        with self._counted(ConnectionAbortedError, "handshake_timeout"):  # as asyncio calls it
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, client, ssl=config.tls, **timeouts
            )
        transport.set_write_buffer_limits(high=0)  # drain() then means: the kernel has it
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    @contextlib.contextmanager
    def _counted(self, failure: type[OSError], reason: str) -> Iterator[None]:
        """Count a deadline that passes inside; the caller closes the connection."""
        try:
            yield
        except failure:
            self._refused[reason] += 1
            raise

    async def _converse(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve requests until one side closes."""
        first = True
        while not self._stopping.is_set():
            connection.since = self._loop.time()
            start = b"" if first else await _first_byte(reader)
            first = False
            config = connection.door.web.current()
            request: HttpRequest | None = None
            try:
                with self._counted(TimeoutError, "request_timeout"):
                    request = parse_head(start + await _rest_of_head(reader))
            except BadRequest as error:
                response = text_response(error.status, str(error))
            else:
                response = await self._respond(connection, request, config)
            keep_alive = request is not None and request.keep_alive and not self._stopping.is_set()
            try:
                with self._counted(TimeoutError, "answer_timeout"):
                    await self._send(connection, writer, request, response, keep_alive)
            finally:
                connection.answering = False
            if not keep_alive:
                await _close_gently(reader, writer)
                return

    async def _respond(self, connection: _Connection, request: HttpRequest, config: WebConfig) -> Response:
        header = request.headers.get("authorization")
        allowed = self._auth.remembered(config, header)
        if allowed is None:
            if self._passwords_waiting >= PASSWORDS_WAITING:
                self._refused["passwords"] += 1
                return text_response(503, "too many logins at the same time", {"Retry-After": "1"})
            self._passwords_waiting += 1
            try:
                allowed = await self._loop.run_in_executor(self._pool, self._auth.check, config, header)
            finally:
                self._passwords_waiting -= 1
        if not allowed:
            return text_response(401, headers={"WWW-Authenticate": 'Basic realm="kvpressure", charset="UTF-8"'})
        self._take_place(connection)
        try:
            return connection.door.handler.answer(request)
        except Exception:
            log.exception("answering %s failed", request.path)
            return text_response(500)

    def _take_place(self, connection: _Connection) -> None:
        """Count the request as being answered; beyond the limit, the answer whose client has read nothing for longest
        is dropped.
        """
        answering = [one for one in self._connections if one.answering]
        if self._max_requests and len(answering) >= self._max_requests:
            self._evict(answering, "answers")
        connection.since = self._loop.time()
        connection.answering = True

    async def _send(
        self,
        connection: _Connection,
        writer: asyncio.StreamWriter,
        request: HttpRequest | None,
        response: Response,
        keep_alive: bool,
    ) -> None:
        head = head_of(response, keep_alive=keep_alive)
        body = memoryview(b"" if request is not None and request.method == "HEAD" else response.body)
        async with asyncio.timeout(WRITE_SECONDS):
            writer.write(head + body[:CHUNK])
            await writer.drain()
            for start in range(CHUNK, len(body), CHUNK):
                connection.since = self._loop.time()
                writer.write(body[start : start + CHUNK])
                await writer.drain()


async def _first_byte(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(IDLE_SECONDS):
        return await reader.readexactly(1)


async def _rest_of_head(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(HEAD_SECONDS):
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequest(431, f"request line and headers are longer than {HEAD_LIMIT} bytes") from None


async def _close_gently(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the client read the answer before closing; unread input would reset the connection."""
    if not writer.can_write_eof():  # TLS: closing says so itself
        writer.close()
        await writer.wait_closed()
        return
    writer.write_eof()
    async with asyncio.timeout(1.0):
        for _ in range(64):
            if not await reader.read(1024):
                return


def _places() -> int:
    """Maximum number of connections: at most half of the file descriptors, because sources need some too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return CONNECTIONS if allowed == resource.RLIM_INFINITY else min(CONNECTIONS, max(1, allowed // 2))


def _san_allowed(writer: asyncio.StreamWriter, config: WebConfig) -> bool:
    """Whether the client's certificate has an allowed SAN; True without a list."""
    if not config.allowed_sans:
        return True
    certificate = writer.get_extra_info("peercert") or {}
    return any(value in config.allowed_sans for _, value in certificate.get("subjectAltName", ()))


def _listen(address: ListenAddress) -> list[socket.socket]:
    """Listening sockets for ``address``; an empty host means all addresses, IPv6 and IPv4 in one socket where
    possible. Raises ``ListenError``.
    """
    try:
        if not address.host:
            dual = socket.has_dualstack_ipv6()
            listeners = [
                socket.create_server(
                    ("", address.port),
                    family=socket.AF_INET6 if dual else socket.AF_INET,
                    backlog=CONNECTIONS,
                    dualstack_ipv6=dual,
                )
            ]
        else:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            listeners = [
                socket.create_server(where[:2], family=family, backlog=CONNECTIONS)
                for family, where in dict.fromkeys((entry[0], entry[4][:2]) for entry in found)
            ]
    except socket.gaierror as error:
        raise ListenError(address, error.strerror or "no such host") from error
    except OSError as error:
        raise ListenError(address, os.strerror(error.errno or 0)) from error
    for listener in listeners:
        listener.setblocking(False)
    return listeners
