"""The real process under what operators do to it: signals, full disks, closed logs, stopped clocks, endless scrapes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvpressure
from tests.cli.conftest import WITH_SOURCE
from tests.helpers.ports import free_port
from tests.helpers.serve_process import QUIET, Process
from tests.helpers.waiting import until
from tests.publish.clients import Answer, ask, connect, receive
from tests.publish.test_webconfig import HASH

pytestmark = pytest.mark.live

STOP_SECONDS = 2.0
HANGING = WITH_SOURCE.format(read="time.sleep(3600)", close="time.sleep(3600)")
Start = Callable[..., Process]


def value_of(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def keep_asking(client: socket.socket, headers: str = "") -> Answer:
    client.sendall(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    return receive(client)


class TestSignals:
    @pytest.mark.attack("SIGTERM with clients that take nothing and a source that hangs", "ends within two seconds")
    @pytest.mark.fault(
        "process", "SIGTERM, also while a source hangs", "the process ends within two seconds", "exit status 0", "–"
    )
    @pytest.mark.parametrize(
        ("code", "number"),
        [(None, signal.SIGINT), (HANGING, signal.SIGTERM)],
        ids=["idle", "a source hangs, also when it is closed"],
    )
    def test_it_ends_in_time_with_clients_that_take_nothing(self, serve: Start, code: str | None, number: int) -> None:
        """Seconds of the best of three, as the machine may be busy."""
        seconds = []
        for _ in range(3):
            process = serve(code=code)
            clients = [connect(process.port) for _ in range(20)]
            for client in clients[:10]:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert ask(process.port).status == 200
            began = time.monotonic()
            assert process.stop(number) == 0
            seconds.append(time.monotonic() - began)
            assert "msg=stopped" in process.lines[-1]
            for client in clients:
                client.close()
            if seconds[-1] < STOP_SECONDS:
                break
        assert min(seconds) < STOP_SECONDS

    @pytest.mark.attack("3 000 SIGHUP within a second", "no reload, no end; SIGTERM ends it")
    def test_a_storm_of_signals_holds_up_nothing(self, serve: Start) -> None:
        """A handler that takes a lock waits for ever for one that the main thread holds."""
        process = serve()
        assert ask(process.port).status == 200
        for _ in range(3000):
            process.child.send_signal(signal.SIGHUP)
            time.sleep(0.0003)
        until(lambda: any("SIGHUP reloads nothing" in line for line in process.lines))
        before = value_of(process.scrape(), "kvpressure_ticks_total")
        until(lambda: value_of(process.scrape(), "kvpressure_ticks_total") > before)
        assert process.stop() == 0

    @pytest.mark.attack(
        "SIGSTOP for three seconds, then SIGCONT", "it goes on; `tick_lag_seconds` says how late it was"
    )
    def test_a_process_that_was_stopped_goes_on_and_says_how_late_it_was(self, serve: Start) -> None:
        """As on a node that is suspended, or under a debugger: clocks jump, nothing else."""
        process = serve()
        until(lambda: value_of(process.scrape(), "kvpressure_ticks_total") >= 2)
        process.child.send_signal(signal.SIGSTOP)
        time.sleep(3.2)
        process.child.send_signal(signal.SIGCONT)
        ticks = value_of(process.scrape(), "kvpressure_ticks_total")
        until(lambda: value_of(process.scrape(), "kvpressure_tick_lag_seconds") > 1)  # shown until the next tick
        until(lambda: value_of(process.scrape(), "kvpressure_ticks_total") > ticks)
        assert value_of(process.scrape(), "kvpressure_ticks_total") < ticks + 10, "missed ticks are not made up for"
        assert ask(process.port, "/-/healthy").status == 200


class TestSurroundings:
    @pytest.mark.attack("a read-only root filesystem", "nothing is written outside its directories")
    def test_nothing_is_written_anywhere(self, tmp_path: Path) -> None:
        """A read-only file system, no home, no temporary directory: no file may grow by a byte."""

        def no_files() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

        port = free_port()
        command = [
            sys.executable,
            *("-B", "-m", "kvpressure", "serve"),
            *QUIET,
            "--web.listen-address",
            f"127.0.0.1:{port}",
        ]
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "none"),
            "TMPDIR": str(tmp_path / "none"),
            "PYTHONPATH": str(Path(kvpressure.__file__).parents[1]),  # the package under test, installed or not
        }
        child = subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, preexec_fn=no_files, cwd="/")
        with child.stderr:
            assert_serves(child, port)
            assert b"Traceback" not in child.stderr.read()

    @pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "1>&- 2>&-"])
    def test_it_serves_without_a_log(self, redirect: str) -> None:
        port = free_port()
        arguments = f"{' '.join(QUIET)} --web.listen-address 127.0.0.1:{port}"
        command = f"exec {sys.executable} -m kvpressure serve {arguments} {redirect}"
        assert_serves(subprocess.Popen(["sh", "-c", command]), port)

    @pytest.mark.attack("a pipe or /dev/zero in place of the web configuration", "the last good one stays")
    @pytest.mark.fault(
        "web",
        "web configuration replaced by a pipe or a device",
        "the last good one stays",
        "log",
        "when it is a file again",
    )
    @pytest.mark.parametrize("device", [None, "/dev/zero"], ids=["a pipe", "a link to /dev/zero"])
    def test_a_web_configuration_that_never_ends_stops_no_answer(
        self, serve: Start, tmp_path: Path, device: str | None
    ) -> None:
        """Every answer stopped, that of /-/healthy included."""
        web = tmp_path / "web.yaml"
        web.write_text(f"basic_auth_users: {{prometheus: '{HASH}'}}\n")
        process = serve("--web.config.file", str(web))
        assert ask(process.port, "/-/healthy").status == 401
        web.unlink()
        os.mkfifo(web) if device is None else web.symlink_to(device)
        for _ in range(3):
            assert ask(process.port, "/-/healthy").status == 401
        until(lambda: any("web.yaml: not a regular file" in line for line in process.lines))

    @pytest.mark.attack("a pipe that is named as an unfinished recording", "left alone; the exporter starts")
    def test_a_pipe_among_old_recordings_does_not_hold_up_the_start(self, serve: Start, tmp_path: Path) -> None:
        """It hung for ever, without a line."""
        os.mkfifo(tmp_path / "kvpressure-n-000007-20260101T000000Z.jsonl.gz.part")
        process = serve("--record.directory", str(tmp_path), "--node-name", "n")
        assert answers(process.port, "/-/healthy")
        until(lambda: any("000008-" in path.name for path in tmp_path.iterdir()))

    def test_the_configuration_may_be_a_pipe(self, serve: Start, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "config.yaml")
        process = serve("--config", str(tmp_path / "config.yaml"))
        (tmp_path / "config.yaml").write_text("web.allowed-hosts: [from-a-pipe]\n")
        assert answers(process.port, "/-/healthy")


class TestScrapes:
    def test_thousands_of_scrapes_leave_nothing_behind(self, serve: Start) -> None:
        process = serve()
        clients = [connect(process.port) for _ in range(4)]
        assert keep_asking(clients[0], "Accept-Encoding: gzip\r\n").status == 200
        for _ in range(200):
            assert ask(process.port).status == 200
        memory, files = process.memory_mib(), descriptors(process)
        for turn in range(3_000):
            answer = keep_asking(clients[turn % 4], "Accept-Encoding: gzip\r\n" if turn % 2 else "")
            assert answer.status == 200
        assert process.memory_mib() < memory + 3
        assert descriptors(process) <= files
        for client in clients:
            client.close()


def assert_serves(child: subprocess.Popen[bytes], port: int) -> None:
    """It becomes ready, answers and ends; killed in any case."""
    try:
        until(lambda: answers(port, "/-/ready"), 20)
        for path in ("/", "/metrics", "/api/v1/diagnosis"):
            assert ask(port, path).status == 200
        child.terminate()
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait(10)


def descriptors(process: Process) -> int:
    return sum(1 for _ in Path(f"/proc/{process.child.pid}/fd").iterdir())


def answers(port: int, path: str) -> bool:
    try:
        return ask(port, path).status == 200
    except OSError:
        return False
