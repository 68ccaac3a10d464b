"""The source of the inference servers of a host: processes whose command line starts one, and the ports they listen on.

Any user of a host may start a process with any command line and any title, so neither gives a path, an address or a
name: the address is that of a socket that the process holds, and the name that of a cgroup which only root can make.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import MAX_CHARACTERS
from kvpressure.engines.registry import dialects
from kvpressure.files import read_file
from kvpressure.model.arguments import OF_PROCESS, EngineArgs
from kvpressure.model.pools import Workload, pool_of
from kvpressure.model.readings import Discovered, GpuOwner
from kvpressure.redaction import REDACTED
from kvpressure.sources.base import FILE_REASONS, Reading, Source, SourceError, SourceSettings, isolated
from kvpressure.sources.host.container_logs import ServerLogs, ServerOutput
from kvpressure.sources.kubernetes.command_lines import CommandLine
from kvpressure.sources.kubernetes.discovery import OF_COMMAND, OF_TITLE, ContainerRow
from kvpressure.sources.kubernetes.endpoint import METRICS_OFF, UNIX_SOCKET
from kvpressure.sources.kubernetes.pod import Pod, discovered
from kvpressure.sources.kvevents.addresses import endpoint_of
from kvpressure.sources.places import Precedence, admitted
from kvpressure.sources.scrape.targets import Target

MAX_PROCESSES: Final = 32768  # whose command lines are read at once
MAX_SERVERS: Final = 256  # processes whose sockets are looked for; users take turns
MAX_OPEN_FILES: Final = 4096  # of one process
MAX_PARENTS: Final = 16  # from a process to its server
MAX_BYTES: Final = 4 * 1024 * 1024  # of a table of sockets
KEPT_SECONDS: Final = 3600.0  # that the address of a server which has ended is scraped

REASONS: Final = ("no_proc", "permission_denied", "unreadable")
"""Reasons of this source."""

# Below these only root makes cgroups; a user's own tree (user.slice) may hold any name.
_UNIT: Final = re.compile(r"/system\.slice/(?:[^/]+\.slice/)*([\w:.\\@-]{1,200}\.service)(?:/.*)?", re.ASCII)
_CONTAINER: Final = re.compile(r"/(?:(?:system|machine)\.slice/)?(docker|libpod)[-/]([0-9a-f]{64})(?:[./].*)?")
_RUNTIMES: Final = {  # by the word in the cgroup: its name, and where it keeps the log of a container
    "docker": ("docker", "var/lib/docker/containers/{0}/{0}-json.log"),
    "libpod": ("podman", "var/lib/containers/storage/overlay-containers/{0}/userdata/ctr.log"),
}
_ENDED: Final = (FileNotFoundError, ProcessLookupError)  # of a process that ended while it was read
_LOCAL: Final = re.compile(r"\|-- ([\d.]+)\s+/32 host LOCAL")


@dataclass(frozen=True, slots=True)
class _Socket:
    """A listening socket. ``inode`` identifies it; ``uid``: its user's."""

    inode: str
    host: str
    port: int
    uid: int


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that is part of an inference server. ``line`` None: its title alone says so. ``uid``: of its user.
    ``listening``: the sockets that listen in its network, whoever holds them.
    """

    engine: EngineDialect
    line: CommandLine | None
    uid: int
    listening: Sequence[_Socket] = ()

    @property
    def args(self) -> EngineArgs:
        """The parsed command line."""
        return self.line.read(self.engine).args if self.line is not None else EngineArgs()


@dataclass(frozen=True, slots=True)
class _HostEngine:
    """A server and its process. ``place``: namespace and pod of its series. ``row``: as discovered; ``ended``: that
    once the process has ended. ``output``: where it logs.
    """

    pid: int
    target: Target | None
    place: tuple[str, str]
    row: Discovered
    ended: Discovered
    output: ServerOutput


class ProcessesSource(Source):
    """The servers of this host. ``read`` returns them as discovered, with the GPUs of their processes; the targets go
    to ``settings.shared``.
    """

    name = "processes"

    def __init__(self, settings: SourceSettings, clock: Callable[[], float] = monotonic) -> None:
        self._root = settings.host_proc
        self._given = settings.engine_targets
        self._shared = settings.shared
        self._clock = clock
        self._lines: dict[tuple[str, ...], CommandLine] = {}  # of the last read
        self._mark: object = None  # of the processes from which ``_servers`` were found
        self._servers: list[_HostEngine] = []
        self._ended: dict[str, tuple[float, _HostEngine]] = {}  # by target, with the time
        self._logs = ServerLogs()

    def read(self) -> Reading:
        """All servers. Raises ``SourceError`` without a table of sockets."""
        if not self._root.joinpath("net", "tcp").is_file() and not self._listening("net"):
            raise SourceError("no_proc", f"{self._root} has no table of sockets")
        errors: Counter[str] = Counter()
        named = self._named(errors)
        own = self._listening("net") if named else []  # walking the table costs the kernel milliseconds
        processes = self._processes(named, own, errors)
        mark = [(pid, one.line and one.line.argv, one.listening) for pid, one in processes.items()]
        before = self._servers
        if mark != self._mark:
            self._servers = list(self._found(processes, {one.inode for one in own}, errors))
            self._mark = None if errors else mark  # what failed may succeed at the next read
        self._keep_ended(before)
        gpus, pids = self._gpus(errors)
        ended = [server for _, server in self._ended.values()]
        self._shared.targets = tuple(
            replace(target, gpus=target.gpus or tuple(gpus.get(server.pid, ())))
            for server in (*self._servers, *ended)
            if (target := server.target) is not None
        )
        scraped = [server.output for server in (*self._servers, *ended) if server.target is not None]
        logs, unread = self._logs.read(scraped, errors)
        owned = [(server.place, uuid) for server in self._servers for uuid in gpus.get(server.pid, ())]
        return Reading(
            owners=tuple(GpuOwner(uuid, *place, "") for place, uuid in owned),
            discovered=tuple(
                replace(server.row, explanation=server.row.explanation + unread.get(server.output.engine, ""))
                for server in (*self._servers, *ended)
            ),
            logs=logs,
            process_pods=pids,
            errors=dict(errors),
        )

    def close(self) -> None:
        """Close the logs."""
        self._logs.close()

    def _keep_ended(self, before: Sequence[_HostEngine]) -> None:
        """Scrape the addresses of servers that are gone for a while, because one that ends unasked is down; but not of
        one that came back at another address.
        """
        now, read = self._clock(), {server.target.name: server for server in self._servers if server.target}
        known = {server.target.name for server in before if server.target}
        moved = {server.place for name, server in read.items() if name not in known}
        for server in before:
            if server.target is not None and server.target.name not in read:
                silent = replace(server.output, files=())
                self._ended[server.target.name] = now, replace(server, row=server.ended, output=silent)
        kept = [
            (name, (time, server))
            for name, (time, server) in self._ended.items()
            if name not in read and server.place not in moved and now - time <= KEPT_SECONDS
        ]
        self._ended = dict(kept[-MAX_SERVERS:])

    def _gpus(self, errors: Counter[str]) -> tuple[Mapping[int, list[str]], dict[int, tuple[str, str]]]:
        """(UUIDs by pid of the server whose processes are on them, place by pid of every process on a GPU)."""
        servers = {server.pid: server for server in self._servers}
        found: dict[int, list[str]] = {}
        places = {}
        for gpu in self._shared.gpus:
            for process in gpu.processes:
                with isolated(f"process {process.pid}", errors, FILE_REASONS), suppress(*_ENDED):
                    own = next((pid for pid in line_of(self._root, process.pid) if pid in servers), None)
                    places[process.pid] = servers[own].place if own is not None else ("", "")
                    if own is not None and gpu.uuid not in found.setdefault(own, []):
                        found[own].append(gpu.uuid)
        return found, places

    # --- which processes serve

    def _named(self, errors: Counter[str]) -> dict[int, _Process]:
        """Those whose command line or title says that they are part of a server, by pid."""
        with os.scandir(self._root) as entries:
            names = {entry.name for entry in islice(entries, MAX_PROCESSES) if entry.name.isdecimal()}
        named: dict[int, _Process] = {}
        lines, self._lines = self._lines, {}
        for pid in sorted({int(name) for name in names} - {os.getpid()}):  # our own arguments may name a server's
            with isolated(f"process {pid}", errors, FILE_REASONS), suppress(*_ENDED):
                argv = tuple(self._text(f"{pid}/cmdline", MAX_CHARACTERS).rstrip("\0").split("\0"))
                if (found := self._serves(argv, lines)) is not None:
                    named[pid] = _Process(*found, (self._root / str(pid)).stat().st_uid)
        return named

    def _processes(
        self, named: Mapping[int, _Process], own: Sequence[_Socket], errors: Counter[str]
    ) -> dict[int, _Process]:
        """As many of them as are looked at, each with the sockets of its network. ``own``: those of this host's."""
        kept, _ = admitted(named, MAX_SERVERS, lambda _: Precedence.SERVES, lambda pid: (str(named[pid].uid), ""))
        tables, read = {self._network("self"): own, None: own}, {}
        for pid in sorted(kept):
            with isolated(f"process {pid}", errors, FILE_REASONS), suppress(*_ENDED):
                network = self._network(str(pid))
                if network not in tables:  # of a container
                    tables[network] = self._listening(f"{pid}/net")
                read[pid] = replace(named[pid], listening=tables[network])
        return read

    def _serves(
        self, argv: tuple[str, ...], before: Mapping[tuple[str, ...], CommandLine]
    ) -> tuple[EngineDialect, CommandLine | None] | None:
        """The server by a command line or title. ``before``: those parsed at the last read."""
        for one in dialects():
            if one.process_title and argv[0].startswith(one.process_title):
                return one, None
        if not any(one.may_start(argv, {}) for one in dialects()):
            return None
        line = self._lines.get(argv) or before.get(argv) or CommandLine(argv, {}, MAX_CHARACTERS)
        self._lines[argv] = line
        engine = line.starts
        return None if engine is None or not line.read(engine).certain else (engine, line)

    def _found(self, processes: Mapping[int, _Process], own: set[str], errors: Counter[str]) -> Iterator[_HostEngine]:
        """The servers of these processes. ``own``: inodes of sockets in the network of this host."""
        members: dict[int, set[int]] = {}
        around: set[int] = set()
        for pid in processes:
            with isolated(f"process {pid}", errors, FILE_REASONS), suppress(*_ENDED):
                leader = self._leader(pid, processes)
                members.setdefault(leader, set()).add(pid)
                around.update(line_of(self._root, leader)[1:])
        for leader in sorted(members):
            with isolated(f"process {leader}", errors, FILE_REASONS), suppress(*_ENDED):
                process = processes.get(leader) or replace(processes[min(members[leader])], line=None)
                chosen, reason = self._socket(leader, members[leader], process)
                if reason == "not_listening" and leader in around:
                    continue  # a wrapper, whose child serves
                yield self._server(leader, process, chosen, reason, chosen is None or chosen.inode in own)

    def _leader(self, pid: int, processes: Mapping[int, _Process]) -> int:
        """The process that serves: the nearest that a command line starts, and of several with that one (forks) the
        first; else the parent of those with a title.
        """
        line = line_of(self._root, pid)
        started = [one for one in line if one in processes and processes[one].line is not None]
        if not started:
            return next((one for one in line if one not in processes), pid)
        return [one for one in started if processes[one].line is processes[started[0]].line][-1]

    # --- where it serves

    def _socket(self, leader: int, members: set[int], process: _Process) -> tuple[_Socket | None, str]:
        """The socket of its metrics, or why there is none."""
        args, endpoints = process.args, process.engine.endpoints(process.args)
        refusals = {
            "no_endpoint": endpoints.serves is False,
            UNIX_SOCKET: "uds" in args.explicit,
            METRICS_OFF: not endpoints.metrics,
        }
        if refusal := next((reason for reason, holds in refusals.items() if holds), ""):
            return None, refusal
        wanted = args.port or (process.engine.default_port if args.is_explicit("port") is False else None)
        try:
            inodes = set().union(*map(self._inodes, {leader} if wanted is None else {leader, *members}))
        except PermissionError:
            if wanted is None:
                return None, "not_readable"
            # another user's process: its port, and whose socket has it, are all there is
            inodes = {one.inode for one in process.listening if one.uid == process.uid}
        held = [one for one in process.listening if one.inode in inodes and wanted in (None, one.port)]
        if len({one.port for one in held}) > 1:
            held = [one for one in held if one.port == process.engine.default_port]
            return (held[0], "") if held else (None, "several_ports")
        return (held[0], "") if held else (None, "not_listening")

    def _server(self, pid: int, process: _Process, chosen: _Socket | None, reason: str, local: bool) -> _HostEngine:
        args, (name, log) = process.args, self._name(pid)
        public = process.engine.public_arguments(args.values)
        host = "" if chosen is None else chosen.host if local else self._container_address(pid, chosen.host)
        target = None
        if chosen is not None and host:
            here = "::1" if host == "::" else "127.0.0.1" if host == "0.0.0.0" else host
            target = Target(
                here,
                chosen.port,
                process.engine.default_path,
                "https" if "ssl_keyfile" in args.explicit else "http",
                args=process.line.shown[0] if process.line else (),
                args_source=OF_PROCESS,
                verify=False,  # the kernel says whose socket it is
                dialect=process.engine.name,
                kv_events=endpoint_of(args),
            )
            target = self._joined(replace(target, pod=name or target.address), here.startswith(("::1", "127.")))
        place = ("", name or f"pid:{pid}") if target is None else (target.namespace, target.pod)
        pool = pool_of(place[1], Workload(), process.engine.features(args, None, ()).kv_role)
        row = ContainerRow(
            target.container if target else "",
            reason or ("" if target else "loopback_of_container"),
            OF_TITLE if process.line is None else OF_COMMAND,
            target,
            args.complete,
            role=pool.role,
            arguments={name: value for name, value in public.items() if value != REDACTED},  # which is visible, too
        )
        live, ended = discovered([Pod(*place, "", rows=(row, replace(row, target=None, reason="ended")))])
        logs = (log,) if log else (f"{pid}/fd/1", f"{pid}/fd/2")
        files = tuple(self._root / name for name in logs)
        output = ServerOutput((*place, row.container), process.engine.name, files)
        return _HostEngine(pid, target and replace(target, pool=pool), place, live, ended, output)

    def _joined(self, target: Target, everywhere: bool) -> Target:
        """The target, or the one given by hand for the same socket, with what only the process shows."""
        for given in self._given:
            if given.port == target.port and (given.host == target.host or (everywhere and _is_here(given.host))):
                pod = target.pod if given.pod == given.address else given.pod
                joined = replace(given, pod=pod, dialect=target.dialect, kv_events=given.kv_events or target.kv_events)
                return joined if given.args else replace(joined, args=target.args, args_source=OF_PROCESS)
        return target

    def _container_address(self, pid: int, listens: str) -> str:
        """The address of a container with a network of its own, "" = it cannot be reached."""
        if ipaddress.ip_address(listens).is_loopback:
            return ""
        addresses = map(ipaddress.ip_address, _LOCAL.findall(" ".join(self._text(f"{pid}/net/fib_trie").split())))
        usual = (one for one in addresses if one.is_private and not one.is_loopback and not one.is_link_local)
        return str(next(usual, ""))

    def _name(self, pid: int | str) -> tuple[str, str]:
        """The systemd unit, or runtime and id of the container, by the cgroup, and the log of the container, by the
        first process' root; "" = none.
        """
        for line in self._text(f"{pid}/cgroup").splitlines():
            path = line.split(":", 2)[-1]
            if found := _CONTAINER.fullmatch(path):
                runtime, log = _RUNTIMES[found[1]]
                return f"{runtime}:{found[2][:12]}", f"1/root/{log.format(found[2])}"
            if found := _UNIT.fullmatch(path):
                return found[1], ""
        return "", ""

    # --- files of /proc

    def _text(self, name: str, most: int = MAX_BYTES) -> str:
        return read_file(self._root / name, most).decode("utf-8", "replace")

    def _network(self, pid: str) -> int | str | None:
        """The network of a process; of another user's, the container, and without one None for this host's."""
        with suppress(OSError):
            return (self._root / f"{pid}/ns/net").stat().st_ino
        with suppress(OSError):
            name, log = self._name(pid)
            return name if log else None
        return None

    def _inodes(self, pid: int) -> set[str]:
        """The sockets that a process holds. Raises ``OSError``."""
        folder = self._root / f"{pid}/fd"
        found = set()
        with os.scandir(folder) as entries:
            for entry in islice(entries, MAX_OPEN_FILES):
                with suppress(FileNotFoundError):
                    kind, _, inode = os.readlink(entry.path).partition(":")  # noqa: PTH115 - of one process, thousands
                    found |= {inode.strip("[]")} if kind == "socket" else set()
        return found

    def _listening(self, folder: str) -> list[_Socket]:
        """The sockets that listen in a network; none of a process that has ended."""
        found = []
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in self._text(f"{folder}/{table}").splitlines()[1:]:
                    fields = line.split()
                    if len(fields) > 9 and fields[3] == "0A":  # TCP_LISTEN
                        host, _, port = fields[1].partition(":")
                        found.append(_Socket(fields[9], _address(host), int(port, 16), int(fields[7])))
        return found


def line_of(root: Path, pid: int) -> list[int]:
    """The process and those that started it, from the nearest on, but not the first of all. ``root``: ``/proc``."""
    line: list[int] = []
    with suppress(OSError, IndexError, ValueError):
        while pid > 1 and len(line) < MAX_PARENTS:
            line.append(pid)
            stat = read_file(root / str(pid) / "stat", MAX_BYTES).decode("utf-8", "replace")
            pid = int(stat.rpartition(")")[2].split()[1])
    return line


def _address(text: str) -> str:
    """An address as the kernel's tables write it: words of the machine, in hexadecimal."""
    words = (int(text[place : place + 8], 16) for place in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_here(host: str) -> bool:
    """Whether a name or an address is this host's, without asking anybody."""
    if host in ("localhost", os.uname().nodename):
        return True
    with suppress(ValueError, OSError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    return False
