"""The command as a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.serve_process import LISTEN, QUIET, Process

#: A source called "fake" with these bodies of its two methods, beside those of the catalog; for ``Process(code=)``.
WITH_SOURCE = """
import sys, time
from kvpressure.sources.base import FatalSourceError, Reading
from kvpressure.sources import catalog

class Fake:
    name = "fake"
    def read(self):
        {read}
    def close(self):
        {close}

catalog._BY_NAME["fake"] = catalog.SourceSpec("fake", "a test", lambda settings: Fake(), deadline_seconds=0.3)
from kvpressure.cli import main
sys.exit(main())
"""


@pytest.fixture
def serve() -> Iterator[Callable[..., Process]]:
    """Starts ``kvpressure serve`` on a free port with these further arguments, without GPU sources."""
    processes: list[Process] = []

    def start(*arguments: str, code: str | None = None) -> Process:
        processes.append(Process(*QUIET, *LISTEN, *arguments, code=code))
        return processes[-1]

    yield start
    for process in processes:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait(10)
