"""Signals from other packages: a dataclass whose fields declare their metrics, and a function that computes it.

A distribution offers one under the entry point group ``kvpressure.signals``; it is looked up only when asked for by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, Final

from kvpressure.errors import InputError
from kvpressure.extension_points import offered
from kvpressure.model.frozen import frozen
from kvpressure.model.metrics import metrics_of
from kvpressure.model.signals import GROUPS, Signals
from kvpressure.signals.window import EngineWindow


@frozen
class ExtraSignal:
    """``compute`` makes a ``group`` from an engine's history and its other signals; it must not keep either."""

    name: str
    group: type[Any]
    compute: Callable[[EngineWindow, Signals], object]


_EXTRA: Final[dict[str, ExtraSignal]] = {}


def register(signal: ExtraSignal) -> None:
    """Add a signal for every engine. Raises ``ValueError`` if its group is no dataclass or one of its metrics exists
    already.
    """
    if not is_dataclass(signal.group):
        raise ValueError(f"signal {signal.name}: {signal.group!r} is not a dataclass")
    others = [*GROUPS, *(one.group for one in _EXTRA.values() if one.name != signal.name)]
    taken = {metric.name for metric in metrics_of(others)} & {metric.name for metric in metrics_of([signal.group])}
    if taken:
        raise ValueError(f"signal {signal.name}: these metrics exist already: {', '.join(sorted(taken))}")
    _EXTRA[signal.name] = signal


def forget(name: str) -> None:
    """Remove a signal."""
    _EXTRA.pop(name, None)


def extra_signals() -> Iterable[ExtraSignal]:
    """All registered signals."""
    return _EXTRA.values()


def adopt(name: str) -> bool:
    """Use the signal of this name that an installed package offers; False if none does. Raises ``InputError``."""
    found = offered("signal", name, ExtraSignal)
    if found is None:
        return False
    try:
        register(found)
    except ValueError as error:
        raise InputError(
            f"signal {name!r} cannot be used: {error}; a signal is a dataclass whose fields declare its metrics"
        ) from error
    return True
