"""Parsers of what the exporter keeps, is told or is asked: log lines, recordings, settings, requests."""

# ruff: noqa: PT017, PT018 - a property is one assertion

from __future__ import annotations

import gzip
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import h11
import yaml

from kvpressure import redaction
from kvpressure.engines import registry
from kvpressure.errors import InputError
from kvpressure.model import ceilings
from kvpressure.publish.web.http import BadRequest, parse_head
from kvpressure.recording.fields import MalformedTick
from kvpressure.recording.format import Header, header_from_json, tick_from_json, tick_to_json
from kvpressure.settings import load, yaml_lines
from kvpressure.settings.options import Option
from kvpressure.settings.settings import options
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.fuzz.draws import SECRET, Subject, mutated, number, some, text, with_another_field

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"


@cache
def log_lines() -> tuple[str, ...]:
    """Lines of real servers, the ones that report an event first."""
    found: dict[str, bool] = {}
    for path in sorted((FIXTURES / "vllm-logs").rglob("*")):
        if path.is_file() and path.suffix in (".log", ".txt", ".gz"):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for line in data.decode(errors="replace").splitlines()[:3000]:
                if 0 < len(line) < 700:
                    found.setdefault(re.sub(r"\d+", "1", line), registry.recognise(line) is not None)
    events = [line for line, is_event in found.items() if is_event]
    others = [line for line, is_event in found.items() if not is_event]
    return (*events[:300], *others[:100])


@cache
def log_words() -> tuple[str, ...]:
    more = ("GiB", "MiB", "%", "args: ", "{'", "': ", "Namespace(", "=", "\x1b[0;36m", " tokens", '{"message": "')
    return (*registry.log_words(), *more)


def make_log_line(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        line = mutated(rng, rng.choice(log_lines()), log_words(), log_lines())
    else:
        line = text(rng, log_words(), 12)
    if rng.random() < 0.3:
        at = rng.randrange(len(line) + 1)
        line = f"{line[:at]} {rng.choice(('', 'api_key=', 'token: ', 'api_key: '))}{SECRET} {line[at:]}"
    return line.replace("\n", " ")


def check_log_line(line: str) -> None:
    """Values are finite, no secret is kept, what is kept is the same event."""
    found = registry.log_line("ns", "pod", "c", line)
    assert found == registry.log_line("ns", "pod", "c", line)
    if found.event is not None:
        assert all(map(math.isfinite, (*found.event.allocator.values(), *found.event.facts.values())))
    kept = registry.public_line(line)
    assert SECRET not in kept
    if kept != redaction.REDACTED:
        assert found.event is not None
        again = registry.recognise(kept)
        assert again is not None and again[1].event == found.event.event, "what is kept of a line is another event"


@cache
def ticks() -> tuple[Any, ...]:
    """Ticks of real recordings, without the long text of their pages."""
    found = []
    for path in sorted((FIXTURES / "recordings").rglob("*.jsonl.gz"))[:12]:
        with gzip.open(path, "rt") as recorded:
            for line in list(recorded)[1:200:60]:
                tick = json.loads(line)
                for engine in tick.get("engines") or ():
                    engine["exposition"] = "\n".join((engine.get("exposition") or "").split("\n")[:6])
                for name in ("gpus", "logs", "containers"):
                    tick[name] = (tick.get(name) or [])[:2]
                found.append(tick)
    return tuple(found)


TICK_WORDS: Final = (
    *("t", "gpus", "uuid", "GPU-1", "engines", "exposition", "namespace", "pod", "sizes", "errors", "steps"),
    *("written", "last_termination", "xid_errors"),
    *("79", "health", "process_pods", "pods", "targets", "\x1b[31m", "x\ny", "vllm:num_requests_running 1"),
)
EXTRA: Final = {
    "owners": [{"uuid": "GPU-1", "namespace": "n", "pod": "p", "container": "c", "shared": True}],
    "allocator": [{"namespace": "n", "pod": "p", "rank": 0, "allocated_bytes": 1, "reserved_bytes": 2}],
    "steps": [
        {"namespace": "n", "pod": "p", "engine": "0", "started": 1.0, "written": 2.0}
        | {"steps": 3, "decoded": 4, "sizes": {"4": 3}}
    ],
    "node_conditions": [{"type": "MemoryPressure", "status": False}],
    "targets": ["http://10.0.0.5:8000/metrics"],
    "pods": [{"namespace": "n", "pod": "p", "uid": "u"}],
    "process_pods": {"10": ["n", "p"]},
    "expected_gpus": {"nvidia": 8},
    "health": {"engines": {"up": True, "last_success": 1.0, "errors": {"timeout": 2}}},
}


def make_recorded(rng: Random) -> str:
    tick: Any = {**rng.choice(ticks()), **{name: EXTRA[name] for name in rng.sample(sorted(EXTRA), rng.randrange(4))}}
    if rng.random() < 0.8:  # most of the cost is the engines, and one is enough most of the time
        tick["engines"] = (tick.get("engines") or [])[: rng.choice((0, 1, 1))]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        tick = with_another_field(rng, tick, TICK_WORDS)
    line = json.dumps(tick)
    return mutated(rng, line, ('{"', '":', "null", "1e999", "\\ud800", '"t":')) if rng.random() < 0.15 else line


def _kept_page(exposition: Any, **more: Any) -> Any:
    return parse_scrape(exposition, keep_text=True, **more)


def _without_hidden(tick: Any) -> Any:
    """A tick without what is only kept in part: arguments, variables and log lines; of what is no engine's
    endpoint the reason.
    """
    pages = (
        replace(page, args=(), env={}, **({"bad_lines": 0, "cut": {}} if page.error else {})) for page in tick.pages
    )
    return replace(tick, logs=(), pages=tuple(pages))


def check_recorded(line: str) -> None:
    """A line is refused in one line, or read; what was read is written and read again as the same."""
    data = line.encode(errors="surrogatepass")
    try:
        found = tick_from_json(data, _kept_page)
    except MalformedTick as error:
        assert len(str(error)) < 400 and str(error).isprintable(), str(error)
        return
    written = tick_to_json(found)
    again = tick_from_json(written.encode(), _kept_page)
    assert repr(_without_hidden(again)) == repr(_without_hidden(found))
    assert tick_to_json(again) == written, "what may be kept changes when it is read again"
    for gpu in found.gpus:
        assert gpu.memory_used_bytes is None or 0 <= gpu.memory_used_bytes <= ceilings.COUNT
        assert gpu.utilization_ratio is None or 0 <= gpu.utilization_ratio <= ceilings.ACTIVITY
    try:
        header: Header | None = header_from_json(data, "x")
    except InputError as error:
        header = None
        assert "\n" not in str(error)
    assert header is None or isinstance(header, Header)


@cache
def settings_table() -> Mapping[str, Option]:
    return options()


@cache
def setting_names() -> tuple[str, ...]:
    return tuple(settings_table())


SETTING_WORDS: Final = (
    *["true", "false", "~", "5s", "1.5", "*a", "{", "}", "[", "]", "'", "0x1f", "1_000", "on", "=", "2001-13-45"],
    *(": ", "\n", "  ", "- ", "&a ", "<<: ", "!!python/object:os.system ", "!!binary ", "|\n", ">\n", "? ", "# x\n"),
    *("---\n", "...\n", '"', "%YAML 1.1\n"),
)


def make_settings(rng: Random) -> str:
    rows = []
    for name in some(rng, setting_names(), rng.choice((1, 1, 2, 3))):
        given = rng.choice(("true", "1s", "15", "x", "[a, b]", "{a: 1}", "127.0.0.1:9000", '"é"', "null", number(rng)))
        if "." in name and rng.random() < 0.4:
            head, _, rest = name.partition(".")
            rows.append(f"{head}:\n  {rest}: {given}")
        else:
            rows.append(f"{name}: {given}")
    text_ = "\n".join(rows) + "\n"
    return mutated(rng, text_, SETTING_WORDS) if rng.random() < 0.7 else text_


@cache
def _settings_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


_REFERENCE: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # another parser where there is libyaml, and faster


def _by_yaml(data: bytes) -> Any:
    """What YAML's own loader reads. libyaml refuses some texts that PyYAML's parser takes, drops any U+FEFF, and reads
    a bare ``!`` as an empty text where PyYAML reads nothing.
    """
    if b"\xef\xbb\xbf" not in data and b"!" not in data:
        try:
            return yaml.load(data, _REFERENCE)
        except (yaml.scanner.ScannerError, yaml.parser.ParserError, yaml.reader.ReaderError):
            pass
    return yaml.safe_load(data)


def check_settings(given: str) -> None:
    """The values are those of YAML's own loader; what cannot be used is said in one line that names the file."""
    path = f"{_settings_directory().name}/settings.yaml"
    Path(path).write_bytes(given.encode(errors="replace"))
    try:
        root: yaml_lines.YamlNode | None = yaml_lines.read(path)
    except InputError as error:
        root = None
        _one_line(error, path)
    if root is not None and "<<" not in given:
        theirs = _by_yaml(given.encode(errors="replace"))
        _same(root.value or None, theirs or None)
        try:
            for _, one in load.from_file(path, settings_table()):
                assert one.where.startswith(path)
        except InputError as error:
            _one_line(error, path)


def _one_line(error: InputError, path: str) -> None:
    assert "\n" not in str(error) and str(error).startswith(path) and len(str(error)) < 2_000, str(error)


def _same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours:
        assert len(ours) >= len(theirs)  # 1 and 01 are two keys of ours and one of theirs
        if len(ours) == len(theirs):
            for one, other in zip(ours.values(), theirs.values(), strict=True):
                _same(one, other)
    else:
        assert repr(ours) == repr(theirs)


# --- requests to the exporter

HEADS: Final = (
    "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n",
    "HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "GET http://x/api/v1/diagnosis?y=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Basic eDp5\r\nConnection: close\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
)
HEAD_WORDS: Final = (
    *("\r\n", "\n", "\r", " ", "\t", ":", "Host: y", "Content-Length: 0", "Content-Length: 5", "GET ", "/../", "%00"),
    *("Transfer-Encoding: chunked", "HTTP/1.1", "HTTP/0.9", "HTTP/2.0", "\x00", "\xff", "Connection: close, x"),
    *(" folded", "a" * 50),
)


def make_head(rng: Random) -> bytes:
    head = rng.choice(HEADS)
    changed = mutated(rng, head, HEAD_WORDS, HEADS) if rng.random() < 0.9 else head
    return changed.encode("latin-1", errors="replace").split(b"\r\n\r\n")[0] + b"\r\n\r\n"


def check_head(head: bytes) -> None:
    """What is taken, h11 takes too and reads alike; what cannot be taken has a status that says so."""
    try:
        request = parse_head(head)
    except BadRequest as error:
        assert 400 <= error.status <= 505
        return
    assert request.path.startswith("/") and not re.search(r"[\s\x00-\x1f\x7f]", request.path)
    assert all(re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9a-z]+", name) for name in request.headers)
    assert not re.search(r"[\r\n\x00]", "".join(request.headers.values()))
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=10**6)
    try:
        server.receive_data(head)
        event = server.next_event()
    except h11.RemoteProtocolError as error:
        assert request.has_body or "Host" in str(error) or "Connection" in str(error), f"only we take it: {error}"
        return
    assert isinstance(event, h11.Request)
    assert event.method.decode() == request.method
    names = [name for name, _ in event.headers]
    for name, given in event.headers:
        if names.count(name) == 1 and name not in (b"content-length", b"transfer-encoding"):
            assert request.headers[name.decode()] == given.decode("latin-1").strip(" \t")


SUBJECTS: Final = (
    Subject("log_line", make_log_line, check_log_line),
    Subject("recording", make_recorded, check_recorded),
    Subject("settings", make_settings, check_settings),
    Subject("http_request", make_head, check_head),
)
