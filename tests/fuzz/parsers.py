"""Every parser of what comes from outside: how its cases are made, and what has to hold for each of them.

Those of logs, recordings, settings and requests are in ``ours``.
"""

# ruff: noqa: PT017, PT018 - a property is one assertion

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, Final

import h11
from google.protobuf.message import DecodeError
from prometheus_client.parser import text_string_to_metric_families

import tests.helpers.vllm_pages as pages
from kvpressure.engines import registry, shell
from kvpressure.engines.base import option
from kvpressure.engines.vllm import command_line, public
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.reasons import REASONS
from kvpressure.printable import visible
from kvpressure.runtime.plausibility import believed
from kvpressure.sources.base import Reading, SourceError
from kvpressure.sources.kubernetes.json_list import ListError, read_list
from kvpressure.sources.kubernetes.podresources_message import ContainerResources, read_containers
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape import fetch, layout
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from tests.engines.vllm.crafted import UNITS
from tests.fuzz import ours
from tests.fuzz.draws import SECRET, Subject, mutated, number, some, text, with_another_field
from tests.sources.kubernetes.objects import container, pod
from tests.sources.kubernetes.podresources_api import api_pb2

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
        *ours.SUBJECTS,
    )
}
"""All parsers by name."""
