"""Every parser of what comes from outside: how its cases are made, and what has to hold for each of them."""

# ruff: noqa: PT017, PT018 - a property is one assertion

from __future__ import annotations

import gzip
import ipaddress
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import h11
import yaml
from google.protobuf.message import DecodeError
from prometheus_client.parser import text_string_to_metric_families

import tests.helpers.vllm_pages as pages
from kvpressure import redaction
from kvpressure.engines import registry, shell
from kvpressure.engines.base import option
from kvpressure.engines.vllm import command_line, public
from kvpressure.errors import InputError
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.reasons import REASONS
from kvpressure.printable import visible
from kvpressure.publish.web.http import BadRequest, parse_head
from kvpressure.recording.fields import MalformedTick
from kvpressure.recording.format import Header, header_from_json, tick_from_json, tick_to_json
from kvpressure.runtime.plausibility import believed
from kvpressure.settings import load, yaml_lines
from kvpressure.settings.options import Option
from kvpressure.settings.settings import options
from kvpressure.sources.base import Reading, SourceError
from kvpressure.sources.kubernetes.json_list import ListError, read_list
from kvpressure.sources.kubernetes.podresources_message import ContainerResources, read_containers
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape import fetch, layout
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from tests.engines.vllm.crafted import UNITS
from tests.fuzz.draws import mutated, number, some, text, with_another_field
from tests.sources.kubernetes.objects import container, pod
from tests.sources.kubernetes.podresources_api import api_pb2

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
SECRET: Final = "Zq7hunterXw2"


@dataclass(frozen=True)
class Subject:
    """What is fuzzed. ``make`` draws a case (JSON or bytes), ``check`` raises where not all holds that it says."""

    name: str
    make: Callable[[Random], Any]
    check: Callable[[Any], None]


# --- metrics endpoints ---------------------------------------------------------------------------------------------


@cache
def captures() -> tuple[str, ...]:
    """Endpoints of real servers, in each form, short enough for many cases a second."""
    found = [pages.text_of(name) for name in ("d_kv_pressure", "l_dp2")]
    found += [pages.to_openmetrics(found[0]), pages.to_quoted(found[0])]
    return tuple(found)


@cache
def capture_lines() -> tuple[str, ...]:
    return tuple(line for capture in captures() for line in capture.split("\n") if line)


@cache
def sample_lines() -> tuple[str, ...]:
    """Lines of the engines' own series, which are read."""
    return tuple(line for line in capture_lines() if line.startswith(("vllm:", '{"vllm:')))


@cache
def sample_names() -> tuple[str, ...]:
    return tuple(sorted(registry.samples()))


WORDS: Final = (
    *("vllm", "serve", "org/model", "python3", "-m", "vllm.entrypoints.openai.api_server", "sh", "-c", "bash"),
    *("exec", "env", "start", "--headless"),
    *("--max-num-seqs", "--max-num-seqs=64", "--max-model-len=8k", "--gpu-memory-utilization", "0.9", "--port"),
    *("8000", "ray"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--tensor-parallel-size=2", "$(A)", "${B}"),
    *("$C", "--", "-tp"),
    *("sglang.launch_server", "--model-path", "--config", "/etc/x.yaml", "--kv-transfer-config", "&&", "||"),
    *(";", "a=b"),
    *('{"kv_role": "kv_both"}', "export A=1;", "vllm serve m --port 1"),
)
PAGE_TIME: Final = 1_700_000.0  # of the timestamps that are put in, in milliseconds there
LABELS: Final = ("engine", "model_name", "le", "finished_reason", "reason", "pid", "ReplicaId", "status", "x", "le")


def _line(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(sample_lines() if rng.random() < 0.8 else capture_lines())
    if kind < 0.6:
        return mutated(rng, rng.choice(capture_lines()), WORDS, capture_lines())
    if kind < 0.7:
        return text(rng, WORDS)
    values = ("0", "1", "m", "0.5", "+Inf", "capacity", "2xx", "}", '\\"', "\\\\", "é", "\x1b[2J", "\u202e", "a" * 300)
    labels = ",".join(f'{rng.choice(LABELS)}="{rng.choice(values)}"' for _ in range(rng.randrange(4)))
    gap = rng.choice((" ", " ", " ", "  ", "\t", ""))
    return f"{rng.choice(sample_names())}{{{labels}}}{gap}{number(rng)}" + rng.choice(("", "", "", " 1700000000", "\r"))


def make_page(rng: Random) -> list[Any]:
    """One to three texts that one target sends one after the other."""
    found: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        page = _later(rng, found[-1]) if found and rng.random() < 0.7 else _any_page(rng)
        found.append(page if rng.random() < 0.8 else mutated(rng, page, WORDS))
    return found


def _any_page(rng: Random) -> str:
    return "\n".join(_line(rng) for _ in range(rng.randrange(8)))


def _later(rng: Random, page: str) -> str:
    """The page a while later: other values, a line that is new, one that left, one in another place."""
    lines = page.split("\n")
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind < 2:
            lines[at] = f"{lines[at].rpartition(' ')[0]} {number(rng)}"
        elif kind == 2:
            lines.insert(at, _line(rng))
        elif kind == 3 and len(lines) > 1:
            del lines[at]
        else:
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
    return "\n".join(lines)


def check_page(texts: Sequence[str]) -> None:
    """Values within their ceilings, histograms sound, the same whatever came before, live and replayed alike."""
    scanner = Scanner()
    for n, page in enumerate(texts):
        result = scanner.scan(page, PAGE_TIME)
        fresh = Scanner().scan(page, PAGE_TIME) if n else result
        assert result.bad_lines <= fresh.bad_lines, "a form that is known as unwanted is not looked at again"
        assert replace(result, bad_lines=fresh.bad_lines) == fresh, "the past of a scanner shows"
        _check_scan(page, result)
    replayed = parse_scrape(texts[-1].encode(errors="replace"), target="t", time=PAGE_TIME)
    assert (replayed.engines, replayed.page, replayed.bad_lines) == (fresh.engines, fresh.page, fresh.bad_lines)
    assert (replayed.error, replayed.flavour, replayed.cut) == (fresh.error, fresh.flavour, fresh.cut)


def _check_scan(page: str, result: r.Scrape) -> None:
    assert result.error is None or result.error in REASONS
    assert (result.error is None) == bool(result.engines)
    assert 0 <= result.bad_lines <= 2 * (page.count("\n") + 1)
    for engine in result.engines:
        for one in (*engine.gauges.values(), *engine.counters.values()):
            assert 0 <= one <= ceilings.WORK
        assert engine.gauges.get(r.KV_USAGE, 0) <= ceilings.RATIO
        assert visible(engine.model_name) == engine.model_name
        for histogram in engine.histograms.values():
            assert len(histogram.bounds) == len(histogram.counts)
            assert list(histogram.bounds) == sorted(set(histogram.bounds))
            assert list(histogram.counts) == sorted(histogram.counts)
            assert not histogram.bounds or histogram.bounds[-1] == math.inf


def make_line(rng: Random) -> str:
    line = rng.choice(capture_lines()) if rng.random() < 0.5 else _line(rng)
    return (mutated(rng, line, WORDS) if rng.random() < 0.7 else line).replace("\n", " ")


def check_line(line: str) -> None:
    """What Prometheus' parser makes of a line is what ours makes of it, where it takes it at all."""
    try:
        ours = _read_line(line)
    except layout.BadLine:
        ours = None
    theirs = _by_prometheus(line)
    if theirs is None or ours is None:
        assert theirs is None or not _must_be_read(line, theirs[1]), f"refused: {theirs}"
        return
    assert ours[:2] == theirs[:2]
    assert ours[2] == theirs[2] or (math.isnan(ours[2]) and math.isnan(theirs[2]))


def _read_line(line: str) -> tuple[str, dict[str, str], float] | None:
    name = layout.name_of(line)
    if not name or line.lstrip(" \t").startswith(("#", "{")):
        return None
    head, number, _ = layout.sample_of(line)
    labels = layout.labels_of(head)
    try:
        return name, labels, float(number)
    except ValueError:
        return None


def _by_prometheus(line: str) -> tuple[str, dict[str, str], float] | None:
    if not line.isprintable() or "_" in line.rpartition("}")[2] or "#" in line:
        return None  # other blanks than of the format, and numbers that are Python's alone
    try:
        (family,) = text_string_to_metric_families(line)
        (sample,) = family.samples
    except Exception:
        return None
    if abs(sample.value) > ceilings.WORK:
        return None  # as a whole number beyond what a float holds
    return sample.name, sample.labels, float(sample.value)


_STRICT: Final = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\["\\n])*"(?:,(?=[^}])|(?=\})))*,?\})?'
    r" +[-+0-9.eEInfNa]+(?: +-?[0-9]+)?"
)


def _must_be_read(line: str, labels: Mapping[str, str]) -> bool:
    """Whether the format itself allows the line, within our bounds; Prometheus' Python parser takes more than that."""
    return (
        _STRICT.fullmatch(line) is not None
        and len(line) <= layout.MAX_LINE_CHARS
        and all(len(label) < layout.MAX_LABEL_CHARS // 2 for label in labels.values())
    )


def make_plugin_page(rng: Random) -> str:
    """What the plugin inside vLLM writes on the page of its server."""
    rows = [f"kvpressure:frontends {rng.choice(('1', '1', '2', number(rng)))}"]
    for _ in range(rng.randrange(10)):
        name, labels = rng.choice(
            (
                ("engine_steps_total", f'count="{rng.choice(("batch", "running", "x"))}",size="{number(rng)}"'),
                ("engine_sums_total", f'sum="{rng.choice(("steps", "decoded", "preemptions", "x"))}"'),
                ("engine_kv_max", 'a="b"'),
                (
                    "allocator",
                    f'figure="{rng.choice(("reserved_bytes", "x"))}",rank="{number(rng)}",pid="7"',
                ),
                ("written_seconds", f'rank="{number(rng)}",pid="{number(rng)}"'),
            )
        )
        rows.append(f'kvpressure:{name}{{engine="{rng.choice(("0", "1", "", "x"))}",{labels}}} {number(rng)}')
    page = "\n".join(["vllm:x 1", *rows, ""])
    return mutated(rng, page, ("kvpressure:", '",size="', *WORDS)) if rng.random() < 0.5 else page


def check_plugin_page(page: str) -> None:
    """Counts, sizes and ratios within their ceilings."""
    found = read_plugin_metrics(page.encode(errors="replace"), "ns", "pod", 1_700_000_000.0)
    assert found is None or found.bad_lines <= page.count("\n") + 1
    for stats in found.steps if found else ():
        assert all(0 <= size <= ceilings.BATCH and 0 <= n <= ceilings.COUNT for size, n in stats.sizes.items())
        assert 0 <= stats.steps <= ceilings.COUNT and 0 <= stats.decoded <= ceilings.COUNT
        assert stats.kv_max is None or 0 <= stats.kv_max <= ceilings.RATIO
    for reading in found.allocator if found else ():
        assert all(
            field is None or 0 <= field <= ceilings.BYTES
            for field in (reading.allocated_bytes, reading.reserved_bytes, reading.inactive_split_bytes)
        )


# --- command lines and scripts ---------------------------------------------------------------------------------------

SECRETS: Final = (
    *("--api-key", "--hf-token", "--ssl-keyfile-password", "--some-new-option", "--middleware", "--api_key"),
    *("--password",),
)
_ALL_WORDS: Final = (*WORDS, *UNITS)
LIMITS: Final = {
    "max_num_seqs": lambda rng: str(rng.randrange(1, 4096)),
    "max_model_len": lambda rng: str(rng.randrange(1, 10**6)),
    "gpu_memory_utilization": lambda rng: str(round(rng.random(), 3)),
    "tensor_parallel_size": lambda rng: str(rng.randrange(1, 16)),
    "max_num_batched_tokens": lambda rng: str(rng.randrange(1, 10**6)),
    "kv_cache_dtype": lambda rng: rng.choice(("auto", "fp8_e4m3")),
}


def make_command(rng: Random) -> dict[str, Any]:
    """A command line with known limits (``wanted``), with a secret, or any words at all."""
    env = {rng.choice("ABC"): text(rng, WORDS, 2) for _ in range(rng.randrange(3))}
    kind = rng.random()
    if kind < 0.4:
        wanted = {name: LIMITS[name](rng) for name in rng.sample(sorted(LIMITS), rng.randrange(1, 5))}
        words = ["vllm", "serve", "org/model"]
        for name, given in wanted.items():
            flag = "--" + (name if rng.random() < 0.2 else name.replace("_", "-"))
            words += [f"{flag}={given}"] if rng.random() < 0.5 else [flag, given]
        argv = words if rng.random() < 0.5 else ["sh", "-c", " ".join(quoted(rng, word) for word in words)]
        return {"argv": argv, "env": {}, "wanted": wanted}
    argv = [
        mutated(rng, w, WORDS) if rng.random() < 0.3 else w for w in some(rng, _ALL_WORDS, rng.choice((3, 3, 3, 6, 12)))
    ]
    if kind < 0.7:
        at = rng.randrange(len(argv) + 1)
        secret = quoted(rng, SECRET) if rng.random() < 0.3 else SECRET
        argv[at:at] = [f"{rng.choice(SECRETS)}={secret}"] if rng.random() < 0.5 else [rng.choice(SECRETS), secret]
        if rng.random() < 0.4:
            argv = ["sh", "-c", " ".join(argv)]
    return {"argv": argv, "env": env}


def quoted(rng: Random, word: str) -> str:
    """``word`` as a shell script may spell it."""
    parts = []
    while word:
        end = rng.randrange(1, len(word) + 1)
        part, word = word[:end], word[end:]
        kind = rng.randrange(4)
        if kind == 0:
            parts.append("'" + part.replace("'", "'\\''") + "'")
        elif kind == 1:
            parts.append('"' + re.sub(r'(["\\$`])', r"\\\1", part) + '"')
        else:
            parts.append(re.sub(r"([^\w@%+=:,./-])", r"\\\1", part))
    return "".join(parts)


def check_command(case: Mapping[str, Any]) -> None:
    """Known limits are read, no secret is kept, what is kept reads as itself."""
    argv, env = case["argv"], case["env"]
    read = command_line.read(argv, env)
    assert all(
        isinstance(name, str) and (text is None or isinstance(text, str)) for name, text in read.args.values.items()
    )
    assert read.starts_server or not read.certain
    shown = registry.public_texts(argv)
    assert SECRET not in " ".join(shown)
    assert registry.public_texts(shown) == shown, "what may be known changes when it is read again"
    if "wanted" in case:
        assert read.starts_server and read.args.complete
        for name, given in case["wanted"].items():
            assert read.args.values[name] == given
            assert f"{option(name)}={given}" in shown
        assert public.PUBLIC.command(command_line.read(argv).args) == tuple(shown)
    for engine in registry.dialects():
        again = engine.read_command(tuple(argv), dict(env))
        assert engine.read_command is not command_line.read or again == read, "not the same twice"


def make_script(rng: Random) -> dict[str, Any]:
    """A script of which all words are known (``commands``), or any mixture of a shell's signs."""
    if rng.random() < 0.5:
        commands = [
            [rng.choice(("echo", "vllm", "exec-it", "x.y")), *(_word(rng) for _ in range(rng.randrange(4)))]
            for _ in range(rng.randrange(1, 4))
        ]
        script = rng.choice(("", "", "set -e\n", "# a 'comment\n"))
        expected = ([["set", "-e"]] if script.startswith("set") else []) + commands
        for command in commands:
            script += rng.choice((" ", "  ", "\t", " \\\n")).join(quoted(rng, word) for word in command)
            script += rng.choice(("\n", " ; ", " && ", " || ", " | ", " &\n", " # it's\n", " > /dev/null\n"))
        return {
            "script": script if not script.endswith(("&& ", "|| ", "| ")) else script + "true\n",
            "commands": expected,
        }
    script = "".join(some(rng, (*UNITS, *WORDS, " ", "\n"), 25))
    return {"script": mutated(rng, script, UNITS) if rng.random() < 0.3 else script, "env": {"a": "b c", "A": "x"}}


def _word(rng: Random) -> str:
    return "".join(rng.choice("ab Z0-_./=:,@%'\"\\$`;&|<>(){}[]*?!~#é") for _ in range(rng.randrange(1, 8)))


def check_script(case: Mapping[str, Any]) -> None:
    """Every word of a quoted script comes back; what variables bring is bounded."""
    script, most = case["script"], 16_384
    _, found, scripted = shell.program_of(["sh", "-c", script, "x", "p1", "p 2"], case.get("env", {}))
    commands = [command.words for command in found.commands]
    if "commands" in case:
        assert found.understood and scripted
        assert [words for words in commands if words != ["true"]] == case["commands"]
    assert sum(len(word) for words in commands for word in words) <= 4 * (len(script) + most)
    assert all(words and all(isinstance(word, str) for word in words) for words in commands)


# --- Kubernetes -------------------------------------------------------------------------------------------------------

ANNOTATIONS: Final = tuple(
    f"{prefix}/{name}"
    for prefix in ("kvpressure.io", "prometheus.io", "prometheus.kserve.io")
    for name in ("port", "path", "scheme", "scrape", "container", "tls", "alerts", "ca", "engine")
)
POD_WORDS: Final = (
    *("8000", "http", "https", "/metrics", "true", "false", "vllm", "vllm/vllm-openai:v0.9.1", "10.0.0.5"),
    *("Running", "64Gi", "verify", "off", "ticket"),
    *("@evil", "//evil/", "?x=1", "#", "%0d%0a", "insecure", "../", "nvidia.com/gpu", "containerd://abc"),
    *("VLLM_PORT", "$(A)", "host", "127.0.0.1"),
    *("\r\nHost: evil", " HTTP/1.1", "metadata.annotations['a']", "kubernetes"),
)


def make_pod(rng: Random) -> Any:
    """A pod that runs an engine, with a few fields of any type."""
    annotations = {rng.choice(ANNOTATIONS): text(rng, POD_WORDS, 2) for _ in range(rng.choice((0, 0, 1, 3)))}
    document: Any = pod(
        containers=[
            container(
                f"c{n}" if n else "vllm",
                command=some(rng, WORDS, 8) or None,
                env=[{"name": "A", "value": text(rng, WORDS, 2)}],
            )
            for n in range(rng.choice((1, 1, 1, 1, 1, 2, 3)))
        ],
        annotations=annotations,
        host_network=rng.random() < 0.2,
        last={"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-02T03:04:05Z"}
        if rng.random() < 0.5
        else None,
        ip=rng.choice(("10.0.0.5", "10.0.0.5", "fd00::5", None, "", "x y", "a\r\nb")),
    )
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        document = with_another_field(rng, document, POD_WORDS)
    return document


def check_pod(document: Any) -> None:
    """Requests go to the pod's own address, h11 reads them as one request; counts within ceilings."""
    if not isinstance(document, dict):
        return
    policies = (Policy(), Policy(selected=True), Policy(template=True))
    found = read_pod(document, policies[len(str(document)) % len(policies)])
    for engine in found.engines if found else ():
        _check_target(engine.target, document)
        (reading,) = believed(Reading(containers=(engine.reading,))).containers or ()
        assert reading.restarts is None or 0 <= reading.restarts <= ceilings.COUNT
        assert reading.memory_limit_bytes is None or 0 <= reading.memory_limit_bytes <= ceilings.BYTES
        assert reading.cpu_limit_cores is None or 0 <= reading.cpu_limit_cores <= ceilings.LEVEL


def _check_target(target: Any, document: Mapping[str, Any]) -> None:
    """A request can be written for it, to the pod's own address alone, that no text of the pod has taken apart."""
    if target is None:
        return
    if target.host:
        assert ipaddress.ip_address(target.host) == ipaddress.ip_address(document["status"]["podIP"])
    assert 0 < target.port < 65536 and target.scheme in ("http", "https")
    request = fetch._request(target)
    head = h11.Connection(h11.SERVER)
    head.receive_data(request)
    event = head.next_event()
    assert isinstance(event, h11.Request) and event.target == target.path.encode() and len(event.headers) == 4


def make_pod_list(rng: Random) -> dict[str, Any]:
    """A list of the API, cut anywhere, and the sizes of the parts in which it comes."""
    items = [
        with_another_field(rng, {"metadata": {"name": "p", "x": [1, {"y": None}]}}, POD_WORDS)
        for _ in range(rng.randrange(4))
    ]
    document: Any = {"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": items}
    if rng.random() < 0.3:
        document = with_another_field(rng, document, POD_WORDS)
    body = json.dumps(document, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    body = (
        mutated(rng, body, ('{"', '":', "[", "]", "}", ",", "1e5", "null", '"items":')) if rng.random() < 0.4 else body
    )
    return {"body": body, "part": rng.choice((1, 2, 3, 7, 50, 10**6))}


def check_pod_list(case: Mapping[str, Any]) -> None:
    """The objects are those of the json module, whatever the parts."""
    body, part = case["body"].encode(errors="replace"), case["part"]
    chunks = (body[start : start + part] for start in range(0, len(body), part))
    reader, items = read_list(chunks, 10**6), []
    try:
        while True:
            items.append(next(reader))
    except StopIteration as end:
        ours: Any = (items, end.value)
    except ListError:
        ours = None
    try:
        whole = json.loads(body)
        theirs: Any = (whole["items"], whole["metadata"])
        sound = (
            isinstance(theirs[1], dict)
            and all(isinstance(item, dict) for item in theirs[0])
            and isinstance(theirs[0], list)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if ours is None:
        assert not sound or case["body"].count('"items"') != 1, "a sound list was refused"
    elif sound and case["body"].count('"items"') == 1 and case["body"].count('"metadata"') == 1 + len(items):
        assert repr(ours) == repr(theirs)


def make_resources(rng: Random) -> bytes:
    """An answer of the kubelet, whole, cut, doubled or with other bytes in it."""
    names = ("a", "", "é", "nvidia.com/gpu", "GPU-1", "ns", "x" * 200)
    answer = api_pb2.ListPodResourcesResponse()
    for _ in range(rng.randrange(3)):
        one = answer.pod_resources.add(name=rng.choice(names), namespace=rng.choice(names))
        for _ in range(rng.randrange(3)):
            box = one.containers.add(
                name=rng.choice(names), cpu_ids=[rng.randrange(-5, 300) for _ in range(rng.randrange(3))]
            )
            for _ in range(rng.randrange(3)):
                given = box.devices.add(resource_name=rng.choice(names), device_ids=some(rng, names, 3))
                given.topology.nodes.add(ID=rng.randrange(-3, 2**40))
            for _ in range(rng.randrange(2)):
                claim = box.dynamic_resources.add(claim_name=rng.choice(names), claim_namespace="n")
                claim.claim_resources.add(driver_name=rng.choice(names), pool_name="p", device_name=rng.choice(names))
            box.memory.add(memory_type="memory", size=rng.randrange(2**63))
    data = bytearray(answer.SerializeToString())
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            del data[at : at + rng.choice((1, 3, 30))]
        elif kind == 1:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 5)))
        elif kind == 2 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 3:
            data[at:at] = data[: rng.randrange(60)]
        else:
            data[at:at] = rng.choice(
                (b"\x80" * 10, b"\xff" * 9 + b"\x01", b"\x0b\x0c", b"\x0a\xff\xff\xff\xff\x0f", b"\x0d", b"\x09")
            )
    return bytes(data)


def by_protobuf(answer: Any) -> list[ContainerResources]:
    """The same, read by the library."""
    return [
        ContainerResources(
            pod.namespace,
            pod.name,
            container.name,
            tuple((d.resource_name, name) for d in container.devices for name in d.device_ids),
            tuple(
                (c.driver_name, c.device_name)
                for resource in container.dynamic_resources
                for c in resource.claim_resources
            ),
        )
        for pod in answer.pod_resources
        for container in pod.containers
    ]


def check_resources(data: bytes) -> None:
    try:
        expected = by_protobuf(api_pb2.ListPodResourcesResponse.FromString(data))
    except DecodeError:
        expected = None
    try:
        found = list(read_containers(data))
    except SourceError as error:
        assert expected is None or error.detail == "a group", "an answer was refused that protobuf reads"
        return
    assert expected is None or found == expected


# --- logs, recordings, settings, reports


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


SUBJECTS: Final = {
    one.name: one
    for one in (
        Subject("metrics_page", make_page, check_page),
        Subject("metrics_line", make_line, check_line),
        Subject("plugin_page", make_plugin_page, check_plugin_page),
        Subject("command_line", make_command, check_command),
        Subject("shell_script", make_script, check_script),
        Subject("pod", make_pod, check_pod),
        Subject("pod_list", make_pod_list, check_pod_list),
        Subject("pod_resources", make_resources, check_resources),
        Subject("log_line", make_log_line, check_log_line),
        Subject("recording", make_recorded, check_recorded),
        Subject("settings", make_settings, check_settings),
        Subject("http_request", make_head, check_head),
    )
}
"""All parsers by name."""
