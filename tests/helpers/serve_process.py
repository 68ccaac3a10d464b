"""``kvpressure serve`` as a child process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.waiting import until
from tests.publish.clients import ask

QUIET = ("--no-collector.nvidia", "--no-collector.amd", "--no-collector.processes")
LISTEN = ("--web.listen-address", "127.0.0.1:0")


def _as_started_by_hand() -> None:
    """Under nohup the tests would hand a SIGHUP that is ignored on to the process."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Process:
    """``kvpressure serve`` as a child; its stderr is kept. ``limit`` is called in the child before it starts."""

    def __init__(
        self,
        *arguments: str,
        code: str | None = None,
        limit: Callable[[], object] = lambda: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        command = [sys.executable, *(["-c", code] if code else ["-m", "kvpressure"]), "serve", *arguments]
        environ = {name: value for name, value in environ.items() if not name.startswith("KVPRESSURE_")}
        self.began = time.monotonic()
        self.child = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=environ,
            preexec_fn=lambda: (_as_started_by_hand(), limit()),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)

    @property
    def port(self) -> int:
        found = until(lambda: re.search(r"listening address=127.0.0.1:(\d+)", "".join(self.lines)))
        return int(found[1])

    def seconds_without_a_core(self) -> float:
        """How long its threads were ready to run and another process had the core (``schedstat``, man 5 proc)."""
        threads = Path(f"/proc/{self.child.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9

    def scrape(self) -> str:
        return ask(self.port).body.decode()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        status = self.child.wait(10)
        self._reader.join(5)
        return status

    def memory_mib(self, what: str = "VmRSS") -> float:
        """Resident memory now, or another line of the kernel's account of the process."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        found = re.search(rf"{what}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024


@contextmanager
def serving(*arguments: str, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The real process on a free port, on a node called n; yields its address."""
    process = Process(*LISTEN, "--node-name", "n", *arguments, environ=environ)
    try:
        yield f"http://127.0.0.1:{process.port}"
    finally:
        process.stop()
