"""What leaves the node of command lines, variables and log lines: known to be no secret, in whatever spelling a secret
stands.

The spellings are generated: where a secret can stand (option, variable, script, YAML, JSON, Python's print, log line),
under which name, and in which quotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from kvpressure.engines.vllm import public
from kvpressure.engines.vllm.command_line import read
from kvpressure.engines.vllm.log_lines import recognise, strip
from kvpressure.redaction import REDACTED

LOGS = Path(__file__).parents[2] / "fixtures" / "vllm-logs"
NAMES = [
    *("api-key", "api_key", "apiKey", "api-keys", "api_key_2", "API_KEY", "hf-token", "HF_TOKEN", "token"),
    *("tokens", "password"),
    *["passwd", "pwd", "pass", "DB_PASS", "auth", "x-auth-token", "cookie", "jwt", "bearer", "secret", "client-secret"],
    *["aws_secret_access_key", "credential", "credentials", "private_key", "sig"],
]
OTHERS = ["otel-exporter-headers", "middleware", "my-option", "webhook", "config-blob", "extra", "X", "dsn"]
QUOTES = ["{}", '"{}"', "'{}'", 'abc"{}"', "a,{}", "a;{}", "a&{}", "a){}", "$(echo {})", "`echo {}`", "${{K:-{}}}"]
COMMANDS = [  # {o} an option, {n} a name, {v} the value
    ["vllm", "serve", "m", "--{n}", "{v}"],
    ["vllm", "serve", "m", "--{n}={v}"],
    ["vllm", "serve", "m", "--{n}", "a", "{v}", "--max-num-seqs", "4"],
    ["vllm", "serve", "m", "{v}", "--max-num-seqs", "4"],
    ["vllm", "serve", "m", "--max-num-seqs", "4", "-{n}", "{v}"],
    ["--model", "m", "--{n}", "{v}"],
    ["python3", "-m", "vllm.entrypoints.openai.api_server", "--{n}", "{v}"],
    ["sh", "-c", "vllm serve m --{n} {v} --max-num-seqs 4"],
    ["sh", "-c", "{n}={v}; vllm serve m --api-key ${n}"],
    ["sh", "-c", "export {n}={v} && exec vllm serve m --{n} ${n}"],
    ["sh", "-c", "{n}={v} vllm serve m"],
    ["sh", "-c", "echo {v} | login; vllm serve m"],
    ["sh", "-c", "curl -u bob:{v} http://h -H '{n}: {v}'; vllm serve m"],
    ["sh", "-c", "bash -c 'vllm serve m --{n} {v}'"],
    ["sh", "-c", "vllm serve m $(cat <<E\n--{n} {v}\nE\n)"],
    ["python3", "-c", "import os; os.environ['{n}']='{v}'; import vllm.entrypoints.openai.api_server"],
    ["sh", "-c", "printf '{n}:\\n  - {v}\\n' > c.yaml; vllm serve m --config c.yaml"],
    ["sh", "-c", "vllm serve m --served-model-name > --{n} {v}"],
    ["vllm", "serve", "m", "--{n}.key", "{v}"],
    ["vllm", "serve", "https://bob:{v}@h/m"],
    ["vllm", "serve", "m", "--served-model-name", "https://bob:{v}@h/m"],
    ["vllm", "serve", "m", "--additional-config", '{{"{n}": "{v}"}}'],
    ["vllm", "serve", "m", "--hf-overrides", '{{"credentials": {{"{n}": {{"value": "{v}"}}}}, "max_model_len": 5}}'],
    ["vllm", "serve", "m", "--kv-transfer-config", '{{"kv_role": "kv_both", "{n}": ["a", "{v}"]}}'],
    ["vllm", "serve", "m", "--compilation-config", "{{'{n}': '{v}'}}"],
    ["vllm", "serve", "m", "--lora-modules", "{n}={v}"],
]
LINES = [
    "non-default args: {{'{n}': '{v}', 'max_num_seqs': 64}}",
    "non-default args: {{'{n}': ['{v}', 'b'], 'max_num_seqs': 64}}",
    "non-default args: {{'{n}': ('{v}',), 'max_num_seqs': 64}}",
    "non-default args: {{'additional_config': {{'{n}': '{v}'}}, 'max_num_seqs': 64}}",
    "args: Namespace(host=None, {n}='{v}', max_num_seqs=4)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB {n}={v}",
    "CUDA out of memory {n}: {v}",
    "CUDA out of memory while {v} was used, {n} {v}",
    "Authorization: Bearer {v} CUDA out of memory",
    "Initializing a V1 LLM engine (v0.9.1) with config: model='m', {n}='{v}', max_seq_len=5, tensor_parallel_size=1",
    "Available KV cache memory: 3.20 GiB for {n}={v}",
    "https://bob:{v}@h GPU KV cache size: 1,024 tokens",
    '{{"message": "GPU KV cache size: 1,024 tokens", "{n}": "{v}"}}',
    "something else {n}={v}",
]


def filled(parts: list[str], name: str, value: str) -> list[str]:
    return [part.format(n=name, v=value) for part in parts]


def spellings(secret: str) -> Iterator[list[str]]:
    """Every command with every name, and every way to write the value under one of them."""
    for command, name in product(COMMANDS, NAMES + OTHERS):
        yield filled(command, name, secret)
    for command, quoted in product(COMMANDS, QUOTES):
        yield filled(command, "api-key", quoted.format(secret))


@pytest.mark.attack("95 spellings of secrets in command lines, variables, JSON, YAML and log tuples", "none leaves")
def test_no_spelling_of_a_secret_leaves_in_a_command_line() -> None:
    secret = "Zq7hunterXw2"
    shown = [(argv, public.PUBLIC.command(read(argv).args)) for argv in spellings(secret)]
    assert len(shown) > 1000
    assert [pair for pair in shown if any(secret in word for word in pair[1])] == []


def test_a_word_that_no_option_is_named_like_is_no_name() -> None:
    assert "Zq7hunterXw2" not in repr(public.PUBLIC.command(read(["vllm", "serve", "m", "--Zq7hunterXw2", "1"]).args))


def test_a_secret_number_is_a_secret() -> None:
    for name in {*NAMES} - {"tokens"}:  # --max-num-batched-tokens is a limit
        shown = public.PUBLIC.command(read(["vllm", "serve", "m", f"--{name}", "123456"]).args)
        assert "123456" not in " ".join(shown), name


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-c", 'vllm serve m --api-key $K "${ARGS[@]}"'],
        ["vllm", "serve", "m", "$(EXTRA)"],
        ["run.sh", "--x"],
    ],
)
def test_what_was_not_understood_is_not_taken_for_complete(argv: list[str]) -> None:
    assert read(public.PUBLIC.command(read(argv).args)).args.is_explicit("max_num_seqs") is None


def test_json_keeps_its_numbers_and_known_modes() -> None:
    given_ = (
        '{"kv_role": "kv_both", "kv_connector": "LMCacheConnectorV1", "kv_rank": 1, "kv_connector_extra_config":'
        ' {"url": "u:p"}}'
    )
    [shown] = [
        word
        for word in public.PUBLIC.command(read(["vllm", "serve", "--kv-transfer-config", given_]).args)
        if "config" in word
    ]
    assert json.loads(shown.partition("=")[2]) == {
        "kv_role": "kv_both",
        "kv_connector": "LMCacheConnectorV1",
        "kv_rank": 1,
        "kv_connector_extra_config": {"url": REDACTED},
    }


def test_events_of_real_servers_are_read_as_before() -> None:
    files = (file for file in LOGS.rglob("*") if file.is_file())
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    events = {line: event for line in lines if (event := recognise(strip(line))) is not None}
    assert len(events) > 30
    for line, before in events.items():
        kept = public.public_line(line)
        after = recognise(kept)
        assert (after.event, after.facts, after.allocator) == (before.event, before.facts, before.allocator)
        assert public.public_line(kept) == kept


@pytest.mark.parametrize("line", LINES)
def test_no_secret_leaves_in_a_log_line(line: str) -> None:
    for name, secret in product([*NAMES, *OTHERS], ("Zq7hunterXw2", "correcthorsebattery")):
        assert secret not in (public.public_line(line.format(n=name, v=secret)) or ""), name
