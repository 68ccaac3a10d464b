"""Audit failures that a team has accepted: a JSON file of items and their faults by server, so that CI fails on new
ones only. An accepted item that is found with another fault fails again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvpressure.errors import InputError, refused_file
from kvpressure.files import read_file
from kvpressure.toolbox.audit_report import Audited

MAX_BYTES: Final = 16 * 1024 * 1024
_ALLOWED: Final = "a file that --write-baseline wrote"


Accepted = Mapping[str, Mapping[str, str]]
"""Faults by item name by server."""


def read(path: str) -> Accepted:
    """Accepted faults. Raises ``InputError``."""
    try:
        found = json.loads(read_file(path, MAX_BYTES, pipe=True))
    except OSError as error:
        raise InputError(refused_file(f"--baseline: {path}", error, _ALLOWED)) from error
    except ValueError as error:
        raise InputError(f"--baseline: {path}: not JSON; allowed: {_ALLOWED}") from error
    accepted = found.get("accepted") if isinstance(found, dict) else None
    servers = list(accepted.values()) if isinstance(accepted, dict) else [None]
    if servers and all(isinstance(names, list) and all(isinstance(one, str) for one in names) for names in servers):
        raise InputError(
            f"--baseline: {path}: written by an earlier release, without the faults that were found; write it again"
            " with --write-baseline"
        )
    if not all(
        isinstance(faults, dict) and all(isinstance(fault, str) for fault in faults.values()) for faults in servers
    ):
        raise InputError(f"--baseline: {path}: no faults by item and server in it; allowed: {_ALLOWED}")
    return accepted if isinstance(accepted, dict) else {}


def write(path: str, audited: Sequence[Audited]) -> None:
    """Write the current failures as accepted. Raises ``InputError``."""
    accepted = {
        server.title: {item.name: item.fault for item in server.items if item.result in ("fail", "accepted")}
        for server in audited
    }
    try:
        Path(path).write_text(json.dumps({"accepted": accepted}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(refused_file(f"--write-baseline: {path}", error, "a file that can be written")) from error


def apply(audited: Sequence[Audited], accepted: Accepted) -> list[Audited]:
    """The audits with ``accepted`` in place of ``fail`` for faults in the baseline."""
    return [
        replace(
            server,
            items=tuple(
                replace(item, result="accepted")
                if item.result == "fail" and accepted.get(server.title, {}).get(item.name) == item.fault
                else item
                for item in server.items
            ),
        )
        for server in audited
    ]
