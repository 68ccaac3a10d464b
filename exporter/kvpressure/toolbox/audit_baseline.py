"""Audit failures that a team has accepted: a JSON file of item names by server, so that CI fails on new ones only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvpressure.errors import InputError
from kvpressure.toolbox.audit_report import Audited

_ALLOWED: Final = "a file that --write-baseline wrote"


def read(path: str) -> dict[str, frozenset[str]]:
    """Accepted item names by server. Raises ``InputError``."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--baseline: {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--baseline: {path}: not JSON; allowed: {_ALLOWED}") from error
    accepted = found.get("accepted") if isinstance(found, dict) else None
    if not isinstance(accepted, dict) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in accepted.values()
    ):
        raise InputError(f"--baseline: {path}: no item names by server in it; allowed: {_ALLOWED}")
    return {server: frozenset(names) for server, names in accepted.items()}


def write(path: str, audited: Sequence[Audited]) -> None:
    """Write the present failures as accepted. Raises ``InputError``."""
    accepted = {
        server.title: sorted(item.name for item in server.items if item.result in ("fail", "accepted"))
        for server in audited
    }
    try:
        Path(path).write_text(json.dumps({"accepted": accepted}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--write-baseline: {path}: {error.strerror}") from error


def apply(audited: Sequence[Audited], accepted: Mapping[str, frozenset[str]]) -> list[Audited]:
    """The audits with ``accepted`` in place of ``fail`` for items in the baseline."""
    return [
        replace(
            server,
            items=tuple(
                replace(item, result="accepted")
                if item.result == "fail" and item.name in accepted.get(server.title, ())
                else item
                for item in server.items
            ),
        )
        for server in audited
    ]
