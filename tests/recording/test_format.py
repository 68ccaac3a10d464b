"""The recording format: what is written is read back, and what is wrong is said in one line."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.engines.registry import log_line, named_by, public_texts
from kvpressure.engines.vllm.log_lines import recognise
from kvpressure.errors import InputError
from kvpressure.model.readings import Scrape, Snapshot
from kvpressure.recording.fields import MalformedTick
from kvpressure.recording.format import Header, header_from_json, tick_from_json, tick_to_json
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.recording.strategies import full_snapshot


def build(text: str | None, **identity: object) -> Scrape:
    """A page with its text kept."""
    return parse_scrape(text, keep_text=True, **identity)


def read(body: object) -> Snapshot:
    return tick_from_json(json.dumps(body).encode(), build)


@pytest.mark.parametrize("error", [None, "refused"])
def test_every_field_survives_the_way_through_a_line(error: str | None) -> None:
    snapshot = full_snapshot(error)
    line = tick_to_json(snapshot)
    assert "\n" not in line
    assert tick_from_json(line.encode(), build) == snapshot


def test_only_the_time_is_required_and_what_is_missing_or_null_is_unknown_not_zero() -> None:
    assert read({"t": 5}) == Snapshot(time=5.0)
    assert read({"t": 5, "gpus": None, "engines": None, "health": None, "news": [1]}) == Snapshot(time=5.0)
    gpu = read({"t": 1, "gpus": [{"uuid": "a", "utilization_ratio": None}]}).gpus[0]
    assert gpu.utilization_ratio is None
    assert gpu.memory_used_bytes is None
    assert (gpu.index, gpu.vendor) == (0, "")
    gpus = read({"t": 1, "gpus": [{"uuid": "a"}, {"uuid": "b", "index": 7}, {"uuid": "c"}]}).gpus
    assert [gpu.index for gpu in gpus] == [0, 7, 2]


def test_a_termination_time_may_be_written_as_kubernetes_does() -> None:
    base = {"namespace": "n", "pod": "p", "container": "c"}
    body = {"t": 1, "containers": [{**base, "last_termination": {"finished_at": "2023-11-14T22:13:20Z"}}]}
    ended = read(body).containers[0].last_termination
    assert ended.finished_at == 1700000000.0


def test_an_engine_without_page_and_without_error_was_listed_but_not_read() -> None:
    page = read({"t": 1, "engines": [{"target": "x", "exposition": None}]}).pages[0]
    assert page.error == "empty"
    assert page.engines == ()


def gpu(**more: object) -> dict[str, object]:
    return {"t": 1, "gpus": [{"uuid": "a", **more}]}


def box(**more: object) -> dict[str, object]:
    return {"t": 1, "containers": [{"namespace": "n", "pod": "p", "container": "c", **more}]}


def engine(**more: object) -> dict[str, object]:
    return {"t": 1, "engines": [{"target": "x", **more}]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "'t' is missing"),
        ({"t": True}, "t: expected Unix seconds, found True"),
        ({"t": 1e300}, "t: expected Unix seconds, found 1e+300"),
        ({"t": -1}, "t: expected Unix seconds, found -1"),
        ([1], "expected a JSON object, found [1]"),
        (engine(exposition=5), "engines[0].exposition: expected text, found 5"),
        (engine(args="--model"), "engines[0].args: expected a list, found '--model'"),
        ({"t": 1, "gpus": {}}, "gpus: expected a list, found {}"),
        ({"t": 1, "gpus": [{"index": 1}]}, "gpus[0]: 'uuid' is missing"),
        (gpu(utilization_ratio="high"), "gpus[0].utilization_ratio: expected a number from 0 to 1.5, found 'high'"),
        (gpu(memory_used_bytes=-1), "gpus[0].memory_used_bytes: expected a whole number from 0, found -1"),
        (gpu(xid_errors={"x": 1}), "gpus[0].xid_errors: expected whole numbers as keys"),
        (gpu(xid_errors={"9" * 5000: 1}), "expected whole numbers as keys, found '999"),
        (gpu(processes=[{"pid": 1}, {}]), "gpus[0].processes[1]: 'pid' is missing"),
        (box(last_termination={"finished_at": "?"}), "containers[0].last_termination.finished_at: expected seconds"),
        (gpu(power_watts=10**400), "gpus[0].power_watts: expected a number from 0 to"),
        (box(restarts=10**400), "containers[0].restarts: expected a whole number from 0, found 1e400"),
    ],
)
def test_a_malformed_tick_says_where_and_what_was_expected(body: object, says: str) -> None:
    with pytest.raises(MalformedTick) as caught:
        read(body)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.attack("restarts of `10**400` and any JSON in a recording", "the tick is skipped with its line number")
@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"t": ' + b"9" * 10_000 + b"}", b'{"t": NaN}', b'{"t": 1e999}'],
)
def test_a_line_that_is_no_tick_is_malformed_whatever_it_is(line: bytes) -> None:
    with pytest.raises(MalformedTick):
        tick_from_json(line, build)


def test_the_header_is_read_back() -> None:
    header = Header(interval_seconds=5.0, node="node-1", source="somewhere")
    assert header_from_json(header.to_json().encode(), "x") == header


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "f.jsonl: empty"),
        (b"# HELP x\n", "f.jsonl:1: not a recording"),
        (b'{"t": 1}', "f.jsonl:1: not a recording"),
        (b'{"format": "kvpressure-recording"}', "f.jsonl:1: version None is not supported; this release reads"),
        (b'{"format": "kvpressure-recording", "version": true}', "version True is not supported"),
        (b'{"format": "kvpressure-recording", "version": 1, "interval_seconds": "5"}', "header.interval_seconds:"),
    ],
)
def test_what_is_no_header_is_refused_in_one_line(line: bytes, says: str) -> None:
    with pytest.raises(InputError) as caught:
        header_from_json(line, "f.jsonl")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secrets_of_command_line_variables_and_log_are_not_recorded() -> None:
    args = ["--api-key", "s3cret", "--hf-token=s3cret", "--model", "m"]
    page = parse_scrape(
        None, target="x", time=1.0, args=args, env={"HF_TOKEN": "s3cret", "VLLM_USE_V1": "1"}, error="refused"
    )
    logged = log_line("n", "p", "c", "non-default args: {'api_key': ['s3cret'], 'max_num_seqs': 64}")
    line = tick_to_json(Snapshot(1.0, pages=(page,), logs=(logged,)))
    assert "s3cret" not in line
    again = read(json.loads(line))
    assert again.pages[0].env == {"VLLM_USE_V1": "1"}
    assert recognise(again.logs[0].line) == recognise("non-default args: {'api_key': '[redacted]', 'max_num_seqs': 64}")


def test_a_server_that_a_script_starts_is_the_one_that_the_script_is_told() -> None:
    words = ("./launch.sh", "sglang", "--model-path=m")
    assert named_by(words).title == "SGLang"
    assert public_texts(words)[2] == "sglang.launch_server"


@given(
    st.text(string.ascii_letters, min_size=10, max_size=40),
    st.sampled_from(
        [
            "INFO 11-21 logger.py: Received request cmpl-1: prompt: '{}', params: x",
            "{} out of memory",
            "User said {}",
            "CUDA out of memory while serving prompt='{}'",
            "{}",
            "ERROR: request failed: {{'messages': [{{'content': '{}'}}]}}",
        ]
    ),
)
def test_what_users_sent_is_never_recorded(sent: str, form: str) -> None:
    logged = log_line("n", "p", "c", form.format(sent))
    line = tick_to_json(Snapshot(1.0, logs=(logged,)))
    assert sent not in line
    assert len(read(json.loads(line)).logs) == 1, "that there was a line is kept: the log is being read"
