"""A running server around a hand-made state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvpressure.model.state import State
from kvpressure.publish.routes import Site
from kvpressure.publish.web.server import REASONS, Server
from kvpressure.publish.web.webconfig import WebConfigFile
from kvpressure.settings.kinds import ListenAddress
from tests.publish.certificates import Certificates
from tests.publish.states import full_state

Start = Callable[..., int]


class Published:
    """What a monitor would offer: a state and two checks, changeable by the test."""

    def __init__(self) -> None:
        self.state: State = full_state()
        self.unhealthy: str | None = None
        self.not_ready: str | None = None
        self.server: Server | None = None  # the one started last

    @property
    def refused(self) -> Mapping[str, int]:
        assert self.server is not None
        assert set(self.server.refused) <= set(REASONS)
        return self.server.refused

    def site(self) -> Site:
        return Site(
            lambda: self.state,
            why_unhealthy=lambda: self.unhealthy,
            why_not_ready=lambda: self.not_ready,
            node_name="node-1",
        )


@pytest.fixture
def published() -> Published:
    return Published()


@pytest.fixture
def start(published: Published) -> Iterator[Start]:
    """Start a server on a free port of loopback and return the port: ``start(handler, web=, max_requests=,
    health=)``.
    """
    servers: list[Server] = []

    def begin(handler: object = None, web: Path | None = None, max_requests: int = 20, health: bool = False) -> int:
        server = Server(
            [ListenAddress("127.0.0.1", 0)],
            handler or published.site(),
            WebConfigFile(web),
            max_requests,
            [ListenAddress("127.0.0.1", 0)] if health else [],
        )
        servers.append(server)
        published.server = server
        return server.start()[-1].port  # with ``health``: that of the checks

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))
