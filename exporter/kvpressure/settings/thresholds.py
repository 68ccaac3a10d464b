"""All thresholds, from ``thresholds.yaml``, ``constants.yaml`` and the user's overrides.

Rules, dashboards, triage page, runbooks, docs and verdict take every number from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvpressure.errors import InputError, nearest, shown
from kvpressure.model import ceilings

_FILE: Final = Path(__file__).with_name("thresholds.yaml")
_CONSTANTS: Final = Path(__file__).with_name("constants.yaml")
LARGEST: Final = 1e15  # of what has no natural end: products of two such numbers are still finite
_YEAR: Final = 31_622_400.0


@dataclass(frozen=True, slots=True)
class Unit:
    """Allowed values of a unit: from ``least`` (exclusive if ``above``) to ``most``; ``whole``: integers only."""

    least: float
    most: float
    above: bool = False
    whole: bool = False

    def admits(self, value: float) -> bool:
        """Whether ``value`` is allowed; NaN never is."""
        low = value > self.least if self.above else value >= self.least
        return low and value <= self.most and (not self.whole or value == int(value))

    def words(self) -> str:
        """The allowed values, for messages."""
        kind = "a whole number" if self.whole else "a number"
        low = f"above {plain(self.least)}" if self.above else f"from {plain(self.least)}"
        return (
            f"{kind} {low}"
            if self.most == LARGEST
            else f"{kind} {low} {'up ' if self.above else ''}to {plain(self.most)}"
        )


_ABOVE_ZERO: Final = Unit(0, LARGEST, above=True)
UNITS: Final[Mapping[str, Unit]] = {
    "ratio": Unit(0, 1),
    "score": Unit(0, 1),
    "multiple": _ABOVE_ZERO,
    "bytes": _ABOVE_ZERO,
    "seconds": Unit(0.001, _YEAR),  # Prometheus knows no shorter time than a millisecond
    "requests": _ABOVE_ZERO,
    "tokens": _ABOVE_ZERO,
    "count": Unit(1, LARGEST, whole=True),
    "flops_per_byte": _ABOVE_ZERO,
    "per_second": Unit(0, LARGEST),
}


def plain(value: float) -> str:
    """The shortest decimal of a number, without exponent and rounding noise."""
    return format(Decimal(repr(value)).normalize(), "f")


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number. ``documented``: the guides give this value; ``source``: where; ``reason``: why this value;
    ``change``: when to change it. ``most``: a stricter maximum than the unit's; ``not_above``: a threshold that this
    one must not exceed. ``constant``: part of the program, cannot be overridden. ``metric``,
    ``rule``, ``panel``: what a documented number is about, and where it is used.
    """

    name: str
    value: float
    unit: str
    documented: bool
    source: str
    reason: str
    change: str
    overridden: bool = False
    most: float | None = None
    not_above: str | None = None
    constant: bool = False
    metric: str = ""
    rule: str = ""
    panel: str = ""

    @property
    def text(self) -> str:
        """The value as printed."""
        return plain(self.value)

    @property
    def origin(self) -> str:
        """Either "documented", or "configured" after an override."""
        return "configured" if self.overridden else "documented"

    @property
    def guide(self) -> str:
        """Title of the guide that has this number, the first where several have it; "" for one of our own."""
        found = re.search(r"'([^']+)'", self.source) if self.documented else None
        return found[1] if found else ""

    @property
    def cited(self) -> str:
        """The origin with the guide's title: ``documented in "KV Cache Diagnostics"``."""
        return self.origin if self.overridden else f'{self.origin} in "{self.guide}"'

    @property
    def allowed(self) -> Unit:
        """The allowed values of this threshold."""
        unit = UNITS[self.unit]
        return unit if self.most is None else replace(unit, most=self.most)


class Thresholds(dict[str, float]):
    """All thresholds by name; ``t["kv_full_ratio"]`` is the number, ``t.entry(...)`` the whole entry. Not changed once
    made: a dictionary only because every engine reads two hundred of them in each tick.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, Threshold]) -> None:
        super().__init__({name: entry.value for name, entry in entries.items()})
        self._entries = dict(entries)

    def entry(self, name: str) -> Threshold:
        """The whole entry. Raises ``KeyError`` for an unknown name."""
        return self._entries[name]

    def entries(self) -> tuple[Threshold, ...]:
        """All entries in the order of the file."""
        return tuple(self._entries.values())

    def settable(self) -> tuple[Threshold, ...]:
        """Entries that a user may override."""
        return tuple(entry for entry in self._entries.values() if not entry.constant)

    def override(self, values: Mapping[str, Any], where: str, lines: Mapping[str, str] | None = None) -> Thresholds:
        """A copy with some values replaced.

        ``lines`` gives the line of each name (``file:line``); for names not in it the messages say ``where``. Raises
        ``InputError`` for an unknown name, a value that its unit does not allow, or two values in the wrong order.
        """
        at = {name: (lines or {}).get(name, where) for name in values}
        entries = dict(self._entries)
        for name, raw in values.items():
            if name not in entries or entries[name].constant:
                raise InputError(f"{at[name]}: {_unknown(name, [entry.name for entry in self.settable()])}")
            value = raw["value"] if isinstance(raw, Mapping) and set(raw) == {"value"} else raw
            entries[name] = replace(entries[name], value=_number(entries[name], value, at[name]), overridden=True)
        _check_order(entries, at)
        return Thresholds(entries)


def _unknown(name: object, known: Sequence[str]) -> str:
    close = nearest(str(name), known)
    hint = f"; did you mean {close}?" if close else "; allowed: the names in docs/reference/thresholds.md"
    return f"unknown threshold {shown(name)}{hint}"


def _number(entry: Threshold, raw: object, where: str) -> float:
    value = ceilings.number(raw, LARGEST, -LARGEST)
    if value is None or not entry.allowed.admits(value):
        raise InputError(
            f"{where}: {entry.name}: {shown(raw)} is not allowed; allowed: {entry.allowed.words()} ({entry.unit})"
        )
    return value


def _check_order(entries: Mapping[str, Threshold], at: Mapping[str, str]) -> None:
    """Raises ``InputError`` where a lower threshold is above its upper one; the message names the line of the
    overridden one.
    """
    for entry in entries.values():
        upper = entries[entry.not_above] if entry.not_above is not None else entry
        if entry.value <= upper.value:
            continue
        if entry.name in at:
            raise InputError(
                f"{at[entry.name]}: {entry.name}: {entry.text} is above {upper.name}; allowed: up to {upper.text}"
            )
        raise InputError(
            f"{at[upper.name]}: {upper.name}: {upper.text} is below {entry.name}; allowed: from {entry.text} on"
        )


def _parse(text: str, constants: str) -> dict[str, Threshold]:
    """The built-in files, checked by the same rules as the user's."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = {name: Threshold(name=name, **body) for name, body in yaml.load(text, Loader=loader).items()}
    for name, body in yaml.load(constants, Loader=loader).items():
        entries[name] = Threshold(name=name, documented=False, change="", constant=True, **body)
    for name, entry in entries.items():
        entries[name] = replace(entry, value=_number(entry, entry.value, _FILE.name))
    _check_order(entries, dict.fromkeys(entries, _FILE.name))
    return entries


@lru_cache(maxsize=1)
def builtin() -> Thresholds:
    """The thresholds shipped with the package."""
    return Thresholds(_parse(_FILE.read_text(encoding="utf-8"), _CONSTANTS.read_text(encoding="utf-8")))


def load(path: str | Path | None) -> Thresholds:
    """Built-in thresholds with the user's file (``name: value`` lines) on top; ``None`` = built-in only.

    Raises ``InputError`` with one line for anything wrong with the file.
    """
    if path is None:
        return builtin()
    from kvpressure.settings import yaml_lines as yaml_nodes

    root = yaml_nodes.read(path)
    if root.children is None:
        raise InputError(f'{root.where}: the file is not a mapping; allowed: lines "name: value"')
    return builtin().override(root.value, str(path), {name: node.where for name, node in root.children.items()})
