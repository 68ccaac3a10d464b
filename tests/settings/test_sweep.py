"""Every setting, given wrongly in every way: one line that says where, what and what is allowed; status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpressure import cli
from kvpressure.settings import kinds, settings
from tests.helpers.command import Capsys

pytestmark = pytest.mark.slow

WRONG: dict[kinds.Kind, tuple[str, ...]] = {
    kinds.ANY_PATH: ("relative", "/new\nline"),
    kinds.API_URL: ("10.0.0.1:6443", "https://user@host"),
    kinds.BOOL: ("maybe", "1"),
    kinds.COUNT: ("0", "-1", "1.5", "9" * 30),
    kinds.DIRECTORY: ("/no/such", "\0"),
    kinds.FILE: ("/no/such", "\0"),
    kinds.LISTEN_ADDRESS: ("9846", ":99999", "host:http", "::1:80"),
    kinds.NAMESPACE: ("Upper", "a/b", "-"),
    kinds.PAGES_URL: ("ftp://x", "a b"),
    kinds.SECONDS: ("0", "-1", "nan", "1d", "1e9"),
    kinds.SIZE: ("1", "64MB", "-1"),
    kinds.TARGET: ("ftp://x", "http://", "http://x;unknown=1"),
    kinds.TEXT: (" ", "a\x07b", "x" * 300),
    kinds.THRESHOLDS_FILE: ("/no/such",),
    kinds.HOST_NAME: ("a b", "http://x"),
    kinds.WHOLE: ("-1", "many", "1e3"),
}
OPTIONS = settings.options()


def refusal(capsys: Capsys, *arguments: str) -> str:
    assert cli.main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvpressure serve: ")
    assert len(err) < 600
    return err


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("KVPRESSURE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_flag(capsys: Capsys, name: str) -> None:
    kind = OPTIONS[name].kind
    for value in ("", *WRONG.get(kind, ("no-such-word",))):  # a word of a closed list has its own kind
        text = refusal(capsys, f"--{name}={value}")
        assert f"--{name}" in text
        if kind is kinds.THRESHOLDS_FILE and value:
            assert "; give a readable YAML file" in text
        elif kind is not kinds.BOOL:  # a flag without a value: argparse says so
            assert "; allowed: " in text


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_key_of_the_file(capsys: Capsys, tmp_path: Path, name: str) -> None:
    path = tmp_path / "settings.yaml"
    for written in ("{a: 1}", "[[1]]", "''"):
        path.write_text(f"# first\n{name}: {written}\n")
        text = refusal(capsys, "--config", str(path))
        assert f"{path}:2" in text
        assert name in text
