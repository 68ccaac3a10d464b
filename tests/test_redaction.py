"""Secrets and what users sent stay out of what is kept; everything that the pipeline reads stays in."""

from __future__ import annotations

import string
from pathlib import Path

from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvpressure import redaction
from kvpressure.engines.vllm.log_lines import recognise, strip
from kvpressure.redaction import REDACTED

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


def real_lines() -> list[str]:
    return [
        line
        for file in sorted(LOGS.rglob("*"))
        if file.is_file()
        for line in file.read_text(errors="replace").splitlines()
    ]


def test_lines_of_real_servers_without_secrets_stay_as_they_are():
    lines = [line for line in real_lines() if recognise(strip(line)) is not None]
    assert len(lines) > 30
    assert [line for line in lines if redaction.text(line) != line] == []


@given(st.sampled_from([line for line in real_lines() if recognise(strip(line)) is not None]), secrets)
def test_a_secret_in_an_event_hides_nothing_else(line, secret):
    kept = redaction.text(f"{line} api_key='{secret}'")
    assert secret not in kept
    assert kept.startswith(line)
