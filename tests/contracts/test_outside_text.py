"""Whatever reads text from outside costs no more than the text is long: no expression that tries again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvpressure import redaction
from kvpressure.capacity import models
from kvpressure.engines.registry import public_texts
from kvpressure.engines.sglang import arguments as sglang_arguments
from kvpressure.engines.sglang import log_lines as sglang_log_lines
from kvpressure.engines.sglang.dialect import SGLANG
from kvpressure.engines.vllm import limits
from kvpressure.engines.vllm import log_lines as logevents
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.errors import InputError
from kvpressure.model.arguments import EngineArgs, human_int
from kvpressure.parsed import quantity
from kvpressure.recording.fields import MalformedTick
from kvpressure.recording.format import tick_from_json
from kvpressure.recording.reader import Reader, ReadProblem
from kvpressure.settings import yaml_lines
from kvpressure.sources.host.procfs import pod_of_cgroup
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape import layout as series
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import manifests
from tests.engines.vllm.crafted import UNITS, repeated, superlinear, within
from tests.sources.kubernetes.objects import container, pod

pytestmark = pytest.mark.slow

KEYWORDS = tuple(row.keyword for row in logevents.TABLE)


def image(text: str) -> object:
    return read_pod(pod(containers=[container(image=text)]), Policy())


def path(text: str) -> object:
    return read_pod(pod(annotations={"prometheus.io/path": text, "prometheus.io/port": text}), Policy())


def status(text: str) -> object:
    document = pod(last={"reason": text, "finishedAt": text}, ip=text)
    document["status"]["containerStatuses"][0]["containerID"] = text
    return read_pod(document, Policy())


def host(text: str) -> object:
    try:
        return Target(text, path=text)
    except InputError:
        return None


def sample(text: str) -> object:
    try:
        head, number, time = series.sample_of(text)
        return series.name_of(head), series.labels_of(head), number, time
    except series.BadLine:
        return None


def inside(text: str) -> object:
    return read_plugin_metrics(f"\n{text}}} 1".encode(), "a", "b", 0.0)


def fields(text: str) -> object:
    args = EngineArgs({"kv_transfer_config": text})
    return limits.kv_role(args), limits.waits_for_blocks(args)


READERS: dict[
    str, tuple[Callable[[str], object], tuple[str, ...], tuple[str, ...]]
] = {  # what they read begins with, and consists of
    "redaction.text": (
        redaction.text,
        ("", "a=", "'prompt': ", "--api-key ", "-----BEGIN PRIVATE KEY-----"),
        (
            *(*UNITS, "eyJaaaaaaaa-", "eyJaaaaaaaa.", "-eyJ", "bearer a", "x-api-key", "a.b-c "),
            *("\\\\'", '["a",', "https://a:b", "sk-a "),
        ),
    ),
    "redaction.args": (lambda text: public_texts(["sh", "-c", text]), ("", "curl -u ", "'\""), UNITS),
    "logevents": (
        lambda text: logevents.recognise(logevents.strip(text)),
        ("", "{", "(a", "INFO 01-01 00:00:00 [a:1] ", "Running: ", *KEYWORDS),
        (
            *(
                "1",
                "1.",
                "1 GiB ",
                "A",
                "A ",
                ", A",
                ", A KV cache",
                "1 is",
                "\x1b[",
                "\x1b[0",
                "(1/",
                "Running: 1",
                "# a",
            ),
            *("# aaaa blocks", "=", "model='", "kv_cache_dtype=a", "(v", "max seq len (1), (", "a", " ", "-", "'", "["),
            *("{", "a=["),
        ),
    ),
    "from_log": (
        from_log,
        ("non-default args: {", "args: Namespace("),
        ("'a': ", "a=", "[", "(", "'", "\\", ",", "a=[1,", "a='", "'a': ['b',"),
    ),
    "image": (
        image,
        ("", "vllm", "vllm:"),
        ("vllm", ":", ":/", "/", "@", "a", "1.", "vllm:", "vllm-", "1.1.1rc1", "."),
    ),
    "path": (path, ("", "/"), ("/", "a", "..", " ", "1", "/.")),
    "status": (status, ("", "a://"), ("a", "0", ".", "://", ":", "-", "1-")),
    "quantity": (quantity, ("", "1"), ("1", "1.", "e", "m", "1e")),
    "human_int": (human_int, ("", "1"), ("1", "1.", "k", " ")),
    "cgroup": (
        pod_of_cgroup,
        ("", "pod" + "0" * 32 + "/"),
        ("pod", "0", "a", "pod" + "0" * 32 + "/", "pod" + "0" * 8 + "-", "\n", "pod0"),
    ),
    "host": (host, ("", "/"), ("a", ".", "-", ":", "0", "/", "_", "a-")),
    "sample": (
        sample,
        ("", "a{", '{"', "a 1 "),
        ("a", 'a="",', '"', "\\", "\\\\", " ", "\t", "{", "1", "# {", "a=", 'a="', "1 ", "-1"),
    ),
    "inside": (
        inside,
        ("", "kvpressure:a{", "kvpressure:a "),
        ("a", 'a="', 'a="",', "1", "kvpressure:", "kvpressure:a{", "\n", "\r", "kvpressure:a 1\n", "=", " "),
    ),
    "sglang.words": (
        lambda text: sglang_arguments.read(["bash", "-c", text]),
        ("", "sglang serve --model-path m --", "python -m sglang.launch_server --port "),
        (*UNITS, "sglang ", "sglang \t", "sglang.launch_server ", "--lora-paths a ", "--enable-", "--a_", "-1"),
    ),
    "sglang.option": (
        lambda text: sglang_arguments.PUBLIC.command(
            sglang_arguments.read(["sglang", "serve", f"--{text}", text]).args
        ),
        ("", "enable-", "log-level"),
        ("a", "a_", "a-", "_", "-", "1", "a1_", "=", "--", " "),
    ),
    "sglang.log": (
        lambda text: (
            sglang_log_lines.recognise(sglang_log_lines.strip(text)),
            sglang_log_lines.public_line(text),
        ),
        ("", "[2026-01-01 00:00:00 TP0] ", "[2026-01-01 00:00:00", *(row.keyword for row in sglang_log_lines.TABLE)),
        ("1", "1.", " TP0", " DP1 TP0", "#", "#running-req: 1, ", "token usage: 0.1, ", ", ", "=", "\x1b[", "(", " "),
    ),
    "sglang.image": (
        lambda text: (
            sglang_arguments.of_image(text),
            SGLANG.image_version("sglang", text),
            SGLANG.image_version(text, "v0.5.1"),
        ),
        ("", "lmsysorg/sglang:", "v0.5.", "v"),
        ("1", "1.", "v1.", "rc", "-", "sglang", "/", ":", ".post1", "a"),
    ),
    "model": (
        lambda text: models.known(f"{text}~"),
        ("", "llama"),
        ("-hf", "-v1", "-v1.1", "-w1a1", "-1111", "1", "-", "/", "-int4"),
    ),
    "fields": (
        fields,
        ("", "kv_role"),
        ("kv_role", "kv_role ", " ", "kv_role:", "kv_connector=", "'", "a", "kv_role: kv_"),
    ),
}


@pytest.mark.writer(
    "anyone who may create a pod, even one that never runs",
    "a command line or script of any length and shape",
    "nothing: it is cut, then read once in linear time",
    "character limits before parsing; no backtracking expression",
)
@pytest.mark.parametrize("name", READERS)
def test_text_from_outside_costs_what_it_is_long(name: str) -> None:
    reader, openings, units = READERS[name]
    for opening in openings:
        for unit in units:
            assert within(0.05, partial(reader, repeated(opening, unit, 1000))), (opening, unit)
            grown = superlinear(reader, partial(repeated, opening, unit), 2000)
            assert grown is None, (opening, unit, grown)


def page(text: str) -> object:
    """A page as it is read at first, and again when every line has moved."""
    scanner = Scanner()
    first = scanner.scan(text)
    return first, scanner.scan("other_total 1\n" + text[: len(text) // 2] + "vllm:a 1\n" + text[len(text) // 2 :])


def file(read: Callable[[Path], object]) -> Callable[[str], object]:
    """What is read of a file with the text."""

    def reader(text: str) -> object:
        path = Path(FILES.name) / "file.yaml"
        path.write_text(text)
        try:
            return read(path)
        except InputError as error:
            return str(error)

    return reader


def merged(count: int) -> str:
    return "m0: &m0 {a: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, count))


def aliased(count: int) -> str:
    refers = (", ".join([f"{{x: *l{n - 1}}}"] * 10) for n in range(1, count))
    return "l0: &l0 {a: 1}\n" + "".join(f"l{n}: &l{n} [{line}]\n" for n, line in enumerate(refers, 1))


def tick(text: str) -> object:
    try:
        return tick_from_json(f'{{"t": 1, {text}}}'.encode(), parse_scrape)
    except MalformedTick as error:
        return str(error)


def recording(text: str) -> object:
    path = Path(FILES.name) / "recording.jsonl"
    path.write_text('{"format": "kvpressure-recording", "version": 1, "interval_seconds": 1}\n' + text)
    problems: list[ReadProblem] = []
    with Reader(path, on_problem=problems.append) as reader:
        return list(reader), problems


def entries(kind: str, entry: str) -> Callable[[int], str]:
    return lambda count: f'"{kind}": [' + ", ".join(entry.replace("#", str(number)) for number in range(count)) + "]"


def lines(line: str) -> Callable[[int], str]:
    return lambda count: "".join(f"{line}\n".replace("#", str(number)) for number in range(count))


FILES = TemporaryDirectory()
CONTAINER = '"namespace": "n", "pod": "p#", "container": "c"'
DOCUMENTS: dict[str, tuple[Callable[[str], object], int, tuple[Callable[[int], str], ...]]] = {
    # what reads them, how many parts the smallest has, and how they are made of so many parts
    "pages": (
        page,
        500,
        (
            lines("vllm:num_requests_running 1"),
            lines('vllm:num_requests_running{engine="#",model_name="m"} 1'),
            lines('vllm:num_requests_running{engine="0",model_name="m#"} 1'),
            lines('vllm:request_success_total{finished_reason="#"} 1'),
            lines('vllm:e2e_request_latency_seconds_bucket{le="#"} 1'),
            lines('vllm:e2e_request_latency_seconds_bucket{engine="#",le="1"} 1'),
            lines('http_requests_total{path="/#"} 1'),
            lines('sglang:num_running_reqs{model_name="m#",tp_rank="#"} 1'),
            lines('sglang:e2e_request_latency_seconds_bucket{le="#"} 1'),
            lines('kvpressure:engine_steps_total{engine="0",count="batch",size="#"} 1'),
            lines('kvpressure:allocator{rank="#",figure="allocated_bytes"} 1'),
            lines("# TYPE a# histogram"),
            lines("# HELP vllm:a# b\n# TYPE vllm:a# gauge\nvllm:a# 1"),
            lines('vllm:cache_config_info{a#="1"} 1'),
            lines('vllm:num_requests_running{a="\\'),
            lambda count: "vllm:num_requests_running{" + ", ".join(f'a{n}="{n}"' for n in range(count)) + "} 1\n",
            lambda count: "vllm:num_requests_running" + " \t" * count + "\n",
        ),
    ),
    "YAML": (
        file(yaml_lines.read),
        100,
        (
            lines("a#: 1"),
            lines("a: 1"),
            lines("- a#"),
            lines("# a"),
            lines("a#: &a# [1]"),
            lines("a#: &a [1]\nb#: *a"),
            lines("a#:\n  b: {c: [1, 2]}"),
            lines("? a#\n: b"),
            lines("a#: |\n  text\n  text"),
            lines("--- a"),
            lambda count: "a: [" + ", ".join(f"{{b: {n}}}" for n in range(count)) + "]",
            lambda count: "a: " + "[" * count,
            lambda count: "a: " + "{a: " * count,
            lambda count: "a: " + "- " * count,
            lambda count: "a: '" + "b ''\n  " * count + "'",
            lambda count: 'a: "' + "\\x41\\n \n  " * count + '"',
            lambda count: "a: >\n" + "  b\n\n" * count,
            lambda count: "a: " + "1_" * count,
            lambda count: "a: " + "1:" * count,
            lambda count: "a: " + "!" * count,
            lambda count: "a: " + "%41" * count,
            lambda count: "a" * count + ": b",
            lambda count: "a: &" + "b" * count + " c",
            lambda count: "a: 1" + "2" * count,
            lambda count: "".join(" " * n + f"a{n}:\n" for n in range(min(count, 400))),
        ),
    ),
    "manifests": (
        file(lambda path: list(manifests.pod_documents([str(path)]))),
        40,
        (
            lines("a#: {b: [1, 2]}"),
            lines("---\nkind: Pod\nspec: {containers: [{name: c, command: [vllm, serve, m#]}]}"),
            lines("a#: &a [1]\nb#: *a"),
            lambda count: "a: " + "[" * count,
            lambda count: "a: " + "{a: " * count,
            merged,
            aliased,
        ),
    ),
    "ticks of recordings": (
        tick,
        300,
        (
            entries("gpus", '{"uuid": "G#", "xid_errors": {"79": 1}, "processes": [{"pid": 1, "used_bytes": 1}]}'),
            entries("gpus", '{"uuid": "G"}'),
            entries("containers", f'{{{CONTAINER}, "restarts": 1}}'),
            entries("owners", f'{{"uuid": "G#", {CONTAINER}}}'),
            entries("logs", f'{{{CONTAINER}, "line": "ERROR torch.OutOfMemoryError: CUDA out of memory."}}'),
            entries("logs", f'{{{CONTAINER}, "line": "non-default args: [[[["}}'),
            entries("engines", '{"target": "t#", "args": ["vllm", "serve", "m"], "exposition": "vllm:a 1"}'),
            entries("allocator", '{"namespace": "n", "pod": "p", "rank": #}'),
            entries("targets", '"t#"'),
            entries("pods", '{"namespace": "n", "pod": "p#", "uid": "u"}'),
            entries("later", "[[1]]"),
            lambda count: '"health": {' + ", ".join(f'"s{n}": {{"up": true}}' for n in range(count)) + "}",
            lambda count: '"process_pods": {' + ", ".join(f'"{n}": ["n", "p"]' for n in range(count)) + "}",
            lambda count: '"engines": [{"target": "t", "exposition": "' + "vllm:a 1\\n" * count + '"}]',
            lambda count: '"engines": [{"target": "t", "args": [' + ", ".join(['"$(a"'] * count) + "]}]",
            lambda count: '"a": ' + "[" * count,
            lambda count: '"a": "' + "\\u0041" * count + '"',
            lambda count: '"a": 1' + "2" * min(count, 4000),
        ),
    ),
    "recordings": (
        recording,
        300,
        (
            lines('{"t": #}'),
            lines('{"t": 1}'),
            lines("{"),
            lines('{"t": #, "gpus": [{"uuid": 1}]}'),
            lines(""),
            lines('{"t": #, "engines": [{"target": "t", "exposition": "vllm:num_requests_running # 1"}]}'),
        ),
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_from_outside_costs_what_it_is_long(name: str) -> None:
    reader, size, makers = DOCUMENTS[name]
    for number, make in enumerate(makers):
        assert within(3.0, partial(reader, make(4 * size))), number
        grown = superlinear(reader, make, size)
        assert grown is None, (number, grown)
