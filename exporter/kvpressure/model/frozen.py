"""Immutable dataclasses that are cheap to create every second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with slots whose fields the type checker treats as fixed.

    ``frozen=True`` would double the time to create each, a tenth of the exporter's tick.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


def later(compute: Callable[..., T], *given: object) -> T:
    """What ``compute`` makes of ``given``, for a field that is ``when_read``. Another thread may read it, so nothing
    that is given may change.
    """
    return cast(T, partial(compute, *given))


def when_read(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorator of a ``frozen`` class: these fields may be given as ``later``, and are computed when first read. In
    most ticks nobody reads what is only published.
    """

    def made(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _read_once(vars(cls)[name]))
        return cls

    return made


def _read_once(slot: Any) -> property:
    """The slot of a field that is computed when first read."""

    def read(of: object) -> Any:
        value = slot.__get__(of)
        if type(value) is partial:
            value = value()
            slot.__set__(of, value)
        return value

    return property(read, slot.__set__)
