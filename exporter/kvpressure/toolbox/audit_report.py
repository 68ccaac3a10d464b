"""The result of ``audit`` as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpressure import __version__
from kvpressure.toolbox.audit_subject import Item

_MARKS: Final = {"fail": "FAIL", "info": "info", "pass": "pass", "cannot see": "?"}
"""Results as the text shows them, in this order."""


def result(item: Item) -> str:
    """``info``: the server does not do what a guide asks, and measurements are against the guide."""
    if item.found.value is None:
        return "cannot see"
    return "pass" if item.found.value else "info" if item.measured else "fail"


@dataclass(frozen=True, slots=True)
class Audited:
    """One server and its checklist by section. ``basis``: what determined the defaults."""

    title: str
    basis: str
    sections: Mapping[str, Sequence[Item]]

    def of(self, wanted: str) -> list[Item]:
        """Items with this result."""
        return [item for items in self.sections.values() for item in items if result(item) == wanted]


def as_text(audited: Sequence[Audited], everything: bool) -> str:
    """For a person, failures first. Without ``everything``, what passes and what cannot be seen is only counted."""
    lines: list[str] = []
    for server in audited:
        lines += [server.title, f"  {server.basis}"]
        shown = _MARKS if everything else ("fail", "info")
        for item in (item for name in shown for item in server.of(name)):
            lines.append(f"  {_MARKS[result(item)]:4} {item.text}: {item.found.text}")
            lines.append(f"         why: {item.why}")
            lines += [f"         but: {item.measured}"] if result(item) == "info" else []
            lines += [f"         do:  {item.set}"] if item.set and not item.found.value else []
        failed, info, passed, unseen = (len(server.of(name)) for name in _MARKS)
        more = "" if everything else "; --all lists them"
        lines += [
            f" {failed} failed, {info} for information, {passed} passed, {unseen} cannot be seen from here{more}",
            "",
        ]
    return "\n".join(lines).rstrip()


def as_json(audited: Sequence[Audited], unread: Sequence[str]) -> dict[str, Any]:
    """Plain JSON values. ``unread``: objects that could not be judged, so that the whole is not ``ok``."""
    return {
        "version": __version__,
        "ok": not unread and not any(server.of("fail") for server in audited),
        "unread": list(unread),
        "servers": [
            {
                "server": server.title,
                "basis": server.basis,
                "failed": len(server.of("fail")),
                "passed": len(server.of("pass")),
                "cannot_see": len(server.of("cannot see")),
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
        "result": result(item),
        "why": item.why,
        "measured": item.measured,
        "found": item.found.text,
        "set": "" if item.found.value else item.set,
    }
