"""The result of ``audit`` as text, JSON, JUnit XML and SARIF."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote
from xml.etree import ElementTree

from kvpressure import __version__
from kvpressure.toolbox.audit_subject import Item
from kvpressure.toolbox.manifests import FileLine

_MARKS: Final = {"pass": "pass", "fail": "FAIL", "cannot see": "?", "accepted": "(ok)"}
_ILLEGAL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # what XML cannot carry


@dataclass(frozen=True, slots=True)
class Audited:
    """One server and its checklist. ``basis``: what determined the defaults; ``written``: where its container begins,
    None if not in a file.
    """

    title: str
    basis: str
    items: tuple[Item, ...]
    written: FileLine | None = None

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
            " from here" + (f", {accepted} accepted by the baseline" if (accepted := server.count("accepted")) else ""),
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
                "accepted": server.count("accepted"),
                "items": [_plain(item) for item in server.items],
            }
            for server in audited
        ],
    }


def _plain(item: Item) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != "stable"}


def as_junit(audited: Sequence[Audited]) -> str:
    """One suite per server, one case per item; items that cannot be seen are skipped."""
    root = ElementTree.Element("testsuites", name="kvpressure audit")
    for server in audited:
        skipped = server.count("cannot see") + server.count("accepted")
        counts = {"tests": len(server.items), "failures": server.count("fail"), "errors": 0, "skipped": skipped}
        attributes = {"name": _legal(server.title), **{name: str(count) for name, count in counts.items()}}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for item in server.items:
            title = _legal(f"{item.section}: {item.text}")
            case = ElementTree.SubElement(suite, "testcase", classname=_legal(server.title), name=title)
            if item.result != "pass":
                advice = f"; set {item.set}" if item.set else ""
                kind = "failure" if item.result == "fail" else "skipped"
                ElementTree.SubElement(case, kind, message=_legal(f"{item.found}{advice} ({item.why})"))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def as_sarif(audited: Sequence[Audited]) -> str:
    """SARIF 2.1.0: one rule per item, one result per failure; accepted ones are suppressed."""
    items = {item.name: item for server in audited for item in server.items}
    results = [
        {
            "ruleId": item.name,
            "level": "error" if item.result == "fail" else "note",
            "message": {
                "text": f"{server.title}: {item.text}: {item.found}" + (f". Set {item.set}" if item.set else "")
            },
            "locations": [{**_physical(server.written), "logicalLocations": [{"fullyQualifiedName": server.title}]}],
            **({"suppressions": [{"kind": "external"}]} if item.result == "accepted" else {}),
        }
        for server in audited
        for item in server.items
        if item.result in ("fail", "accepted")
    ]
    rules = [
        {"id": item.name, "shortDescription": {"text": item.text}, "fullDescription": {"text": item.why}}
        for item in items.values()
    ]
    run = {"tool": {"driver": {"name": "kvpressure audit", "version": __version__, "rules": rules}}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _physical(written: FileLine | None) -> dict[str, Any]:
    """The place in a file, without which GitHub refuses a result; empty if the server is in none."""
    if written is None:
        return {}
    path = PurePath(written.path)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": written.line}}}


def _legal(text: str) -> str:
    return _ILLEGAL.sub("?", text)
