"""The result of ``audit`` as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpressure import __version__
from kvpressure.toolbox.audit_subject import Item

_MARKS: Final = {True: "pass", False: "FAIL", None: "?"}
_RESULTS: Final = {True: "pass", False: "fail", None: "cannot see"}


@dataclass(frozen=True, slots=True)
class Audited:
    """One server and its checklist by section. ``basis``: what determined the defaults."""

    title: str
    basis: str
    sections: Mapping[str, Sequence[Item]]

    def count(self, result: bool | None) -> int:
        """Number of items with this result."""
        return sum(item.found.value is result for items in self.sections.values() for item in items)


def as_text(audited: Sequence[Audited], everything: bool, only_failures: bool = False) -> str:
    """For a person. Without ``everything``, reasons are given for failures only; with ``only_failures``, only
    failures are listed.
    """
    lines: list[str] = []
    for server in audited:
        lines += [server.title, f"  {server.basis}"]
        for section, items in server.sections.items():
            listed = [item for item in items if item.found.value is False or not only_failures]
            if listed:
                lines.append(f" {section}")
            for item in listed:
                result = item.found.value
                lines.append(f"  {_MARKS[result]:4} {item.text}: {item.found.text}")
                if result is False or everything:
                    lines.append(f"         why: {item.why}")
                if item.set and not result:
                    lines.append(f"         set: {item.set}")
        lines += [
            f" {server.count(False)} failed, {server.count(True)} passed, {server.count(None)} not visible from here",
            "",
        ]
    return "\n".join(lines).rstrip()


def as_json(audited: Sequence[Audited], unread: Sequence[str]) -> dict[str, Any]:
    """Plain JSON values. ``unread``: objects that could not be judged, so that the whole is not ``ok``."""
    return {
        "version": __version__,
        "ok": not unread and not any(server.count(False) for server in audited),
        "unread": list(unread),
        "servers": [
            {
                "server": server.title,
                "basis": server.basis,
                "failed": server.count(False),
                "passed": server.count(True),
                "cannot_see": server.count(None),
                "items": [_item(section, item) for section, items in server.sections.items() for item in items],
            }
            for server in audited
        ],
    }


def _item(section: str, item: Item) -> dict[str, str]:
    return {
        "name": item.found.name,
        "section": section,
        "text": item.text,
        "result": _RESULTS[item.found.value],
        "why": item.why,
        "found": item.found.text,
        "set": "" if item.found.value else item.set,
    }
