"""Immutable dataclasses that are cheap to create every second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with slots whose fields the type checker treats as fixed.

    ``frozen=True`` would double the time to create each, a tenth of the exporter's tick.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
