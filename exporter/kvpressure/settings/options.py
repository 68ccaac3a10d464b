"""A setting: its name, its kind, and the errors of wrong values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpressure.settings.kinds import BOOL, Kind
from kvpressure.sources.catalog import registry


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. ``name``: the flag without dashes, and the key in the file."""

    name: str
    kind: Kind
    help: str
    default: str
    repeat: bool = False

    def check(self, raw: object, where: str) -> Any:
        """The checked value of ``raw``, written at ``where``. Raises ``InputError``."""
        if not self.repeat:
            return self.kind.checked(raw, where)
        return tuple(self.kind.checked(item, where) for item in (raw if isinstance(raw, list) else [raw]))


def option(
    name: str,
    kind: Kind,
    default: Any,
    help: str,
    *,
    shown: str | None = None,
    repeat: bool = False,
) -> Any:
    """A field of ``Settings`` with its option. ``default`` may be a function; ``shown`` is how help prints it."""
    text = _default_text(default) if shown is None else shown
    metadata = {"option": Option(name, kind, help, text, repeat)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _default_text(default: object) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def collector_options() -> list[Option]:
    """The switch of each source."""
    return [
        Option(f"collector.{name}", BOOL, f"Source: {spec.help}.", str(spec.default).lower())
        for name, spec in registry().items()
    ]
