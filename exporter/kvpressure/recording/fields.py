"""Values and records of a recording as JSON: what a field may contain, and one line for what it may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from kvpressure.model import ceilings
from kvpressure.printable import visible

_MAX_DIGITS: Final = 18

T = TypeVar("T")


class MalformedTick(ValueError):
    """One line cannot be used; the text names the key and what was expected."""


def describe(value: object) -> str:
    """A wrong value on one line, and not all of a long one."""
    if isinstance(value, int) and abs(value) > ceilings.COUNT:
        return f"{'-' if value < 0 else ''}1e{int(math.log10(abs(value)))}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def read_text(value: object) -> str:
    """Text. JSON can say what no text holds and no output can write, half a surrogate pair: that becomes ``?``."""
    if not isinstance(value, str):
        raise MalformedTick(f"expected text, found {describe(value)}")
    return value if value.isascii() else value.encode(errors="replace").decode()


def read_name(value: object) -> str:
    """A name as it may be shown: one line, nothing that a terminal obeys."""
    return visible(read_text(value))


def read_number(value: object) -> float:
    """A finite number."""
    number = ceilings.number(value, ceilings.FINITE, -ceilings.FINITE)
    if number is None:
        raise MalformedTick(f"expected a number, found {describe(value)}")
    return number


def read_whole(value: object) -> int:
    """A whole number."""
    number = ceilings.whole(value, ceilings.COUNT, -ceilings.COUNT)
    if number is None:
        raise MalformedTick(f"expected a whole number up to {ceilings.COUNT}, found {describe(value)}")
    return number


def read_amount(value: object) -> int:
    """A size or a count: whole, and never below 0."""
    number = read_whole(value)
    if number < 0:
        raise MalformedTick(f"expected a whole number from 0, found {describe(value)}")
    return number


def read_level(value: object) -> float:
    """A power, a time that passed: never below 0."""
    return _within(value, ceilings.SECONDS)


def read_ratio(value: object) -> float:
    """A share of time or of memory."""
    return _within(value, ceilings.ACTIVITY)


def _within(value: object, most: float) -> float:
    number = read_number(value)
    if number < 0:
        raise MalformedTick(f"expected a number from 0, found {describe(value)}")
    if number > most:
        raise MalformedTick(f"expected a number up to {most:g}, found {describe(value)}")
    return number


def read_flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise MalformedTick(f"expected true or false, found {describe(value)}")
    return value


def read_object(value: object) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise MalformedTick(f"expected an object, found {describe(value)}")
    return value


def read_list(value: object) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise MalformedTick(f"expected a list, found {describe(value)}")
    return value


def read_texts(value: object) -> tuple[str, ...]:
    """A list of texts."""
    return tuple(read_text(item) for item in read_list(value))


def read_names(value: object) -> tuple[str, ...]:
    """A list of names."""
    return tuple(read_name(item) for item in read_list(value))


def read_text_map(value: object) -> dict[str, str]:
    """Texts by name."""
    return {read_text(key): read_text(item) for key, item in read_object(value).items()}


def read_counts(value: object) -> dict[str, int]:
    """Counts by name."""
    return {key: read_amount(item) for key, item in read_object(value).items()}


def read_counts_by_number(value: object) -> dict[int, int]:
    """Counts by a whole number (XIDs, batch sizes), which JSON writes as text."""
    return {number: read_amount(item) for number, item in _by_number(value)}


def read_moments_by_number(value: object) -> dict[int, float]:
    """Moments by a whole number (XIDs)."""
    return {number: read_moment(item) for number, item in _by_number(value)}


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS


def _by_number(value: object) -> Iterator[tuple[int, object]]:
    for key, item in read_object(value).items():
        if not _is_number(key):
            raise MalformedTick(f"expected whole numbers as keys, found {describe(value)}")
        yield int(key), item


def read_pods(value: object) -> dict[int, tuple[str, str]]:
    """(namespace, pod) by host pid."""
    found: dict[int, tuple[str, str]] = {}
    for key, item in read_object(value).items():
        owner = read_texts(item)
        if not _is_number(key) or len(owner) != 2:
            raise MalformedTick(f"expected a namespace and a pod by pid, found {describe(value)}")
        found[int(key)] = (owner[0], owner[1])
    return found


def numbers_as_text(counts: Mapping[int, int]) -> dict[str, int]:
    """The way back of ``read_counts_by_number``."""
    return {str(number): count for number, count in counts.items()}


def read_time(value: object) -> float:
    """Unix seconds up to the year 9999: what lies beyond is no time, and no database takes it."""
    time = read_number(value)
    if not 0 <= time < ceilings.MOMENT:
        raise MalformedTick(f"expected Unix seconds, found {describe(value)}")
    return time


def read_moment(value: object) -> float:
    """Unix seconds, or a time as Kubernetes writes it (``2023-11-14T22:27:25Z``)."""
    if not isinstance(value, str):
        number = read_number(value)
        if abs(number) > ceilings.MOMENT:
            raise MalformedTick(f"expected Unix seconds, found {describe(value)}")
        return number
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise MalformedTick(f"expected seconds or an RFC 3339 time, found {describe(value)}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# --- records: one table per reading, used in both directions ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a record: how it is read and written. ``default`` is what a missing one means."""

    name: str
    read: Callable[[object], Any]
    write: Callable[[Any], object] | None = None  # None = as it is
    required: bool = False
    default: object = None  # not written


def fields(
    read: Callable[[object], Any], *names: str, required: bool = False, default: object = None
) -> tuple[Field, ...]:
    """Several fields of one kind."""
    return tuple(Field(name, read, required=required, default=default) for name in names)


def decode(cls: Callable[..., T], table: tuple[Field, ...], entry: object, where: str) -> T:
    """``cls`` from a JSON object. Raises ``MalformedTick`` that names ``where`` and the key."""
    body = read_object(entry)
    values: dict[str, Any] = {}
    for item in table:
        raw = body.get(item.name)
        if raw is None:
            if item.required:
                raise MalformedTick(f"{where}: {item.name!r} is missing")
            continue
        try:
            values[item.name] = item.read(raw)
        except MalformedTick as error:
            deeper = str(error).startswith((".", "["))
            raise MalformedTick(f"{where}.{item.name}{'' if deeper else ': '}{error}") from error
    return cls(**values)


def encode(table: tuple[Field, ...], record: object) -> dict[str, object]:
    """The JSON object of a record, without what is unknown."""
    body: dict[str, object] = {}
    for item in table:
        value = getattr(record, item.name)
        if item.required or (value is not None and value != item.default):
            body[item.name] = value if item.write is None else item.write(value)
    return body
