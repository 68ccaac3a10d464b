"""Every command with every kind of wrong input: one clear line that names it, nothing on standard output,
exit status 2.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpressure.cli import main
from kvpressure.toolbox import prometheus
from kvpressure.toolbox.kubectl import Kubectl
from tests.helpers.command import Capsys, refused
from tests.helpers.vllm_server import RawServer, response, saying
from tests.recording.strategies import RECORDINGS
from tests.toolbox.test_diagnose import dead_address

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("clock")]

ANSWERS = {
    "unauthorized": response(b"no", "401 Unauthorized"),
    "server-error": response(b"no", "500 Internal Server Error"),
    "html": response(b"<html>hello</html>", headers=["Content-Type: text/html"]),
    "json": response(b'{"status":"ok"}'),
    "empty": response(),
    "binary": response(bytes(range(256))),
    "another-service": response(b"node_cpu_seconds_total 4\n", headers=["Content-Type: text/plain"]),
    "redirect-loop": response(b"", "302 Found", headers=["Location: /"]),
    "no-http": b"\x00\x01 this is no HTTP\r\n",
}
KV03 = RECORDINGS / "incidents" / "KV03.jsonl.gz"
PLACES = (*ANSWERS, "refused", "tls-of-plain-http")
ASKING = {
    "diagnose": ["diagnose", "{}", "--seconds", "5"],
    "exporter": ["diagnose", "--exporter", "{}"],
    "prometheus": ["diagnose", "--prometheus", "{}"],
    "mitigate": ["mitigate", "{}", "--seconds", "5"],
    "verify": ["mitigate", "--verify", "{}", "--verify-seconds", "5"],
    "probe": ["probe", "{}", "--yes"],
}


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """Addresses by what is wrong with them."""
    with ExitStack() as servers:
        found = {kind: f"http://{servers.enter_context(saying(answer)).address}" for kind, answer in ANSWERS.items()}
        plain = servers.enter_context(RawServer(lambda _, connection: connection.sendall(ANSWERS["html"])))
        found["tls-of-plain-http"] = f"https://{plain.address}"  # it answers at once: a handshake is no whole request
        yield found | {"refused": f"http://{dead_address()}"}


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("place", PLACES)
def test_a_server_that_cannot_be_used(capsys: Capsys, places: dict[str, str], command: str, place: str) -> None:
    said = refused(capsys, "", *[word.format(places[place]) for word in ASKING[command]])
    assert any(part in said for part in ("could not", "allowed:", "running there?"))
    assert places[place].partition("://")[2] in said
    if place == "refused":
        assert "connection refused" in said
        assert "allowed:" not in said, "an outage is no wrong value"
    if place == "unauthorized" and command != "prometheus":
        assert "401" in said


READING: dict[str, list[str]] = {
    "diagnose": ["diagnose", "{}.jsonl"],
    "mitigate": ["mitigate", "{}.jsonl"],
    "replay": ["replay", "{}.jsonl"],
    "audit": ["audit", "{}"],
    "audit-model": ["audit", "--args=x", "--model-config", "{}"],
    "capacity": ["capacity", "{}"],
    "thresholds-audit": ["audit", "--args=x", "--thresholds", "{}"],
    "thresholds-diagnose": ["diagnose", "http://127.0.0.1:1", "--thresholds", "{}"],
    "thresholds-mitigate": ["mitigate", str(KV03), "--thresholds", "{}"],
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
    "no gzip": b"\x1f\x8bnot gzip at all",
    "alias-bomb": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b, *q]\n",
}
FINE = {("empty", name) for name in READING if name.startswith("thresholds")}  # nothing is overridden


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_cannot_be_used(capsys: Capsys, tmp_path: Path, command: str, content: str) -> None:
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
    said = refused(capsys, "", *[str(path) if "{}" in word else word for word in words])
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
    "thresholds": (["mitigate", str(KV03), "--thresholds", "{}"], b"memory_warning_ratio: 0.8\n"),
    "recording": (["replay", "{}"], KV03.read_bytes()),
}


@pytest.mark.parametrize("name", PIPED)
def test_a_pipe_is_read_as_the_file_that_it_stands_for(capsys: Capsys, tmp_path: Path, name: str) -> None:
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
    ("typed", "said"),
    [
        ("diagnose 'http://host name'", "blanks"),
        ("diagnose ftp://host/metrics", "scheme"),
        ("diagnose http://a http://a", "the same server was given twice"),
        ("diagnose http://a --exporter http://b", "one kind of input"),
        ("diagnose -l app=vllm", "needs -n"),
        ("diagnose http://a --gpu H100:0", "NAME:GiB"),
        ('diagnose http://a "--args=\'"', "closed quotes"),
        ("diagnose http://a --args=--max-num-seqs", "--max-num-seqs has no value; allowed: --max-num-seqs VALUE"),
        ('diagnose http://a "--args=--max-num-seqs abc"', "the value 'abc' of --max-num-seqs cannot be read"),
        ("diagnose --prometheus prom:9090", "not an address"),
        ("diagnose --prometheus http://p --since forever", "duration"),
        ("diagnose --frmt", "did you mean --format?"),
        *((f"diagnose {typed} --watch", "only live servers and exporters") for typed in (KV03, "-n inference")),
        ("mitigate --max-rejected 1.5", "above 0 and up to 1"),
        ("mitigate --verify http://a http://b", "not together"),
        ("mitigate --verify ftp://a", "--verify"),
        ("mitigate --verify http://a --verify-seconds -1", "above 0"),
        ("mitigate --workload deploy/chat", "with -n NAMESPACE"),
        ("mitigate -n x -l a=b --workload deploy/chat", "without -l"),
        ("mitigate -n x --workload chat", "KIND/NAME"),
        ("mitigate -n x --workload deploy/-o", "KIND/NAME"),
        ("mitigate -n x --workload --context/a", "--workload"),
        ("audit", "nothing to audit; allowed: FILE..., - (standard input), or --args="),
        ("audit - --args=x", "both files and --args were given; allowed: FILE..."),
        ("audit --args=x --vllm-version latest", "a version like"),
        ("audit --args=x --model-config no-such-model", "neither a file nor a known model"),
        ("replay --format xml", "--format: 'xml' is not allowed; allowed: text, json"),
    ],
)
def test_what_is_typed_wrong_is_one_clear_line(capsys: Capsys, typed: str, said: str) -> None:
    assert said in refused(capsys, typed)


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
def test_a_name_that_can_be_no_file(capsys: Capsys, command: list[str], name: str) -> None:
    """An unset variable of a script, or the wrong word: never a traceback, and never taken for 'not given'."""
    said = refused(capsys, "", *[*command, name])
    unopened = "File name too long" in said  # whatever the system refuses gets "give", all else "allowed"
    assert ("; give a" in said, "; allowed: " in said) == (unopened, not unopened)


@pytest.mark.parametrize(
    "arguments",
    [
        ["probe", "http://127.0.0.1:1", "--yes", "--api-key-file", "{}"],
        ["diagnose", "--prometheus", "http://127.0.0.1:1", "--prometheus-token-file", "{}"],
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"two lines\nof it", "d\u00e4".encode(), b"x" * 70_000])
def test_a_secret_that_cannot_be_used_is_not_shown(
    capsys: Capsys, tmp_path: Path, arguments: list[str], content: bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    said = refused(capsys, "", *[word.format(path) for word in arguments])
    assert str(path) in said
    assert ("; give a text file" if content is None else "; allowed: a text file") in said
    assert "two lines" not in said


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"


class TestHostilePrometheus:
    @pytest.mark.attack("a Prometheus that nests deeply, drips or packs its answer", "one error line")
    def test_nested_too_deep(self, capsys: Capsys) -> None:
        """A traceback (RecursionError)."""
        with saying(HEAD + b"\r\n" + b"[" * 200_000) as server:
            refused(capsys, f"diagnose --prometheus http://{server.address}")

    def test_one_byte_now_and_then(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        """It held the command for a minute and longer."""
        monkeypatch.setattr(prometheus, "ANSWER_SECONDS", 0.5)
        began = time.monotonic()
        with saying(HEAD + b"\r\n", *[b" "] * 400, pause=0.05) as server:
            assert "takes longer than" in refused(capsys, f"diagnose --prometheus http://{server.address}")
        assert time.monotonic() - began < 10

    @pytest.mark.writer(
        "whoever answers as Prometheus or API server to a command",
        "packed, endless, dripping or deeply nested answers",
        "one error line",
        "a deadline and a byte limit for the whole answer; packed answers are refused",
    )
    def test_a_packed_answer_is_not_unpacked(self, capsys: Capsys) -> None:
        """A gzip bomb took 561 MiB."""
        bomb = gzip.compress(b" " * 50_000_000)
        tracemalloc.start()
        try:
            with saying(HEAD + b"Content-Encoding: gzip\r\n\r\n" + bomb) as server:
                assert "packed" in refused(capsys, f"diagnose --prometheus http://{server.address}")
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()


def test_kubectl_that_prints_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text("#!/bin/sh\nexec yes 0123456789\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(Kubectl().run("get", "pods", limit=100_000)) == 100_000
