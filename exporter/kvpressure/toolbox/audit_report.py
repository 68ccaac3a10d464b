"""The result of ``audit`` as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvpressure import __version__
from kvpressure.toolbox.audit_subject import Item

_MARKS: Final = {"pass": "pass", "fail": "FAIL", "cannot see": "?"}


@dataclass(frozen=True, slots=True)
class Audited:
    """One server and its checklist. ``basis``: what determined the defaults."""

    title: str
    basis: str
    items: tuple[Item, ...]

    def count(self, result: str) -> int:
        """Number of items with this result."""
        return sum(item.result == result for item in self.items)


def as_text(audited: Sequence[Audited], everything: bool, only_failures: bool = False) -> str:
    """For a person. Without ``everything``, reasons are given for failures only; with ``only_failures``, only
    failures are listed.
    """
    lines: list[str] = []
    for server in audited:
        lines += [server.title, f"  {server.basis}"]
        section = ""
        for item in server.items:
            if only_failures and item.result != "fail":
                continue
            if item.section != section:
                section = item.section
                lines.append(f" {section}")
            lines.append(f"  {_MARKS[item.result]:4} {item.text}: {item.found}")
            if item.result == "fail" or everything:
                lines.append(f"         why: {item.why}")
            if item.set and item.result != "pass":
                lines.append(f"         set: {item.set}")
        lines += [
            f" {server.count('fail')} failed, {server.count('pass')} passed, {server.count('cannot see')} not visible"
            " from here",
            "",
        ]
    return "\n".join(lines).rstrip()


def as_json(audited: Sequence[Audited]) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "version": __version__,
        "ok": not any(server.count("fail") for server in audited),
        "servers": [
            {
                "server": server.title,
                "basis": server.basis,
                "failed": server.count("fail"),
                "passed": server.count("pass"),
                "cannot_see": server.count("cannot see"),
                "items": [asdict(item) for item in server.items],
            }
            for server in audited
        ],
    }
