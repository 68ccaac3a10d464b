"""Does the exporter stay sound while everything around it fails? ``python -m benchmarks.soak``: an hour of faults in
random order.

The real ``kvpressure serve`` on a node of stubs: engines on loopback, an API server, a kubelet, NVIDIA's library,
cgroups and logs. Faults come one after the other, in an order that the seed gives. Throughout: engines without a fault
are up with all their series, a pod that is gone and an engine that fails have no series but those that say so, the
health endpoints answer 200. After each fault everything is back, and how long that took is measured. In the end memory,
descriptors and threads are what they were after the first round. Exit 1 and one line for each thing that was not so.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tests.helpers.vllm_pages import text_of
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import Gpu, build
from tests.sources.kubernetes import node as kubernetes
from tests.sources.kubernetes.node import Node, PodServer, uuid

ROOT: Final = Path(__file__).parents[1]
DOCUMENT: Final = ROOT / "docs" / "reliability.md"
SECTION: Final = re.compile(r"(<!-- soak: written by make soak -->\n).*?(<!-- end of soak -->)", re.DOTALL)
INTERVAL: Final = float(kubernetes.TICK)
INNOCENT: Final = ("good-0", "good-1", "good-2")
VICTIM: Final = "victim-0"
SERIES: Final = 60  # that an engine in order has at least
RECOVERY_SECONDS: Final = (
    2 * 5.0
)  # a failing target is retried every 5 s at least, and so is the API server after short trouble
LAG_SECONDS: Final = 0.25  # from which on the machine is too busy to judge how soon something happens
LAG_BEFORE_SECONDS: Final = 3.0
MORE_MIB, MORE_DESCRIPTORS, MORE_THREADS = 8.0, 12, 6
UNKNOWN: Final = (
    999  # NVML's code of an error without a name; a GPU that is lost is looked for again only after a minute
)


class Victim(PodServer):
    """An engine that does what ``mode`` says: answer, or fail in one of many ways."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.turn = 0
        self.down = set()
        self.address = "127.0.0.9"
        page = text_of("d_kv_pressure").encode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.turn += 1
                getattr(outer, f"_{outer.mode}")(self, page)

            def log_message(self, *_: object) -> None:
                """Silence."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients hang up; that is what this is for."""

        self._server = Server((self.address, 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _ok(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        self._send(handler, page)

    def _hang(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        while self.mode == "hang":
            time.sleep(0.05)
        handler.close_connection = True

    def _slow(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        time.sleep(0.6)
        self._send(handler, page)

    def _drip(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(page)))
        handler.end_headers()
        for byte in page:
            if self.mode != "drip":
                break
            handler.wfile.write(bytes([byte]))
            time.sleep(0.02)
        handler.close_connection = True

    def _reset(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        handler.connection.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SOL_SOCKET, SO_LINGER: RST
        handler.close_connection = True

    def _error(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        self._send(handler, b"no", 500)

    def _html(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        self._send(handler, b"<html><script>alert(1)</script></html>")

    def _endless(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        while self.mode == "endless":
            handler.wfile.write(b"x 1\n" * 4096)
        handler.close_connection = True

    def _renamed(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        name = b'model_name="renamed-%d"' % (self.turn // 5)
        self._send(handler, re.sub(rb'model_name="[^"]*"', name, page))


class Lag:
    """How late a thread is woken on this machine: where that is long, an engine that is not up says nothing
    about the exporter.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=1_000)
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.02)
            self._late.append((began, time.monotonic() - began - 0.02))

    def worst(self, since: float) -> float:
        """The most in seconds, from some seconds before ``since`` on."""
        return max((late for began, late in tuple(self._late) if began >= since - LAG_BEFORE_SECONDS), default=0.0)


class SoakNode(Node):
    """A node with an engine that fails on demand."""

    def __init__(self, where: Path, library: Path, *arguments: str) -> None:
        super().__init__(where, library, *arguments)
        self.victim = Victim()
        self.servers.append(self.victim)

    def server(self, name: str) -> PodServer:
        """The failing one for the victim; the others share what does not fail."""
        return self.victim if name == VICTIM else self.servers[sum(name.encode()) % (len(self.servers) - 1)]

    @property
    def process(self) -> Any:
        """The exporter."""
        assert self._exporter is not None
        return self._exporter

    def status_of(self, path: str) -> int:
        """The status with which a path is answered."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def resources(self) -> tuple[float, int, int]:
        """Resident MiB, descriptors and threads."""
        pid = self.process.pid
        return (
            self.memory_bytes() / 2**20,
            sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()),
        )


@dataclass
class Result:
    """What a run saw. ``recovery``: the longest time after each fault, of those that were judged;
    ``problems``: what was not as it has to be.
    """

    seconds: float = 0.0
    faults: int = 0
    looks: int = 0
    unjudged: int = 0  # looks and recoveries while the machine was too busy
    pods: int = 0
    recovery: dict[str, float] = field(default_factory=dict)
    before: tuple[float, int, int] = (0.0, 0, 0)
    after: tuple[float, int, int] = (0.0, 0, 0)
    problems: list[str] = field(default_factory=list)


class Soak:
    """Faults one after the other on one node."""

    def __init__(self, node: SoakNode, seed: int) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.result = Result()
        self.lag = Lag()
        self.passing: list[str] = []
        self.gone: dict[str, float] = {}
        self.number = 0
        engine = {
            f"engine {mode}": self._engine(mode)
            for mode in ("hang", "slow", "drip", "reset", "error", "html", "endless", "renamed")
        }
        self.faults: dict[str, Callable[[], Any]] = {
            **engine,
            **{f"API server {status}": self._api(status) for status in (410, 429, 500)},
            "API server hangs up": self._cut,
            "kubelet gone": self._kubelet,
            "GPU fails": self._gpu,
            "log flood and rotation": self._logs,
            "pods pass by": self._pods,
            "suspended": self._suspend,
            "terminated": self._terminate,
        }

    # --- faults: each is a context in which the fault lasts ---------------------------------------------------------

    def _engine(self, mode: str) -> Callable[[], Any]:
        @contextmanager
        def fault() -> Iterator[None]:
            self.node.victim.mode = mode
            yield
            self.node.victim.mode = "ok"

        return fault

    def _api(self, status: int) -> Callable[[], Any]:
        @contextmanager
        def fault() -> Iterator[None]:
            api = self.node.api
            api.status = {"watch": status} if status == 410 else {"watch": status, "list": status}
            api.compact()
            api.cut()
            yield
            api.status = {}

        return fault

    @contextmanager
    def _cut(self) -> Iterator[None]:
        self.node.api.cut()
        yield

    @contextmanager
    def _kubelet(self) -> Iterator[None]:
        self.node.kubelet.stop()
        yield
        self.node.kubelet.start()

    @contextmanager
    def _gpu(self) -> Iterator[None]:
        sound = self.node.gpus[1]
        self.node.gpus[1] = Gpu(codes={"all": UNKNOWN})
        self.node.write_world()
        yield
        self.node.gpus[1] = sound
        self.node.write_world()

    @contextmanager
    def _logs(self) -> Iterator[None]:
        log = self.node.logs[VICTIM]
        for _ in range(3):
            log.write(
                *("x" * 200 for _ in range(2_000)),
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
            )
            self.number += 1
            log.rotate(f"20260101-{self.number:06}")
        yield
        for file in log.directory.glob("*.log.*"):
            file.unlink()

    @contextmanager
    def _pods(self) -> Iterator[None]:
        for _ in range(self.random.randrange(3, 12)):
            self.number += 1
            name = f"passing-{self.number}"
            self.node.add(name)
            self.passing.append(name)
        self.result.pods += len(self.passing)
        yield
        for name in self.passing:
            self.node.remove(name)
            self.gone[name] = time.monotonic()
        self.passing.clear()

    @contextmanager
    def _suspend(self) -> Iterator[None]:
        self.node.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.5, 3.0))
        self.node.process.send_signal(signal.SIGCONT)
        yield

    @contextmanager
    def _terminate(self) -> Iterator[None]:
        time.sleep(self.random.uniform(0, 2 * INTERVAL))  # anywhere in a tick
        process = self.node.process
        self.node.stop()
        self._expect(process.returncode == 0, f"SIGTERM: exit status {process.returncode}")
        self.node.start()
        until(self._in_order, 4 * RECOVERY_SECONDS)
        yield

    # --- what has to hold ------------------------------------------------------------------------------------------

    def run(self, seconds: float, most: int = 10**9) -> Result:
        """Rounds of all faults, each round in another order, until the time is over."""
        began = time.monotonic()
        until(self._in_order, 60)
        self.result.before = self.node.resources()
        while time.monotonic() - began < seconds and self.result.faults < most:
            order = list(self.faults)
            self.random.shuffle(order)
            for name in order:
                if time.monotonic() - began > seconds or self.result.faults >= most:
                    break
                self._suffer(name)
            if self.result.faults == len(order):
                self.result.before = self.node.resources()  # everything has been loaded once
        self.result.after = self.node.resources()
        self.result.seconds = time.monotonic() - began
        for what, limit, now, then in zip(
            ("MiB", "descriptors", "threads"),
            (MORE_MIB, MORE_DESCRIPTORS, MORE_THREADS),
            self.result.after,
            self.result.before,
            strict=True,
        ):
            self._expect(now <= then + limit, f"{then:.0f} {what} grew to {now:.0f}")
        return self.result

    def _suffer(self, name: str) -> None:
        with self.faults[name]():
            self._look(name)
            time.sleep(self.random.uniform(1, 4) * INTERVAL)
            self._look(name)
        began = time.monotonic()
        try:
            until(self._in_order, 4 * RECOVERY_SECONDS)
        except AssertionError as error:
            self.result.problems.append(f"after {name}: {error}")
        took = time.monotonic() - began
        self.result.faults += 1
        if self._too_busy(began):
            return
        self._expect(took <= RECOVERY_SECONDS + 2 * INTERVAL, f"after {name}: {took:.1f} s until everything was back")
        self.result.recovery[name] = max(took, self.result.recovery.get(name, 0.0))

    def _too_busy(self, since: float) -> bool:
        busy = self.lag.worst(since) > LAG_SECONDS
        self.result.unjudged += busy
        return busy

    def _look(self, fault: str) -> None:
        """What holds while a fault lasts: nothing of the innocent is lost, nothing stale is shown, health is true."""
        self.result.looks += 1
        began, page = time.monotonic(), self.node.scrape()
        for pod in () if self._too_busy(began) else INNOCENT:
            mine = [line for line in page.splitlines() if f'pod="{pod}"' in line]
            up = [line for line in mine if line.startswith("kvpressure_engine_up{")]
            self._expect(len(up) == 1 and up[0].endswith(" 1.0"), f"{fault}: {pod} is not up: {up}")
            self._expect(len(mine) >= SERIES, f"{fault}: {pod} has {len(mine)} series")
        down = set(re.findall(r"^kvpressure_engine_up(\{[^}]*\}) 0\.0$", page, re.M))
        stale = down & set(re.findall(r"^kvpressure_requests_running(\{[^}]*\}) ", page, re.M))
        self._expect(not stale, f"{fault}: engines that are down have values: {sorted(stale)}")
        for name, since in list(self.gone.items()):
            if time.monotonic() - since > RECOVERY_SECONDS and fault not in (
                "API server 429",
                "API server 500",
                "API server 410",
            ):
                self._expect(f'pod="{name}"' not in page, f"{fault}: {name} is gone and still has series")
        self._expect(self.node.status_of("/-/healthy") == 200, f"{fault}: not healthy")
        self._expect(self.node.status_of("/-/ready") == 200, f"{fault}: not ready")

    def _in_order(self) -> bool:
        """Everything that the node has is shown, and nothing else."""
        page = self.node.scrape()
        expected = {*INNOCENT, VICTIM}
        up = set(re.findall(r'^kvpressure_engine_up\{[^}]*pod="([^"]+)"[^}]*\} 1\.0$', page, re.M))
        shown = set(re.findall(r'^kvpressure_engine_up\{[^}]*pod="([^"]+)"', page, re.M))
        gpus = re.findall(r"^kvpressure_gpu_up\{[^}]*\} 1\.0$", page, re.M)
        sources = re.findall(r'^kvpressure_source_up\{source="(\w+)"\} 0\.0$', page, re.M)
        assert up == shown == expected, f"up: {sorted(up)}, shown: {sorted(shown)}"
        assert len(gpus) == len(self.node.gpus), f"{len(gpus)} GPUs"
        assert not sources, f"sources that are down: {sources}"
        return True

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds and len(self.result.problems) < 100:
            self.result.problems.append(otherwise)


def soak(seed: int, seconds: float, where: Path, most: int = 10**9) -> Result:
    """One run on a node of its own below ``where``."""
    with SoakNode(where, build(where / "driver")) as node:
        try:
            for number, name in enumerate(INNOCENT):
                node.add(name, [uuid(0)] if number == 0 else None)
            node.add(VICTIM, [uuid(1)])
            node.start()
            return Soak(node, seed).run(seconds, most)
        finally:
            node.victim.mode = "ok"


def write_figures(results: dict[int, Result]) -> None:
    """The table in docs/reliability.md."""
    worst: dict[str, float] = {}
    for result in results.values():
        for name, took in result.recovery.items():
            worst[name] = max(took, worst.get(name, 0.0))
    lines = [
        f"Seed {seed}: {result.faults} faults in {result.seconds / 60:.0f} minutes, {result.pods} pods passed by,"
        f" {result.looks} looks during faults, {result.unjudged} looks and recoveries not judged because the machine"
        f" was too busy; {result.before[0]:.0f} MiB, {result.before[1]} descriptors, {result.before[2]} threads after"
        f" the first round, {result.after[0]:.0f} MiB, {result.after[1]}, {result.after[2]} in the end;"
        f" {len(result.problems)} problems."
        for seed, result in results.items()
    ]
    lines += [
        f"Seed {seed}, not as it should be: {problem}."
        for seed, result in results.items()
        for problem in result.problems
    ]
    lines = [f"* {line}" for line in lines]
    slowest = [f"* {name}: {took:.1f} s" for name, took in sorted(worst.items(), key=lambda one: -one[1])]
    text = "\n".join((*lines, "", "Longest time until everything was back, by fault:", "", *slowest, ""))
    DOCUMENT.write_text(SECTION.sub(lambda found: found[1] + text + found[2], DOCUMENT.read_text()))


def main() -> int:
    """Run seeds one after the other, print what was seen, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="for each seed")
    parser.add_argument("--seed", type=int, action="append", help="default: 1, 2 and 3")
    options = parser.parse_args()
    results = {}
    for seed in options.seed or (1, 2, 3):
        with tempfile.TemporaryDirectory() as directory:
            results[seed] = soak(seed, 60 * options.minutes, Path(directory))
        print(json.dumps({"seed": seed, **vars(results[seed])}, indent=1), flush=True)
    write_figures(results)
    return int(any(result.problems for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
