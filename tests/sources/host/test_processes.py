"""The servers of a host, by a ``/proc`` of the test's own, and one real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvpressure.cli import discover, main
from kvpressure.model.readings import Discovered, GpuOwner, GpuProcess, GpuReading
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import SourceError
from kvpressure.sources.host import container_logs, processes
from kvpressure.sources.host.processes import KEPT_SECONDS, ProcessesSource
from kvpressure.sources.scrape.targets import Target, parse_target
from tests.helpers.failing import raising
from tests.helpers.waiting import until

ID = "ab12" * 16
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
VLLM = ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m")
ANY, LOOPBACK = "00000000", "0100007F"


def table(*sockets: tuple[str, int, int], uid: int = 0) -> str:
    """A table of listening sockets (address, port, inode), and a connection."""
    rows = [
        f"   0: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1 0 100\n"
        for address, port, inode in sockets
    ]
    return HEAD + "".join(rows) + "   9: 0100007F:1F40 0100007F:AAAA 01 0:0 0:0 0 0 0 99 1 0 100\n"


class Host:
    """A tree like ``/proc``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = 0.0
        self.network()

    def network(self, *sockets: tuple[str, int, int], uid: int = os.getuid()) -> None:
        """What listens in the host's network."""
        self.put("net/tcp", table(*sockets, uid=uid))

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))

    def process(
        self, pid: int, argv: Sequence[str], *inodes: int, parent: int = 1, cgroup: str = "/user.slice/session-1.scope"
    ) -> None:
        """A process that holds these sockets."""
        self.put(f"{pid}/cmdline", "\0".join(argv) + "\0")
        self.put(f"{pid}/stat", f"{pid} (a) b) S {parent} 1 1 0")
        self.put(f"{pid}/cgroup", f"12:cpu:/\n0::{cgroup}\n")
        (self.root / f"{pid}/fd").mkdir(exist_ok=True)
        for number, inode in enumerate(inodes):
            (self.root / f"{pid}/fd/{number}").symlink_to(f"socket:[{inode}]")

    def end(self, pid: int) -> None:
        (self.root / str(pid)).rename(self.root / f"ended-{pid}")

    def source(self, *given: str) -> tuple[ProcessesSource, Settings]:
        settings = Settings(host_proc=self.root, engine_targets=tuple(map(parse_target, given)))
        return ProcessesSource(settings, lambda: self.clock), settings

    def found(self, *given: str) -> tuple[list[Discovered], list[Target]]:
        source, settings = self.source(*given)
        reading = source.read()
        assert reading.errors == {}
        return list(reading.discovered or ()), list(settings.shared.targets)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("chain", "server"),
    [
        # a script whose child serves
        ([("bash", "serve.sh"), (*VLLM, "--port", "8001")], 1),
        ([("bash", "-c", "vllm serve m --port $P"), (*VLLM, "--port", "8001"), ("VLLM::EngineCore",)], 1),
        # a fork that has no title yet, and API servers that hold the socket of their parent
        ([(*VLLM, "--port", "8001"), (*VLLM, "--port", "8001")], 0),
        ([(*VLLM, "--port", "8001"), ("VLLM::APIServer_0",)], 0),
    ],
)
@pytest.mark.parametrize("holder", ["server", "last"])
def test_the_process_that_serves_is_found_in_its_family(
    host: Host, chain: list[tuple[str, ...]], server: int, holder: str
) -> None:
    host.network((ANY, 8001, 11))
    holds = server if holder == "server" else len(chain) - 1
    for number, argv in enumerate(chain):
        host.process(50 + number, argv, *([11] if number == holds else []), parent=49 + number if number else 1)
    rows, targets = host.found()
    assert [target.address for target in targets] == ["127.0.0.1:8001"]
    assert len(rows) == 1
    assert rows[0].arguments["port"] == "8001"


def test_a_program_that_serves_vllm_inside_is_known_by_the_title_of_its_child(host: Host) -> None:
    host.network((ANY, 9001, 11), (LOOPBACK, 53655, 12))
    host.process(50, ["python3", "serve_llm.py", "--port", "9001"], 11)
    host.process(51, ["VLLM::EngineCore"], 12, parent=50)
    rows, targets = host.found()
    assert [(target.address, target.args, target.dialect) for target in targets] == [("127.0.0.1:9001", (), "vllm")]
    assert (rows[0].sign, rows[0].complete) == ("title", False)
    host.network((ANY, 9001, 11), (LOOPBACK, 53655, 12), (ANY, 9002, 13))
    (host.root / "50/fd/9").symlink_to("socket:[13]")
    rows, targets = host.found()
    assert (rows[0].reason, targets) == ("several_ports", [])


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        ("/system.slice/vllm.service", "vllm.service"),
        (r"/system.slice/system-vllm\x2dchat.slice/vllm-chat@a.service/worker", "vllm-chat@a.service"),
        (f"/system.slice/docker-{ID}.scope", f"docker:{ID[:12]}"),
        (f"/docker/{ID}", f"docker:{ID[:12]}"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"podman:{ID[:12]}"),
        # a user may make any name below its own slice
        ("/user.slice/user-1.slice/user@1.service/system.slice/prod.service", "127.0.0.1:8000"),
        (f"/user.slice/user-1.slice/user@1.service/docker/{ID}", "127.0.0.1:8000"),
        ("/user.slice/user-1.slice/session-3.scope", "127.0.0.1:8000"),
        ("/system.slice/a b\x1b[2J.service", "127.0.0.1:8000"),
        ("/system.slice/" + "x" * 300 + ".service", "127.0.0.1:8000"),
    ],
)
def test_the_name_is_the_units_or_the_containers(host: Host, cgroup: str, pod: str) -> None:
    host.network((ANY, 8000, 11))
    host.process(50, VLLM, 11, cgroup=cgroup)
    host.put("50/net/tcp", (host.root / "net/tcp").read_text())  # a container may have the host's network
    assert [target.pod for target in host.found()[1]] == [pod]


def test_a_container_with_a_network_of_its_own_is_scraped_at_its_address(host: Host) -> None:
    host.process(50, VLLM, 11, cgroup=f"/docker/{ID}")
    host.put("self/ns/net", "")
    host.put("50/ns/net", "")
    host.put("50/net/tcp", table((ANY, 8000, 11)))
    leaves = "".join(
        f"        |-- {address}\n           /32 host LOCAL\n"
        for address in ("127.0.0.1", "169.254.169.254", "172.17.0.2")
    )
    host.put("50/net/fib_trie", "Main:\n  +-- 0.0.0.0/0 3 0 5\n" + leaves)
    assert [target.name for target in host.found()[1]] == ["http://172.17.0.2:8000/metrics"]
    host.put("50/net/tcp", table((LOOPBACK, 8000, 11)))
    rows, targets = host.found()
    assert (rows[0].reason, targets) == ("loopback_of_container", [])


def test_a_container_of_another_user_is_scraped_by_its_own_table(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessesSource, "_inodes", raising(PermissionError(13, "Permission denied")))
    for pid, last in ((50, 2), (60, 3)):
        host.process(pid, VLLM, cgroup=f"/docker/{pid:064x}")
        host.put(f"{pid}/net/tcp", table((ANY, 8000, 11 + last), uid=os.getuid()))
        host.put(f"{pid}/net/fib_trie", f"|-- 172.17.0.{last}\n   /32 host LOCAL\n")
    assert [target.address for target in host.found()[1]] == ["172.17.0.2:8000", "172.17.0.3:8000"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--headless",), "no_endpoint"),
        (("--uds", "/run/vllm.sock"), "unix_socket"),
        (("--port", "8002"), "not_listening"),
    ],
)
def test_what_is_not_scraped_has_a_reason(host: Host, more: tuple[str, ...], reason: str) -> None:
    host.network((ANY, 8000, 11))
    host.process(50, [*VLLM, *more], 11)
    rows, targets = host.found()
    assert ([row.reason for row in rows], targets) == ([reason], [])


@pytest.mark.parametrize(
    ("address", "host_name", "url"),
    [
        ("0A00000A", "127.0.0.1:8000", "http://10.0.0.10:8000/metrics"),
        ("0" * 32, "[::1]:8000", "http://[::1]:8000/metrics"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
    ],
)
def test_addresses_of_both_tables(host: Host, address: str, host_name: str, url: str) -> None:
    host.put("net/tcp6" if len(address) > 8 else "net/tcp", table((address, 8000, 11)))
    host.process(50, VLLM, 11)
    assert [target.name for target in host.found()[1]] == [url], host_name


def test_discover_lists_them_without_an_option(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discover, "Settings", lambda: Settings(host_proc=host.root, node_name="gpu-box"))
    assert main(["discover"]) == 2
    assert "gpu-box" in capsys.readouterr().err
    host.network((ANY, 8000, 11))
    host.process(50, [*VLLM, "--max-num-seqs", "7", "--host", "::"], 11, cgroup="/system.slice/vllm.service")
    assert main(["discover"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("vllm.service: engine")
    assert "max_num_seqs: 7 (process)" in shown
    assert "all visible" in shown
    host.process(60, VLLM)
    assert main(["discover", "--format", "json"]) == 1
    rows = {row["reason"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["command"]["arguments"]["max_num_seqs"] == {"value": "7", "source": "process"}
    assert rows["not_listening"]["result"] == "no_target"


class TestGivenByHand:
    @pytest.mark.parametrize("given", ["localhost:8000", "http://127.0.0.1:8000", "127.0.0.2:8000", "[::1]:8000"])
    def test_it_joins_the_process_behind_it(self, host: Host, given: str) -> None:
        host.network((ANY, 8000, 11))
        words = ("--max-num-seqs", "7", "--api-key", "hunter2")
        host.process(50, [*VLLM, *words], 11, cgroup="/system.slice/vllm.service")
        rows, targets = host.found(f"prod/chat-0={given};gpus=GPU-1f")
        assert [target.name for target in targets] == [parse_target(given).name]
        assert (targets[0].pod, targets[0].gpus, targets[0].args_source) == ("chat-0", ("GPU-1f",), "process")
        assert "--max-num-seqs=7" in targets[0].args
        assert "hunter2" not in repr((rows, targets))

    def test_its_own_words_win_and_other_hosts_stay_others(self, host: Host) -> None:
        host.network((ANY, 8000, 11))
        host.process(50, [*VLLM, "--max-num-seqs", "7"], 11)
        _, targets = host.found("127.0.0.1:8000;args=--max-num-seqs 9")
        assert [(target.args, target.args_source) for target in targets] == [(("--max-num-seqs", "9"), "args")]
        assert [target.name for target in host.found("203.0.113.7:8000")[1]] == ["http://127.0.0.1:8000/metrics"]


def test_gpus_are_those_of_the_process_and_of_what_it_started(host: Host) -> None:
    host.network((ANY, 8000, 11), (ANY, 8001, 12))
    host.process(50, VLLM, 11, cgroup="/system.slice/a.service")
    host.process(51, ["VLLM::EngineCore"], parent=50)
    host.process(52, ["VLLM::Worker"], parent=51)
    host.process(60, [*VLLM, "--port", "8001"], 12, cgroup="/system.slice/a.service")
    host.process(70, ["python3", "train.py"])
    source, settings = host.source()
    settings.shared.gpus = tuple(
        GpuReading(uuid=f"GPU-{pid}", index=0, vendor="nvidia", processes=(GpuProcess(pid),)) for pid in (52, 60, 70)
    )
    reading = source.read()
    assert [target.gpus for target in settings.shared.targets] == [("GPU-52",), ("GPU-60",)]
    assert reading.owners == tuple(GpuOwner(f"GPU-{pid}", "", "a.service", "") for pid in (52, 60))
    assert reading.process_pods == {52: ("", "a.service"), 60: ("", "a.service"), 70: ("", "")}


def test_a_server_that_ends_is_scraped_on_so_that_it_is_down(host: Host) -> None:
    host.network((ANY, 8000, 11))
    host.process(50, VLLM, 11)
    source, settings = host.source()
    source.read()
    host.end(50)
    host.network()
    reading = source.read()
    assert [target.address for target in settings.shared.targets] == ["127.0.0.1:8000"]
    assert [row.reason for row in reading.discovered or ()] == ["ended"]
    host.network((ANY, 8000, 21))
    host.process(51, VLLM, 21)
    assert [row.reason for row in source.read().discovered or ()] == ["command"]
    host.end(51)
    source.read()
    host.clock = KEPT_SECONDS + 1
    source.read()
    assert settings.shared.targets == ()


@pytest.mark.parametrize("what", ["_inodes", "_leader"])
def test_what_failed_is_tried_again(host: Host, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.network((ANY, 8000, 11))
    host.process(50, VLLM, 11)
    source, settings = host.source()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessesSource, what, lambda *_: 1 / 0)
        assert source.read().errors == {"internal": 1}
    source.read()
    assert [target.port for target in settings.shared.targets] == [8000]


def test_a_unit_that_comes_back_on_another_port_is_one_engine(host: Host) -> None:
    unit = "/system.slice/vllm.service"
    host.network((ANY, 8000, 11))
    host.process(50, VLLM, 11, cgroup=unit)
    source, settings = host.source()
    source.read()
    host.end(50)
    source.read()
    host.network((ANY, 8001, 12))
    host.process(51, [*VLLM, "--port", "8001"], 12, cgroup=unit)
    source.read()
    assert [target.port for target in settings.shared.targets] == [8001]


def test_sockets_are_walked_only_where_a_process_serves_and_files_only_when_something_changed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[str | int] = []
    for name in ("_listening", "_inodes"):
        real = getattr(ProcessesSource, name)
        monkeypatch.setattr(ProcessesSource, name, lambda self, of, real=real: walked.append(of) or real(self, of))
    host.network((ANY, 8000, 11))
    host.process(60, ["sleep", "9"], 11)
    source, settings = host.source()
    source.read()
    assert walked == []
    host.process(50, VLLM, 11)
    source.read()
    source.read()
    assert (walked[:1], walked.count(50)) == (["net"], 1)
    host.network((ANY, 8000, 11), (ANY, 8001, 12))
    host.process(51, [*VLLM, "--port", "8001"], 12)
    source.read()
    assert [target.port for target in settings.shared.targets] == [8000, 8001]


ARGS = "INFO 11-27 08:00:00 [utils.py:233] non-default args: {'max_num_seqs': 17}"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB."


class TestLog:
    """Where a server of a host logs, and what of it is true of its present run."""

    def serving(
        self, host: Host, *logs: Path | str, pid: int = 50, port: int = 8000, cgroup: str = "/system.slice/vllm.service"
    ) -> None:
        """A server whose outputs, from 1 on, are ``logs``."""
        host.network(*((ANY, one, one) for one in (8000, 8001)))
        host.process(pid, [*VLLM, "--port", str(port)], port, cgroup=cgroup)
        host.put(f"{pid}/net/tcp", (host.root / "net/tcp").read_text())
        for output, log in enumerate(logs, 1):
            (host.root / f"{pid}/fd/{output}").symlink_to(log)

    def events(self, source: ProcessesSource) -> list[str]:
        reading = source.read()
        assert reading.errors == {}
        return [line.event.event for line in reading.logs or () if line.event]

    @pytest.mark.parametrize(
        ("cgroup", "path"),
        [
            ("/system.slice/vllm.service", "vllm.log"),
            (f"/docker/{ID}", f"1/root/var/lib/docker/containers/{ID}/{ID}-json.log"),
            (
                f"/machine.slice/libpod-{ID}.scope/container",
                f"1/root/var/lib/containers/storage/overlay-containers/{ID}/userdata/ctr.log",
            ),
        ],
    )
    def test_it_is_followed_and_what_is_of_an_unknown_age_is_no_news(self, host: Host, cgroup: str, path: str) -> None:
        def line(text: str) -> str:
            written = {"log": text + "\n", "stream": "stderr", "time": "2020-01-02T03:04:05.6Z"}
            return json.dumps(written) + "\n" if "docker" in path else f"{text}\n"

        host.put(path, line(ARGS) + line(OOM))
        self.serving(host, "socket:[5]", host.root / path, cgroup=cgroup)
        source, _ = host.source()
        assert self.events(source) == ["args"]
        with (host.root / path).open("a") as log:
            log.write(line(OOM).replace("2020", "2999") + "not of interest\n")
        assert self.events(source) == ["cuda_oom"]
        (host.root / path).rename(host.root / "rotated")
        host.put(path, "")
        assert self.events(source) == []
        with (host.root / path).open("a") as log:
            log.write(line(OOM).replace("2020", "2999"))
        assert self.events(source) == ["cuda_oom"]
        os.truncate(host.root / path, 0)
        assert self.events(source) == []
        source.close()

    def test_a_new_process_of_a_unit_goes_on_in_its_file(self, host: Host) -> None:
        host.put("vllm.log", f"{ARGS}\n")
        self.serving(host, host.root / "vllm.log", host.root / "vllm.log")
        source, _ = host.source()
        assert self.events(source) == ["args"]
        host.end(50)
        with (host.root / "vllm.log").open("a") as log:
            log.write(f"{OOM}\n")
        assert self.events(source) == ["cuda_oom"]
        with (host.root / "vllm.log").open("a") as log:
            log.write(f"{ARGS}\n")
        self.serving(host, host.root / "vllm.log", pid=51)
        assert self.events(source) == ["args"]

    def test_discover_says_that_it_is_not_read(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(discover, "Settings", lambda: Settings(host_proc=host.root, node_name="gpu-box"))
        self.serving(host, "socket:[5]", "/dev/null")
        assert main(["discover"]) == 0
        assert "its log is not read: it logs to no regular file" in capsys.readouterr().out

        monkeypatch.setattr(container_logs, "open_file", raising(PermissionError(13, "Permission denied")))
        assert main(["discover"]) == 0
        assert "its log is not read: permission denied" in capsys.readouterr().out

    @pytest.mark.parametrize(("log", "other"), [("a.log", "a.log"), ("a.log", "b.log")])
    def test_what_several_servers_may_have_written_is_nobodys(self, host: Host, log: str, other: str) -> None:
        host.put("a.log", f"{ARGS}\n")
        host.put("b.log", f"{ARGS}\n")
        self.serving(host, host.root / log)
        self.serving(
            host,
            host.root / other,
            pid=60,
            port=8001,
            cgroup="/user.slice" if log == other else "/system.slice/vllm.service",
        )
        source, _ = host.source()
        reading = source.read()
        assert reading.logs == ()
        assert all("its log is not read: another server" in row.explanation for row in reading.discovered or ())


class TestHostile:
    def test_another_users_process_costs_the_others_nothing(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host.network((ANY, 8000, 11), (ANY, 8001, 12))
        host.process(50, [*VLLM, "--port", "8001"], 12)
        host.process(60, ["python3", "serve_llm.py"], 13)
        host.process(61, ["VLLM::EngineCore"], parent=60)
        host.process(70, VLLM, 11)
        inodes = ProcessesSource._inodes

        def refused(self: ProcessesSource, pid: int) -> set[str]:
            if pid != 70:
                raise PermissionError(13, "Permission denied")
            return inodes(self, pid)

        monkeypatch.setattr(ProcessesSource, "_inodes", refused)
        rows, targets = host.found()
        assert {target.port for target in targets} == {8000, 8001}  # by the socket's user and the named port
        assert sorted(row.reason for row in rows) == ["command", "command", "not_readable"]
        host.network((ANY, 8000, 11), (ANY, 8001, 12), uid=os.getuid() + 1)
        assert sorted(row.reason for row in host.found()[0]) == ["command", "not_listening", "not_readable"]

    def test_our_own_arguments_are_no_server(self, host: Host) -> None:
        host.network((ANY, 8000, 11))
        host.process(
            os.getpid(), ["python3", "-m", "kvpressure", "serve", "--engine.target", "a;args=vllm serve m"], 11
        )
        assert host.found() == ([], [])

    def test_what_cannot_be_read_or_makes_no_sense_is_one_process_less(self, host: Host) -> None:
        host.network((ANY, 8000, 11))
        host.process(50, VLLM, 11)
        host.process(60, ["vllm", "serve", "\x1b]0;x\x07\udc80" * 9000, "--port", "9" * 5000])
        host.process(61, [*VLLM, "--port", "../../etc/passwd"])
        host.put("62/cmdline", "")
        (host.root / "63").mkdir()
        host.process(64, [*VLLM, "--port", "8005"], parent=65)
        host.process(65, VLLM, parent=64)  # each started by the other
        (host.root / "66/cmdline").mkdir(parents=True)
        source, settings = host.source()
        reading = source.read()
        assert [target.address for target in settings.shared.targets] == ["127.0.0.1:8000"]
        assert reading.errors == {"unreadable": 1}

    def test_a_user_with_many_processes_takes_no_place_of_another(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "MAX_SERVERS", 4)
        host.network((ANY, 8000, 11))
        for pid in range(50, 60):
            host.process(pid, VLLM)
        host.process(60, VLLM, 11)
        of_another, stat = os.stat_result((0,) * 4 + (7,) + (0,) * 5), Path.stat
        monkeypatch.setattr(
            Path, "stat", lambda path, **how: of_another if path.name.startswith("5") else stat(path, **how)
        )
        assert [target.port for target in host.found()[1]] == [8000]

    def test_without_a_table_of_sockets_the_source_fails(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="no_proc"):
            ProcessesSource(Settings(host_proc=tmp_path)).read()


_SERVER = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)
server = http.server.HTTPServer(("127.0.0.1", 0), Page)
print(server.server_port, "non-default args: {'max_num_seqs': 17}", flush=True)
server.serve_forever()
"""


@pytest.mark.live
def test_a_real_process_and_its_log_are_found_by_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "vllm/entrypoints/openai").mkdir(parents=True)
    (tmp_path / "vllm/entrypoints/openai/api_server.py").write_text(_SERVER)
    words = ["-m", "vllm.entrypoints.openai.api_server", "--max-num-seqs", "17", "--uvicorn-log-level=x", "--port", "0"]
    script = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    log = tmp_path / "log"
    with log.open("wb") as output:
        wrapper = subprocess.Popen([sys.executable, "-c", script, *words], cwd=tmp_path, stdout=output)
    try:
        port = int(until(log.read_text).split()[0])
        settings = Settings()
        source = ProcessesSource(settings)

        logged: list[str] = []

        def own() -> list[Target]:
            logged.extend(line.line for line in source.read().logs or ())
            return [target for target in settings.shared.targets if target.port == port]

        found: Callable[[], list[Target]] = own
        (target,) = until(found)
        assert "--max-num-seqs=17" in target.args
        assert f"{port} non-default args: {{'max_num_seqs': 17}}" in logged
        source.close()
    finally:
        subprocess.run(["pkill", "-P", str(wrapper.pid)], check=False)
        wrapper.kill()
        wrapper.wait()
