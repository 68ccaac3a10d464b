"""No refusal prints a secret that stands in the refused value: each setting and option, in each way to give it."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from kvpressure.bundle.values import BundleValues
from kvpressure.cli import COMMANDS, main
from kvpressure.errors import shown
from kvpressure.settings.settings import options
from kvpressure.toolbox.live_pages import CLOCK
from tests.helpers.command import Capsys
from tests.helpers.failing import raising

pytestmark = pytest.mark.slow

SECRET = "hunter2SECRETx7"
VALUES = (
    f"http://u:{SECRET}@127.0.0.1:1/;bogus",
    f"http://u:{SECRET}@127.0.0.1:1/;bogus=1",
    f"http://u:a;{SECRET};b@127.0.0.1:1",
    f"http://u:a/{SECRET}@127.0.0.1:1",
    f"http://{SECRET}@127.0.0.1:x",
    f"u:{SECRET}@127.0.0.1:1;tls=on",
    f"u:{SECRET}@127.0.0.1:1 /x",
    f"ns/pod=http://u:{SECRET}@127.0.0.1:1;pod=a;pod=b",
    f"http://127.0.0.1:1;gpus=a b;args=--api-key {SECRET}",
    f"http://127.0.0.1:1;args=--api-key {SECRET} --max-num-seqz 5",
    f"http://127.0.0.1:1;args=--model m --max-num-seqz 5 --hf-token={SECRET}",
    f'http://127.0.0.1:1;args=--api-key "{SECRET}',
    f"http://127.0.0.1:1;api-key={SECRET}",
    f"http://127.0.0.1:1/ x?token={SECRET}",
    f"--api-key {SECRET} --max-num-seqz 5",
    f'--api-key "{SECRET}',
    f"Bearer {SECRET}",
    f"password={SECRET}",
    json.dumps({"password": SECRET, "api_key": SECRET}),
    "sk-" + SECRET * 2,
)
WRONG = ("--web.listen-address", "nowhere")
LIGHT = ("diagnose", "mitigate", "audit", "discover", "capacity", "replay")


def refused(capsys: Capsys, *arguments: str) -> None:
    assert main(list(arguments)) in (0, 1, 2, 130)
    said = capsys.readouterr()
    line = next((line for line in (said.out + said.err).splitlines() if SECRET in line), "")
    assert not line, arguments


@pytest.mark.attack(
    "passwords, keys and tokens in refused values of options, variables and files", "the error line does not hold them"
)
@pytest.mark.parametrize("name", sorted(options()))
def test_no_setting(name: str, capsys: Capsys, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for value in VALUES:
        refused(capsys, "serve", f"--{name}", value, *WRONG)
        refused(capsys, "serve", f"--{name}={value}", "--no-such-option", *WRONG)
        for given in (value, [value], {"password": value}):
            file.write_text(json.dumps({name: given}))
            refused(capsys, "serve", "--config", str(file), *WRONG)


def test_no_argument_of_a_target(capsys: Capsys) -> None:
    for option in ("gpus=a b", "tls=on", "ca=/nowhere", "pod=-", "bogus"):
        refused(capsys, "serve", "--engine.target", f"http://h:1;{option};args=--served-model-name {SECRET} --port")


def flags_of(command: str) -> list[str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    import_module(f"kvpressure.cli.{command}").add_arguments(parser)
    return sorted(
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and not isinstance(action, argparse._HelpAction)
    )


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"serve"}))
def test_no_option_of_a_command(command: str, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CLOCK, "sleep", raising(KeyboardInterrupt()))  # a server that is named rightly is not watched
    for value in VALUES:
        refused(capsys, command, "--no-such-option", value)
        refused(capsys, command, f"--no-such-option={value}", value)
        for flag in flags_of(command):
            refused(capsys, command, f"{flag}={value}", "--no-such-option")
            if command in LIGHT:
                refused(capsys, command, f"{flag}={value}")
        if command in LIGHT and not value.startswith("-"):
            refused(capsys, command, value)


@pytest.mark.parametrize("key", [*(item.name for item in fields(BundleValues)), "x"])
def test_no_value_of_the_bundle(key: str, capsys: Capsys, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    for value in VALUES[::3]:  # most are allowed, and the whole bundle is made
        for given in (value, {"a": value}, [value]):
            file.write_text(json.dumps({key: given}))
            refused(capsys, "bundle", "--out", str(tmp_path / "out"), "--values", str(file))


def test_the_rest_is_shown() -> None:
    assert shown("http://u:p@127.0.0.1:1/metrics;bogus") == "'http://[redacted]@127.0.0.1:1/metrics;bogus'"
    assert shown("--max-num-seqz 5") == "'--max-num-seqz 5'"
    assert shown({"password": "x", "port": 8000}) == "{'password': [redacted], 'port': 8000}"
    assert shown("a\nb" * 4000).count("\n") == 0
    assert len(shown("b" * 4000)) == 100
