"""Every command with every kind of wrong input: one clear line that names it, nothing on standard output,
exit status 2.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvpressure.cli import COMMANDS, main
from kvpressure.toolbox import prometheus
from kvpressure.toolbox.kubectl import Kubectl, KubectlError
from tests.recording.strategies import RECORDINGS
from tests.toolbox.conftest import FakeClock
from tests.toolbox.test_diagnose import dead_address

pytestmark = pytest.mark.live

ANSWERS: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "unauthorized": (401, b"no", {}),
    "server-error": (500, b"no", {}),
    "html": (200, b"<html>hello</html>", {"Content-Type": "text/html"}),
    "json": (200, b'{"status":"ok"}', {}),
    "empty": (200, b"", {}),
    "binary": (200, bytes(range(256)), {}),
    "another-service": (200, b"node_cpu_seconds_total 4\n", {"Content-Type": "text/plain"}),
}
KV03 = RECORDINGS / "incidents" / "KV03.jsonl.gz"
PLACES = (*ANSWERS, "redirect-loop", "refused", "no-http", "tls-of-plain-http")
ASKING = {
    "diagnose": ["diagnose", "{}", "--seconds", "5"],
    "exporter": ["diagnose", "--exporter", "{}"],
    "prometheus": ["diagnose", "--prometheus", "{}"],
    "mitigate": ["mitigate", "{}", "--seconds", "5"],
    "verify": ["mitigate", "--verify", "{}", "--verify-seconds", "5"],
    "probe": ["probe", "{}", "--yes"],
    "audit": ["audit", "{}"],
}


class _Handler(BaseHTTPRequestHandler):
    """``/NAME/...`` answers as ``ANSWERS`` says; ``/redirect-loop`` sends back to itself."""

    def do_GET(self) -> None:
        server: _Server = self.server
        status, body, headers = ANSWERS.get(server.kind, (302, b"", {"Location": self.path}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    kind = ""
    daemon_threads = True


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """Addresses by what is wrong with them."""
    servers: list[_Server] = []
    found = {"refused": f"http://{dead_address()}"}
    for kind in (*ANSWERS, "redirect-loop"):
        server = _Server(("127.0.0.1", 0), _Handler)
        server.kind = kind
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        found[kind] = f"http://127.0.0.1:{server.server_address[1]}"
    found["tls-of-plain-http"] = found["html"].replace("http:", "https:")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_garbage, args=(listener,), daemon=True).start()
        found["no-http"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield found
    for server in servers:
        server.shutdown()
        server.server_close()


def _garbage(listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client:
            client.sendall(b"\x00\x01 this is no HTTP\r\n")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that ``arguments`` give."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"kvpressure {arguments[0]}: ")
    assert len(captured.err) < 700
    assert "Errno" not in captured.err
    return captured.err


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("place", PLACES)
def test_a_server_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], clock: FakeClock, places: dict[str, str], command: str, place: str
) -> None:
    said = refused(capsys, [word.format(places[place]) for word in ASKING[command]])
    assert any(part in said for part in ("could not", "allowed:", "running there?"))
    assert places[place].partition("://")[2] in said
    if place == "refused":
        assert "connection refused" in said
        assert "allowed:" not in said, "an outage is no wrong value"
    if place == "unauthorized" and command != "prometheus":
        assert "401" in said
    del clock


READING: dict[str, list[str]] = {
    "diagnose": ["diagnose", "{}.jsonl"],
    "mitigate": ["mitigate", "{}.jsonl"],
    "replay": ["replay", "{}.jsonl"],
    "manifest": ["mitigate", "--verdict", "kv_pressure", "--manifest", "{}"],
    "audit": ["audit", "{}"],
    "audit-model": ["audit", "--args=x", "--model-config", "{}"],
    "capacity": ["capacity", "{}"],
    "traffic": ["capacity", "llama-3-8b", "--gpu-memory", "80GB", "--traffic", "{}"],
    "thresholds-audit": ["audit", "--args=x", "--thresholds", "{}"],
    "thresholds-diagnose": ["diagnose", "http://127.0.0.1:1", "--thresholds", "{}"],
    "thresholds-mitigate": ["mitigate", "--verdict", "idle", "--thresholds", "{}"],
    "thresholds-bundle": ["bundle", "--check", "--thresholds", "{}"],
}
CONTENTS: dict[str, bytes | None] = {
    "missing": None,
    "directory": None,
    "device": None,
    "empty": b"",
    "binary": bytes(range(256)),
    "half-yaml": b"kind: Deployment\nspec: [open\n",
    "half-json": b'{"format": "kvpressure-recording",',
    "list": b"[1, 2]\n",
    "text": b"only text\n",
    "number": b"7\n",
    "packed": gzip.compress(b"{}")[:-4],
    "alias-bomb": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b, *q]\n",
}
FINE = {("empty", name) for name in READING if name.startswith("thresholds")}  # nothing is overridden


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, content: str
) -> None:
    if (content, command) in FINE:
        return
    words = READING[command]
    path = tmp_path / f"odd{'.jsonl' if '.jsonl' in ' '.join(words) else ''}"
    text = CONTENTS[content]
    if content == "directory":
        path.mkdir()
    elif content == "device":
        path.symlink_to("/dev/zero")
    elif text is not None:
        path.write_bytes(text)
    said = refused(capsys, [str(path) if "{}" in word else word for word in words])
    assert str(path) in said


@pytest.mark.attack("/dev/zero or /proc/kmsg given to a command that reads a file", "one error line")
@pytest.mark.parametrize(
    "words",
    [["audit", "/proc/kmsg"], *([*command, "/dev/zero"] for command in (["replay"], ["audit"], ["serve", "--config"]))],
    ids=" ".join,
)
def test_a_file_without_an_end_is_refused(words: list[str]) -> None:
    """Each read on for ever. ``kmsg`` says that it is a regular file."""
    if not os.access(words[-1], os.R_OK):
        pytest.skip("needs the right to read it")
    command = [sys.executable, "-m", "kvpressure", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert words[-1] in ended.stderr
    assert "regular file" in ended.stderr


MANIFEST = """
kind: Pod
metadata: {name: a}
spec: {containers: [{name: vllm, image: vllm/vllm-openai:v0.11.0, command: [vllm, serve, qwen3-8b]}]}
"""
CONFIG = """{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}"""
PIPED: dict[str, tuple[list[str], bytes]] = {
    "audit": (["audit", "{}"], MANIFEST.encode()),
    "capacity": (["capacity", "{}", "--gpu-memory", "80GB"], CONFIG.encode()),
    "thresholds": (["mitigate", "--verdict", "idle", "--thresholds", "{}"], b"memory_warning_ratio: 0.8\n"),
    "recording": (["replay", "{}"], KV03.read_bytes()),
}


@pytest.mark.parametrize("name", PIPED)
def test_a_pipe_is_read_as_the_file_that_it_stands_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """``audit <(helm template ...)``: a person has named it, so its writer is waited for."""
    words, data = PIPED[name]
    file, pipe = tmp_path / "file" / "m" / "config.json", tmp_path / "pipe" / "m" / "config.json"
    for path in (file, pipe):
        path.parent.mkdir(parents=True)
    file.write_bytes(data)
    os.mkfifo(pipe)
    said = []
    for path in (file, pipe):
        if path is pipe:
            threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True).start()
        status = main([word.format(path) for word in words])
        said.append((status, capsys.readouterr().out.replace(str(path.parent), "")))
    assert said[0] == said[1]
    assert said[0][1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["capacity", "no-such-model"],
        ["audit", "--args=vllm serve x", "--model-config", "no-such-model"],
        ["probe", "http://{dead}", "--yes", "--model", "x", "--model-config", "no-such-model"],
    ],
)
def test_a_model_that_nobody_knows(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "no-such-model" in refused(capsys, [word.format(dead=dead_address()) for word in arguments])


@pytest.mark.parametrize("name", ["", "a" * 300, "/tmp/" + "a" * 300], ids=["empty", "long", "long path"])
@pytest.mark.parametrize(
    "command",
    [
        ["capacity"],
        ["audit", "--args=vllm serve x", "--model-config"],
        ["probe", "http://127.0.0.1:1", "--model-config"],
        ["diagnose"],
        ["mitigate"],
        ["replay"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_can_be_no_file(capsys: pytest.CaptureFixture[str], command: list[str], name: str) -> None:
    """An unset variable of a script, or the wrong word: never a traceback, and never taken for 'not given'."""
    said = refused(capsys, [*command, name])
    unopened = "File name too long" in said  # whatever the system refuses gets "give", all else "allowed"
    assert ("; give a" in said, "; allowed: " in said) == (unopened, not unopened)


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "/no/such"],
        ["replay", str(KV03), "--thresholds", "/no/such"],
        ["replay", str(KV03), "--openmetrics", "/no/such/out"],
        ["diagnose", "/no/such.gz"],
        ["record", "--out", "/no/such/r.jsonl"],
        ["bundle", "--values", "/no/such"],
        ["bundle", "--out", "/proc/no/such/out"],
        ["audit", "/no/such"],
        ["audit", "--args=vllm serve x", "--baseline", "/no/such"],
        ["audit", "--args=vllm serve x", "--write-baseline", "/no/such/out"],
        ["capacity", "qwen3-8b", "--traffic", "/no/such"],
        ["probe", "http://127.0.0.1:1", "--api-key-file", "/no/such"],
        ["serve", "--config", "/no/such"],
        ["serve", "--thresholds", "/no/such"],
    ],
    ids=" ".join,
)
def test_a_file_that_the_system_refuses(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    said = refused(capsys, words)
    file = "/proc/no" if "bundle" in words and "--out" in words else words[-1]  # the directory that cannot be made
    assert f"{file}: No such file or directory; give a" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-num-seqs", "5"], "--max-num-seqs: only with --verdict"),
        (["--running", "5"], "--running: only with --verdict"),
        (["--out-of-memory"], "--out-of-memory: only with --verdict"),
        (["--kv-pool-gib", "5"], "--kv-pool-gib: only with --verdict"),
        (["--verdict", "kv_pressure"], "remove one of them"),
    ],
)
def test_a_recording_is_not_completed_by_hand(capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    assert said in refused(capsys, ["mitigate", "incident.jsonl.gz", *more])


@pytest.mark.parametrize(
    "more",
    [["--pod", "a"], ["--model", "a"], ["-l", "a=b"], ["--workload", "deploy/a"], ["--verify", ""]],
    ids=lambda words: words[0],
)
def test_a_stated_verdict_has_no_server(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    refused(capsys, ["mitigate", "--verdict", "kv_pressure", "--running", "9", *more])


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe", "http://127.0.0.1:1", "--yes", "--api-key-file", "{}"],
        ["diagnose", "--prometheus", "http://127.0.0.1:1", "--prometheus-token-file", "{}"],
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"two lines\nof it", "d\u00e4".encode(), b"x" * 70_000])
def test_a_secret_that_cannot_be_used_is_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], content: bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    said = refused(capsys, [word.format(path) for word in arguments])
    assert str(path) in said
    assert ("; give a text file" if content is None else "; allowed: a text file") in said
    assert "two lines" not in said


# --- help and JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_to_type_and_how_it_ends(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert text.count(f"kvpressure {command}") >= 2  # the usage, and at least one example
    assert "xit status" in text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", ["--no-such-option", "--format=nothing"])
def test_a_mistyped_option_points_at_help_or_at_the_nearest(
    capsys: pytest.CaptureFixture[str], command: str, wrong: str
) -> None:
    assert re.search(
        r"; (?:did you mean --[\w.-]+\?|.* --help lists the options|allowed: .*)$", refused(capsys, [command, wrong])
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose", "{recording}"],
        ["mitigate", "{recording}"],
        ["mitigate", "--verdict", "idle"],
        ["audit", "--args=vllm serve x"],
        ["capacity", "llama-3-8b", "--gpu-memory", "80GB"],
        ["capacity", "llama_7b", "--worksheet", "--gpu-memory", "80GB"],
    ],
)
def test_json_is_json(capsys: pytest.CaptureFixture[str], serve_json: Callable[..., str], arguments: list[str]) -> None:
    recording = str(Path(__file__).parents[1] / "fixtures/recordings/vllm-cpu/a_idle.jsonl.gz")
    assert main([*(word.format(recording=recording) for word in arguments), "--format", "json"]) in (0, 1)
    captured = capsys.readouterr()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert isinstance(json.loads(captured.out, parse_constant=refuse), dict | list)
    del serve_json


@pytest.fixture
def raw_server() -> Iterator[Callable[..., str]]:
    """A server that answers every request with these bytes, one part each ``pause`` seconds; its address."""
    listeners: list[socket.socket] = []

    def start(*parts: bytes, pause: float = 0.0) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, contextlib.suppress(OSError):
                        client.recv(65536)
                        for part in parts:
                            client.sendall(part)
                            time.sleep(pause)
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(65536):  # closing earlier would reset what was not read yet
                            pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"


class TestHostilePrometheus:
    @pytest.mark.attack("a Prometheus that nests deeply, drips or packs its answer", "one error line")
    def test_nested_too_deep(self, raw_server: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
        """A traceback (RecursionError)."""
        address = raw_server(HEAD + b"\r\n" + b"[" * 200_000)
        assert main(["diagnose", "--prometheus", address]) == 2
        assert "Traceback" not in capsys.readouterr().err

    def test_one_byte_now_and_then(
        self, raw_server: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It held the command for a minute and longer."""
        monkeypatch.setattr(prometheus, "ANSWER_SECONDS", 0.5)
        began = time.monotonic()
        address = raw_server(HEAD + b"\r\n", *[b" "] * 400, pause=0.05)
        assert main(["diagnose", "--prometheus", address]) == 2
        assert time.monotonic() - began < 10
        assert "takes longer than" in capsys.readouterr().err

    @pytest.mark.writer(
        "whoever answers as Prometheus or API server to a command",
        "packed, endless, dripping or deeply nested answers",
        "one error line",
        "a deadline and a byte limit for the whole answer; packed answers are refused",
    )
    def test_a_packed_answer_is_not_unpacked(
        self, raw_server: Callable[..., str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A gzip bomb took 561 MiB."""
        bomb = gzip.compress(b" " * 50_000_000)
        tracemalloc.start()
        try:
            address = raw_server(HEAD + b"Content-Encoding: gzip\r\n\r\n" + bomb)
            assert main(["diagnose", "--prometheus", address]) == 2
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()
        assert "packed" in capsys.readouterr().err


def test_kubectl_that_prints_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text("#!/bin/sh\nexec yes 0123456789\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(Kubectl().run("get", "pods", limit=100_000)) == 100_000


def test_kubectl_whose_answer_is_nested_too_deep_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' '['\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(KubectlError, match="not JSON"):
        Kubectl().objects("pods", "ns")
