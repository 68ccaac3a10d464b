"""Whatever reads text from outside costs no more than the text is long: no expression that tries again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvpressure import redaction
from kvpressure.capacity import models
from kvpressure.engines.registry import public_texts
from kvpressure.engines.vllm import limits
from kvpressure.engines.vllm import log_lines as logevents
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.model.arguments import EngineArgs, human_int
from kvpressure.sources.host.procfs import pod_of_cgroup
from kvpressure.sources.kubernetes.podspec import Policy, quantity, read_pod
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape import lines as series
from kvpressure.sources.scrape.targets import Target, TargetError
from tests.engines.vllm.crafted import UNITS, repeated, superlinear, within
from tests.sources.kubernetes.objects import container, pod

pytestmark = pytest.mark.slow

KEYWORDS = tuple(keyword for keyword, _, _ in logevents._TABLE)


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
    except TargetError:
        return None


def sample(text: str) -> object:
    try:
        name, end = series.name_of(text)
        return series.number_from(text, series.labels_from(text, end)[1]) if name else None
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
            *UNITS,
            "eyJaaaaaaaa-",
            "eyJaaaaaaaa.",
            "-eyJ",
            "bearer a",
            "x-api-key",
            "a.b-c ",
            "\\\\'",
            '["a",',
            "https://a:b",
            "sk-a ",
        ),
    ),
    "redaction.args": (lambda text: public_texts(["sh", "-c", text]), ("", "curl -u ", "'\""), UNITS),
    "logevents": (
        lambda text: logevents.match(logevents.strip(text)),
        ("", "{", "(a", "INFO 01-01 00:00:00 [a:1] ", "Running: ", *KEYWORDS),
        (
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
            "# aaaa blocks",
            "=",
            "model='",
            "kv_cache_dtype=a",
            "(v",
            "max seq len (1), (",
            "a",
            " ",
            "-",
            "'",
            "[",
            "{",
            "a=[",
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
