"""Alerts and recordings as the rule templates specify them.

A template says what is compared (``expr``), which conditions must hold on the same subject (``and_on``), and which must
not (``unless_on``). ``rules`` turns this into Prometheus rules, ``documents`` into the alert reference, so that they
cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Final

SEVERITIES: Final = ("critical", "warning", "info", "none")
FAMILIES: Final = ("objectives", "pressure", "harm", "memory", "load", "failure", "hardware", "self")

EVALUATION_INTERVALS: Final[Mapping[str, int]] = {
    "steady": 60,  # alerts that page somebody, and what they read
    "calm": 120,  # warnings; recordings are not rarer, because a query looks back five minutes and one may be missed
    "slow": 240,  # tickets, whose rules nothing else reads
}
"""How often a group is evaluated, in seconds."""

MOST_ALERTS: Final = 20_000  # of a rule: two for each of 8 000 engines; a rule with more fails, and floods nobody
MOST_SERIES: Final = 100_000  # of a recording: twelve for each of 8 000 engines

SUBJECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("cluster", "namespace", "pod", "model_name", "engine"),
    "container": ("cluster", "namespace", "pod", "container", "model_name", "pool"),
    "gpu": ("cluster", "node", "uuid", "gpu", "vendor"),
    "owner": ("cluster", "namespace", "pod", "model_name", "pool"),
    "model": ("cluster", "namespace", "model_name"),
    "pool": ("cluster", "namespace", "pool", "model_name", "role"),
    "workload": ("cluster", "namespace", "pool"),
    "device": ("cluster", "uuid"),
    "objective": ("cluster", "namespace", "pool", "model_name", "role", "objective"),
    "pod": ("cluster", "namespace", "pod"),
    "exporter": ("cluster", "node", "instance"),
    "cluster": ("cluster",),
    "none": (),
}
"""What an alert is about, and the labels that identify it. ``cluster``, ``node``, ``pool`` and ``role`` may be missing
everywhere: a label that does not exist is simply left out of ``by`` and equal in ``on``.
"""

POOL: Final = ("pool", "role")
"""Labels that an alert about an engine has beside its identity, by which it is grouped and routed."""

_INTERVAL: Final = "evaluation_interval"


@dataclass(frozen=True, slots=True)
class SideCondition:
    """A condition on the same subject: ``and`` (must hold) or ``unless`` (must not), joined ``on`` labels."""

    name: str
    kind: str
    expr: str
    on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AlertLevel:
    """One severity of an alert. Durations are seconds; texts are Go templates. ``documented``: the severity that the
    guides give its number, "" where it is not from a guide; ``lasted_seconds``: how much of ``for_seconds`` the
    expression itself asks for.
    """

    severity: str
    documented: str
    expr: str
    conditions: tuple[SideCondition, ...]
    for_seconds: float
    lasted_seconds: float
    keep_seconds: float
    summary: str
    description: str

    @property
    def name(self) -> str:
        """What tells the levels of one alert apart."""
        return self.documented or self.severity

    @property
    def wakes(self) -> bool:
        """Whether it wakes somebody."""
        return self.severity == "critical"

    def full_expr(self) -> str:
        """The expression with its conditions."""
        parts = [self.expr]
        parts += [f"{item.kind} on ({', '.join(item.on)})\n{item.expr}" for item in self.conditions]
        if len(parts) > 1 and re.search(r"\bor\b", self.expr):
            parts[0] = f"(\n{indent(self.expr, '  ')}\n)"
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert with all its severities. ``choice``: what the rule adds to its number, and why; ``labels``: those of
    its subject that every result has; ``dashboard``: whether a dashboard shows it.
    """

    name: str
    family: str
    subject: str
    labels: tuple[str, ...]
    choice: str
    dashboard: bool
    levels: tuple[AlertLevel, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule; ``labels``: those of its series."""

    name: str
    expr: str
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """A rule group: recordings, or alerts of one family, with one evaluation interval in seconds."""

    name: str
    family: str
    interval: int
    recordings: tuple[Recording, ...] = ()
    alerts: tuple[Alert, ...] = ()

    @property
    def limit(self) -> int:
        """Maximum results of a rule."""
        return MOST_SERIES if self.family == "recordings" else MOST_ALERTS


def _clean(expr: str) -> str:
    return "\n".join(line.rstrip() for line in expr.strip().splitlines() if line.strip())


def parse_groups(document: Mapping[str, Any]) -> list[RuleGroup]:
    """A rendered and parsed rule template as groups, one per evaluation interval."""
    family = document["family"]
    dashboard = document.get("dashboard", True)
    groups = []
    for interval, seconds in EVALUATION_INTERVALS.items():
        alerts = tuple(_alert(item, family, dashboard) for item in _evaluated(document, "alerts", interval))
        recordings = tuple(
            Recording(item["record"], _clean(item["expr"]), tuple(item["labels"]), item["help"].strip())
            for item in _evaluated(document, "recordings", interval)
        )
        if alerts or recordings:
            groups.append(RuleGroup(f"{family}-{interval}", family, seconds, recordings, alerts))
    return groups


def _evaluated(document: Mapping[str, Any], kind: str, interval: str) -> Iterator[Mapping[str, Any]]:
    return (item for item in document.get(kind) or () if item.get(_INTERVAL, document[_INTERVAL]) == interval)


def _alert(item: Mapping[str, Any], family: str, dashboard: bool) -> Alert:
    name = item["name"]
    levels = tuple(_level(item, level) for level in item["levels"])
    return Alert(
        name,
        family,
        item["subject"],
        tuple(item.get("labels", SUBJECTS[item["subject"]])),
        _line(item["choice"]),
        dashboard,
        levels,
    )


def _line(text: str) -> str:
    """``text`` on one line; an optional ``{{ with }}`` sentence brings its own space."""
    return " ".join(text.split()).replace(" {{ with ", "{{ with ")


def _level(alert: Mapping[str, Any], item: Mapping[str, Any]) -> AlertLevel:
    identity = SUBJECTS[alert["subject"]]
    conditions = tuple(
        _condition(key, body, kind, identity)
        for field_name, kind in (("and_on", "and"), ("unless_on", "unless"))
        for key, body in (item.get(field_name) or {}).items()
    )
    return AlertLevel(
        item["severity"],
        item.get("documented", ""),
        _clean(item["expr"]),
        conditions,
        float(item["for"]),
        float(item.get("lasted", 0)),
        float(item.get("keep", 0)),
        _line(item.get("summary") or alert["summary"]),
        _line(item.get("description") or alert["description"]),
    )


def _condition(name: str, body: str | Mapping[str, Any], kind: str, identity: tuple[str, ...]) -> SideCondition:
    if isinstance(body, str):
        return SideCondition(name, kind, _clean(body), identity)
    return SideCondition(name, kind, _clean(body["expr"]), tuple(body["join"]))
