"""A secret in a pod, in every place and spelling, and everything that is said of that pod: none of it holds
the secret.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.cli import main
from kvpressure.engines.registry import log_line
from kvpressure.model.readings import Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.routes import Site
from kvpressure.publish.web.http import HttpRequest
from kvpressure.recording.format import Header, tick_to_json
from kvpressure.sources.kubernetes.pod import discovered
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.engines.vllm.test_public import COMMANDS, LINES, NAMES, OTHERS, QUOTES, filled
from tests.helpers.vllm_pages import text_of
from tests.sources.kubernetes import objects

pytestmark = pytest.mark.slow

SECRET = "Zq7hunterXw2"
PLACES = [  # beyond one command and one name: each command with some name, each name in some command, each way to quote
    *((command, (NAMES + OTHERS)[number % len(NAMES + OTHERS)], "{}") for number, command in enumerate(COMMANDS)),
    *((COMMANDS[(3 * number + 5) % len(COMMANDS)], name, "{}") for number, name in enumerate(NAMES + OTHERS)),
    *((COMMANDS[number % len(COMMANDS)], "hf-token", quote) for number, quote in enumerate(QUOTES)),
    (["vllm", "serve", "m", "--api-key", "{v}", "--middleware", "{v}"], "x", "{}"),
    (["vllm", "serve", "m", "--otlp-traces-endpoint", "https://{v}@collector:4317"], "x", "{}"),
    (["vllm", "serve", "m", "--allowed-origins", '["https://u:{v}@h"]'], "x", "{}"),
    (["vllm", "serve", "m", "--ssl-keyfile", "/{n}/{v}"], "pass", "{}"),
    (["vllm", "serve", "m", "--{n}\u200b", "{v}"], "api-key", "{}"),
    (["vllm", "serve", "m", "--API-KEY={v}"], "x", "{}"),
    (["vllm", "serve", "m", "--api-key\t{v}"], "x", "{}"),
    (["vllm", "serve", "m", "--limit-mm-per-prompt", '{{"image": 1, "{n}": "{v}"}}'], "token", "{}"),
    (["env", "{n}={v}", "vllm", "serve", "m"], "HF_TOKEN", "{}"),
    (["bash", "-lc", "HF_TOKEN='{v}' exec vllm serve m # {v}"], "x", "{}"),
]


def pod(argv: list[str], secret: str) -> dict[str, Any]:
    names = ("HF_TOKEN", "VLLM_API_KEY", "VLLM_OTHER", "K", "api_key")
    env = [{"name": name, "value": secret} for name in names]
    return objects.pod("p", "ns", containers=[objects.container(command=argv, env=env)])


def shown(pod_document: dict[str, Any], argv: list[str]) -> Iterator[tuple[str, str]]:
    """What is published of a pod: discovery, metrics, JSON, page, and a recording of it."""
    found = read_pod(pod_document, Policy(selected=True))
    assert found is not None
    yield "discovery", repr(discovered([found]))
    targets = [engine.target for engine in found.engines if engine.target is not None]
    page = text_of("d_kv_pressure") + f'\nvllm:num_requests_waiting{{engine="1",model_name="m"}} 1\n# {SECRET}\n'
    pages = tuple(
        parse_scrape(
            page.replace(SECRET, "x"),
            target=target.name,
            time=10.0,
            namespace="ns",
            pod="p",
            container="vllm",
            args=target.args,
            env=target.env,
        )
        for target in targets
    )
    raw = parse_scrape(None, target="t", time=10.0, pod="p", args=argv, env={"HF_TOKEN": SECRET, "VLLM_X": SECRET})
    logs = tuple(log_line("ns", "p", "vllm", line.format(n="api_key", v=SECRET)) for line in LINES)
    snapshot = Snapshot(10.0, pages=(*pages, raw), logs=logs, discovered=discovered([found]))
    pipeline, around = Pipeline(), ViewContext()
    state = pipeline.observe(snapshot)
    site = Site(lambda: state, why_unhealthy=lambda: None, why_not_ready=lambda: None, around=around)
    for path in ("/", "/metrics", "/api/v1/diagnosis"):
        answer = site.answer(HttpRequest("GET", path, {}, keep_alive=True))
        assert answer.status == 200
        assert b"num_requests" in answer.body or len(answer.body) > 200
        yield path, answer.body.decode()
    yield "recording", f"{Header(1.0).to_json()}\n{tick_to_json(snapshot)}\n"


@pytest.mark.parametrize(("command", "name", "quote"), PLACES, ids=range(len(PLACES)))
def test_a_secret_of_a_pod_is_in_nothing_that_is_said_of_it(
    command: list[str],
    name: str,
    quote: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    argv = filled(command, name, quote.format(SECRET))
    document = pod(argv, SECRET)
    for where, text in shown(document, argv):
        assert SECRET not in text, where
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(yaml.safe_dump(document | {"kind": "Pod"}))
    for arguments in (["audit", str(manifest), "--all"], ["audit", str(manifest), "--all", "--format", "json"]):
        main(arguments)
        printed = capsys.readouterr()
        assert printed.out + printed.err
        assert SECRET not in printed.out + printed.err, arguments
    assert SECRET not in caplog.text
