"""Secrets and what users sent stay out of what is kept; everything that the pipeline reads stays in."""

from __future__ import annotations

import string
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvpressure import redaction
from kvpressure.commandline import parse
from kvpressure.redaction import REDACTED
from kvpressure.signals.logevents import match, strip

LOGS = Path(__file__).parent / "fixtures" / "vllm-logs"

# Each with a place for the secret, as it stands in real logs and command lines.
CARRIERS = [
    "vllm serve m --api-key {} --max-num-seqs 4",
    "vllm serve m --api-key={} --max-num-seqs 4",
    '--hf-token "{}"',
    "non-default args: {{'api_key': ['{}', 'other'], 'model': 'm'}}",
    "args: Namespace(host=None, api_key='{}', model='m')",
    '{{"api_key": "{}", "port": 1}}',
    '{{"log": "{{\\"hf_token\\": \\"{}\\"}}"}}',
    "HF_TOKEN={} vllm serve",
    "AWS_SECRET_ACCESS_KEY: {}",
    "ssl_keyfile_password='{}'",
    "apiKey={}; ok",
    "accessToken: '{}'",
    "x-api-key: {}",
    "Authorization: Bearer {}",
    "authorization=Basic {}",
    "curl -H 'Authorization: Bearer {}'",
    "got header bearer a1.{}",
    "https://user:{}@host/path",
    "s3://{}@bucket/key",
    "GET /v1?token={}&n=1",
    "https://h/x?X-Amz-Signature={}&n=1",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY----- {}",
    "login failed for hf_{}",
    "key sk-{} refused",
    "token ghp_{} used",
    "eyJhbGciOiJI.{}.x",
]
SENT = [
    "Received request cmpl-1: prompt: '{}', params: SamplingParams(n=1)",
    "prompt='{}', out of memory",
    "{{'prompt': \"{}\"}}",
    "messages=[{{'role': 'user', 'content': '{}'}}]",
    "prompt_token_ids=[{}, 3]",
    '{{"content": "{}"}}',
]
secrets = st.text(string.ascii_letters + string.digits, min_size=16, max_size=60)
around = st.text(st.characters(blacklist_characters="'\"\\[{(-", blacklist_categories=["Cs"]), max_size=30)


@given(st.sampled_from(CARRIERS + SENT), secrets, around, around)
def test_no_secret_and_nothing_that_was_sent_is_kept(carrier, secret, before, after):
    assume(secret not in f"{before} {after}")
    kept = redaction.text(f"{before} {carrier.format(secret)} {after}")
    assert secret not in kept
    assert REDACTED in kept


@given(st.text() | st.sampled_from(CARRIERS + SENT))
@example("--api-key --api-key x")
def test_twice_is_once(text):
    assert redaction.text(redaction.text(text)) == redaction.text(text)


@given(
    st.lists(
        st.sampled_from(["--api-key", "--hf-token", "--ssl-keyfile-password", "--max-num-seqs", "--model", "-tp=2"])
    ),
    st.lists(secrets, min_size=8, max_size=8, unique=True),
)
def test_values_of_secret_options_are_hidden_and_all_others_are_read_as_before(options, values):
    secret = {"--api-key", "--hf-token", "--ssl-keyfile-password"}
    argv = ["vllm", "serve", "m"]
    for option, value in zip(options, values, strict=False):
        argv += [option] if "=" in option else [option, "64" if option == "--max-num-seqs" else value]
    shown = redaction.args(argv)
    assert len(shown) == len(argv)
    hidden = [value for option, value in pairwise(argv) if option in secret]
    assert not set(hidden) & set(shown)
    before, after = parse(argv), parse(shown)
    assert before.explicit == after.explicit
    assert (before.max_num_seqs, before.model, before.tensor_parallel_size) == (
        after.max_num_seqs,
        after.model,
        after.tensor_parallel_size,
    )


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "s3cret", "--port", "1"], ["--api-key", REDACTED, "--port", "1"]),
        (["--api-key=s3cret"], [f"--api-key={REDACTED}"]),
        (["--api-key=-s3cret"], [f"--api-key={REDACTED}"]),
        (["--hf-token", "--max-num-seqs", "4"], ["--hf-token", "--max-num-seqs", "4"]),  # alone it means the stored one
        (
            ["-c", "vllm serve m --api-key s3 --max-num-seqs 4"],
            ["-c", f"vllm serve m --api-key {REDACTED} --max-num-seqs 4"],
        ),
        (["--api-key", "k1", "k2", "--port", "1", "k3"], ["--api-key", REDACTED, REDACTED, "--port", "1", "k3"]),
        (["--api-key", "$(KEY)", "$(MORE)", "k2"], ["--api-key", REDACTED, "$(MORE)", REDACTED]),
        (["--api-key=k1", "k2"], [f"--api-key={REDACTED}", "k2"]),  # after = there is one value, as for argparse
        (
            ["-c", "vllm serve m --api-key k1 k2 --port 1"],
            ["-c", f"vllm serve m --api-key {REDACTED} {REDACTED} --port 1"],
        ),
        (
            ["-c", "vllm serve m --api-key 'k one' \"k2\"; ls x"],
            ["-c", f"vllm serve m --api-key {REDACTED} {REDACTED}; ls x"],
        ),
        (
            ["-c", "vllm serve m --api-key k1 \\\n  k2 \\\n  --port 1"],
            ["-c", f"vllm serve m --api-key {REDACTED} \\\n  {REDACTED} \\\n  --port 1"],
        ),
        (
            ["-c", "A='--api-key k1 k2 --port 1'; vllm serve m $A"],
            ["-c", f"A='--api-key {REDACTED} {REDACTED} --port 1'; vllm serve m $A"],
        ),
        (
            ["-c", 'bash -c "vllm serve m --api-key k1 k2"'],
            ["-c", f'bash -c "vllm serve m --api-key {REDACTED} {REDACTED}"'],
        ),
        (["-c", 'vllm serve m --api-key $K "${ARGS[@]}"'], ["-c", f'vllm serve m --api-key {REDACTED} "${{ARGS[@]}}"']),
        (["-c", "curl -u bob:pw http://h; x"], ["-c", f"curl -u {REDACTED} http://h; x"]),
        (["curl", "--user", "bob:pw", "-ubob:pw", "--user=bob:pw"], ["curl", "--user", REDACTED, REDACTED, REDACTED]),
        (["python3", "-u", "server.py", "-u", "http://h"], ["python3", "-u", "server.py", "-u", "http://h"]),
        (
            ["-c", "aws configure set aws_secret_access_key X && vllm serve m"],
            ["-c", f"aws configure set aws_secret_access_key {REDACTED} && vllm serve m"],
        ),
        (
            ["aws", "configure", "set", "aws_secret_access_key", "X", "Y"],
            ["aws", "configure", "set", "aws_secret_access_key", REDACTED, "Y"],
        ),
        (["-c", "with-secrets vllm serve my-token --port 1"], ["-c", "with-secrets vllm serve my-token --port 1"]),
        (
            ["--max-num-batched-tokens", "8192", "--tokenizer", "t"],
            ["--max-num-batched-tokens", "8192", "--tokenizer", "t"],
        ),
        (["--long-prefill-token-threshold", "2048"], ["--long-prefill-token-threshold", "2048"]),
    ],
)
def test_command_lines(argv, shown):
    assert redaction.args(argv) == shown


def real_lines() -> list[str]:
    return [
        line
        for file in sorted(LOGS.rglob("*"))
        if file.is_file()
        for line in file.read_text(errors="replace").splitlines()
    ]


def test_lines_of_real_servers_without_secrets_stay_as_they_are():
    lines = [line for line in real_lines() if match(strip(line)) is not None]
    assert len(lines) > 30
    assert [line for line in lines if redaction.text(line) != line] == []


@given(st.sampled_from([line for line in real_lines() if match(strip(line)) is not None]), secrets)
def test_a_secret_in_an_event_hides_nothing_else(line, secret):
    kept = redaction.text(f"{line} api_key='{secret}'")
    assert secret not in kept
    assert kept.startswith(line)


def test_what_is_hidden_does_not_make_a_script_look_complete():
    shown = redaction.args(["bash", "-c", 'vllm serve m --api-key $K "${ARGS[@]}"'])
    assert parse(shown).is_explicit("max_num_seqs") is None


@given(st.text(alphabet="-u: \n\t'\"\\;|&()$ab_key[]=") | st.sampled_from(CARRIERS))
def test_hiding_in_scripts_twice_is_once(script):
    once = redaction.args(["sh", "-c", script])
    assert redaction.args(once) == once


@pytest.mark.parametrize(
    "hostile",
    [
        "--api-key " + "k " * 30_000,
        "'" * 60_000,
        '"' * 60_001,
        "\\" * 60_001,
        "a_key " * 10_000,
        "\"'" * 30_000 + " ",
        ";" * 60_000,
        "-u a:" * 12_000,
        '" a' * 20_000,
        "$" * 60_000 + " ",
        "\\\n" * 30_000,
        "a" * 60_000 + " ",
        "'a \"b " * 8_000,
    ],
    ids=lambda text: text[:12],
)
def test_the_time_of_a_script_grows_with_its_length_only(hostile):
    start = time.process_time()
    redaction.args([hostile])
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "hostile",
    [
        "a" * 16384,
        "token" * 3276,
        "-" * 16384,
        "api_key='" + "\\" * 16384,
        "[" * 16384,
        "token=[" + "'a' " * 4096,
        "://" * 5461,
        "bearer " * 2340,
        "prompt:" * 2340,
        "-----BEGIN PRIVATE KEY-----" * 606,
        "eyJ" * 5461,
        "\"'" * 8192,
        "token='a" * 2048,
        "a=" * 8192,
        "a:[" * 5461,
        "'a':" * 4096,
        '\\"' * 8192,
    ],
    ids=lambda text: text[:12],
)
def test_the_time_grows_with_the_length_only(hostile):
    start = time.process_time()
    redaction.text(hostile)
    assert time.process_time() - start < 0.5
