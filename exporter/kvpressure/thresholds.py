"""The one model of thresholds, read from ``thresholds.yaml`` and from the user's overrides.

Rules, dashboards, page, runbooks, docs and the verdict take every number from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

UNITS: Final = ("ratio", "bytes", "seconds", "requests", "tokens", "count", "per_second", "score")

_FILE: Final = Path(__file__).with_name("thresholds.yaml")


class ThresholdError(ValueError):
    """A thresholds file is wrong; the text is one line that names the file, the entry and what is allowed."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number. ``documented`` = it stands in the guides with this value; ``source`` says where, ``reason``
    why this value, ``change`` when to change it.
    """

    name: str
    value: float
    unit: str
    documented: bool
    source: str
    reason: str
    change: str
    overridden: bool = False

    @property
    def text(self) -> str:
        """The value as it is printed everywhere: shortest decimal, no exponent, no float noise."""
        value = Decimal(repr(self.value)).normalize()
        return format(value, "f")


class Thresholds(Mapping[str, float]):
    """All thresholds by name; ``t["kv_full_ratio"]`` is the number, ``t.entry(...)`` the whole entry."""

    __slots__ = ("_entries", "_values")

    def __init__(self, entries: Mapping[str, Threshold]) -> None:
        self._entries = dict(entries)
        self._values = {name: entry.value for name, entry in entries.items()}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def entry(self, name: str) -> Threshold:
        """The whole entry. Raises ``KeyError`` for an unknown name."""
        return self._entries[name]

    def entries(self) -> tuple[Threshold, ...]:
        """All entries in the order of the file."""
        return tuple(self._entries.values())

    def override(self, values: Mapping[str, Any], where: str) -> Thresholds:
        """A copy with some values replaced. Raises ``ThresholdError`` naming ``where`` for an unknown name, a value
        that is no number, or one outside the unit's range.
        """
        entries = dict(self._entries)
        for name, raw in values.items():
            if name not in entries:
                close = ", ".join(sorted(n for n in entries if n.split("_")[0] == str(name).split("_")[0])[:5])
                hint = f"; similar: {close}" if close else ""
                raise ThresholdError(f"{where}: unknown threshold {name!r}{hint}")
            value = raw["value"] if isinstance(raw, Mapping) and set(raw) == {"value"} else raw
            entries[name] = replace(entries[name], value=_number(name, value, entries[name].unit, where),
                                    overridden=True)
        return Thresholds(entries)


def _number(name: str, raw: object, unit: str, where: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise ThresholdError(f"{where}: {name}: {raw!r} is not a number")
    try:
        value = float(Decimal(repr(raw)))
    except InvalidOperation as error:
        raise ThresholdError(f"{where}: {name}: {raw!r} is not a number") from error
    if value != value or value in (float("inf"), float("-inf")) or value < 0:
        raise ThresholdError(f"{where}: {name}: {raw!r} must be a finite number of at least 0")
    if unit == "score" and value > 1:
        raise ThresholdError(f"{where}: {name}: {raw!r} must be between 0 and 1")
    return value


def _parse(text: str, where: str) -> dict[str, Threshold]:
    import yaml

    document = yaml.safe_load(text)
    entries: dict[str, Threshold] = {}
    for name, body in document.items():
        unit: Literal["ratio"] | str = body["unit"]
        if unit not in UNITS:
            raise ThresholdError(f"{where}: {name}: unit {unit!r} is not one of {', '.join(UNITS)}")
        entries[name] = Threshold(name, _number(name, body["value"], unit, where), unit, bool(body["documented"]),
                                  str(body["source"]), str(body["reason"]), str(body["change"]))
    return entries


@lru_cache(maxsize=1)
def builtin() -> Thresholds:
    """The thresholds shipped with the package."""
    return Thresholds(_parse(_FILE.read_text(encoding="utf-8"), _FILE.name))


def load(path: str | Path | None) -> Thresholds:
    """Built-in thresholds with the user's file (``name: value`` lines) on top; ``None`` = built-in only.

    Raises ``ThresholdError`` with one line for anything wrong with the file.
    """
    if path is None:
        return builtin()
    import yaml

    where = str(path)
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ThresholdError(f"{where}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ThresholdError(f"{where}{line}: not valid YAML") from error
    if document is None:
        return builtin()
    if not isinstance(document, Mapping):
        raise ThresholdError(f"{where}: expected a mapping of threshold names to numbers")
    return builtin().override(document, where)
