"""Time that tests control, servers that follow it, and a kubectl that replays what was recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab.demo.node import PodSpec, SimulatedNode
from lab.demo.server import PodServer

from kvpressure.toolbox import live_pages as live
from tests.helpers.web import serving_pages

FIXTURES = Path(__file__).parents[1] / "fixtures"
START = 1_800_000_000.0
ServeJson = Callable[[Mapping[str, Any]], str]
ServePod = Callable[[PodSpec, float], tuple[SimulatedNode, str]]


class FakeClock(live.Clock):
    """Sleeping takes no time and lets it pass."""

    def __init__(self) -> None:
        self.t = START

    def now(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += max(0.0, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that the toolbox waits by."""
    fake = FakeClock()
    monkeypatch.setattr(live, "CLOCK", fake)
    return fake


@pytest.fixture
def serve_pod(clock: FakeClock) -> Iterator[ServePod]:
    """Starts a simulated vLLM pod that has run for some seconds; returns the node and the server's address."""
    servers: list[PodServer] = []

    def start(spec: PodSpec, seconds: float) -> tuple[SimulatedNode, str]:
        node = SimulatedNode([spec], clock.now)
        server = PodServer(node, spec.name)
        server.start()
        servers.append(server)
        clock.t += seconds
        node.metrics(spec.name)
        return node, server.url

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def serve_json() -> Iterator[ServeJson]:
    """A server that answers with a JSON document or bytes by path (anything else is 404); returns its address."""
    with ExitStack() as servers:

        def start(answers: Mapping[str, Any]) -> str:
            def page(path: str) -> bytes | None:
                answer = answers.get(path)
                found = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                return found if path in answers else None

            return servers.enter_context(serving_pages(page))

        yield start


@dataclass
class FakeKubectl:
    """``answers``: the first entry whose words all occur in the call wins; a list of texts is given out one by one (the
    last one again and again), an exception's text goes to standard error with status 1. ``calls``: what was asked.
    """

    folder: Path
    answers: list[tuple[str, Any]] = field(default_factory=list)

    def install(self) -> None:
        """Write the script and what it answers."""
        plan = []
        for words, answer in self.answers:
            texts = answer if isinstance(answer, list) else [answer]
            plan.append(
                [words.split(), [[str(text), 1] if isinstance(text, Exception) else [text, 0] for text in texts]]
            )
        (self.folder / "plan.json").write_text(json.dumps(plan))
        script = self.folder / "kubectl"
        script.write_text(f"#!{sys.executable} -S\n{_SCRIPT.format(folder=str(self.folder))}")
        script.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of every call so far."""
        log = self.folder / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


_SCRIPT = """\
import fcntl, json, sys
folder = {folder!r}
call = sys.argv[1:]
with open(folder + "/calls", "a+") as log:
    fcntl.flock(log, fcntl.LOCK_EX)
    log.seek(0)
    before = [json.loads(line) for line in log]
    log.write(json.dumps(call) + "\\n")
for words, answers in json.load(open(folder + "/plan.json")):
    if all(any(word in part for part in call) for word in words):
        times = sum(all(any(word in part for part in old) for word in words) for old in before)
        text, status = answers[min(times, len(answers) - 1)]
        print(text, file=sys.stderr if status else sys.stdout, end="" if text.endswith("\\n") else "\\n")
        sys.exit(status)
print("error: unexpected call " + " ".join(call), file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    """A fake kubectl in front of the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return FakeKubectl(folder)
