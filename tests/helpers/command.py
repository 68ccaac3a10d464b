"""Commands as people type them, in this process: what they print, and how they refuse."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from kvpressure.cli import main

Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, typed: str, *more: object) -> tuple[int, str, str]:
    """Exit status, output and errors of ``kvpressure TYPED``; ``more`` are words with blanks or paths."""
    status = main([*shlex.split(typed), *map(str, more)])
    return (status, *capsys.readouterr())


def answer(capsys: Capsys, typed: str, *more: object) -> tuple[int, dict[str, Any]]:
    """Exit status and the answer in JSON, which has no number that JSON does not know."""
    status, out, _ = run(capsys, typed, *more, "--format", "json")
    document: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return status, document


def refused(capsys: Capsys, typed: str, *more: object) -> str:
    """The one line with which a command ends that was given what it cannot use."""
    status, out, err = run(capsys, typed, *more)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("kvpressure "), err
    assert len(err) < 700
    assert "Errno" not in err
    return err
