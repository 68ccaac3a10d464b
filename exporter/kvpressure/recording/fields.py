"""Values and records of a recording as JSON: what a field may contain, and one line for what it may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvpressure.model import ceilings
from kvpressure.parsed import moment
from kvpressure.printable import visible

_MAX_DIGITS: Final = 18
_SHOWN: Final = 40  # characters of a wrong value, or of a key

T = TypeVar("T")
Key = TypeVar("Key")
Read = Callable[[object], T]
"""Reads a JSON value. Raises ``MalformedTick``."""


class MalformedTick(ValueError):
    """One line cannot be used; the text names the key and what was expected."""


def describe(value: object) -> str:
    """A wrong value on one line, and not all of a long one."""
    if isinstance(value, int) and abs(value) > ceilings.COUNT:
        return f"{'-' if value < 0 else ''}1e{int(math.log10(abs(value)))}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _wrong(expected: str, value: object) -> MalformedTick:
    return MalformedTick(f"expected {expected}, found {describe(value)}")


def at(where: str, read: Read[T], value: object) -> T:
    """``value`` as read, with ``where`` in front of an error's place."""
    try:
        return read(value)
    except MalformedTick as error:
        deeper = str(error).startswith((".", "["))
        raise MalformedTick(f"{where}{'' if deeper else ': '}{error}") from error


# --- plain values -----------------------------------------------------------------------------------------------


def _of_type(kind: type[T], words: str) -> Read[T]:
    def read(value: object) -> T:
        if not isinstance(value, kind):
            raise _wrong(words, value)
        return value

    return read


def _within(number: Callable[[object, float, float], T | None], words: str, most: float, least: float = 0.0) -> Read[T]:
    def read(value: object) -> T:
        found = number(value, most, least)
        if found is None:
            raise _wrong(words, value)
        return found

    return read


read_flag: Final = _of_type(bool, "true or false")
read_object: Final[Read[Mapping[str, Any]]] = _of_type(dict, "an object")
read_list: Final[Read[list[Any]]] = _of_type(list, "a list")
_read_str: Final = _of_type(str, "text")

read_whole: Final = _within(ceilings.whole, f"a whole number up to {ceilings.COUNT}", ceilings.COUNT, -ceilings.COUNT)
read_amount: Final = _within(ceilings.whole, "a whole number from 0", ceilings.COUNT)
"""A size or a count."""
read_level: Final = _within(ceilings.number, f"a number from 0 to {ceilings.SECONDS:g}", ceilings.SECONDS)
"""A power, a time that passed."""
read_ratio: Final = _within(ceilings.number, f"a number from 0 to {ceilings.ACTIVITY:g}", ceilings.ACTIVITY)
"""A share of time or of memory."""
read_time: Final = _within(ceilings.number, "Unix seconds", math.nextafter(ceilings.MOMENT, 0))
"""Unix seconds up to the year 9999: what lies beyond is no time, and no database takes it."""
_read_seconds: Final = _within(ceilings.number, "Unix seconds", ceilings.MOMENT, -ceilings.MOMENT)


def read_text(value: object) -> str:
    """Text. JSON can say what no text holds and no output can write, half a surrogate pair: that becomes ``?``."""
    text = _read_str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()


def read_name(value: object) -> str:
    """A name as it may be shown: one line, nothing that a terminal obeys."""
    return visible(read_text(value))


def read_moment(value: object) -> float:
    """Unix seconds, or a time as Kubernetes writes it (``2023-11-14T22:27:25Z``)."""
    if not isinstance(value, str):
        return _read_seconds(value)
    time = moment(value)
    if time is None:
        raise _wrong("seconds or an RFC 3339 time", value)
    return time


# --- lists and objects ------------------------------------------------------------------------------------------


def list_of(read: Read[T]) -> Read[tuple[T, ...]]:
    """A reader of lists."""
    return lambda value: tuple(at(f"[{place}]", read, item) for place, item in enumerate(read_list(value)))


def map_of(read: Read[T], key: Callable[[str], Key]) -> Read[dict[Key, T]]:
    """A reader of objects whose keys are content, read by ``key``."""
    return lambda value: {
        key(name): at(f".{visible(name[:_SHOWN])}", read, item) for name, item in read_object(value).items()
    }


def number_key(text: str) -> int:
    """A whole number (pid, XID, batch size) that JSON writes as text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise _wrong("whole numbers as keys", text)
    return int(text)


def read_pair(value: object) -> tuple[str, str]:
    """(namespace, pod)."""
    names = read_texts(value)
    if len(names) != 2:
        raise _wrong("a namespace and a pod", value)
    return names[0], names[1]


read_texts: Final = list_of(read_text)
read_names: Final = list_of(read_name)
read_counts: Final = map_of(read_amount, read_text)


# --- records: one table per reading, used in both directions ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a record: how it is read and written. ``default`` is what a missing one means."""

    name: str
    read: Read[Any]
    write: Callable[[Any], object] | None = None  # None = as it is
    required: bool = False
    default: object = None  # not written


def fields(read: Read[Any], *names: str, required: bool = False, default: object = None) -> tuple[Field, ...]:
    """Several fields of one kind."""
    return tuple(Field(name, read, required=required, default=default) for name in names)


def by_number(name: str, read: Read[Any]) -> Field:
    """A field with values by number."""
    return Field(
        name,
        map_of(read, number_key),
        lambda values: {str(number): value for number, value in values.items()},
        default={},
    )


def records(name: str, build: Callable[..., Any], table: tuple[Field, ...]) -> Field:
    """A field with a list of records, each made by ``build``."""
    return Field(name, list_of(record(build, table)), lambda listed: [encode(table, one) for one in listed], default=())


def record(build: Callable[..., T], table: tuple[Field, ...]) -> Read[T]:
    """A reader of records: ``build`` gets the fields that are there."""
    read = values_of(table)
    return lambda value: build(**read(value))


def values_of(table: tuple[Field, ...]) -> Read[dict[str, Any]]:
    """A reader of the fields of a record that are there, by name."""

    def read(value: object) -> dict[str, Any]:
        body, values = read_object(value), {}
        for item in table:
            raw = body.get(item.name)
            if raw is not None:
                values[item.name] = at(f".{item.name}", item.read, raw)
            elif item.required:
                raise MalformedTick(f"{item.name!r} is missing")
        return values

    return read


def encode(table: tuple[Field, ...], record: object) -> dict[str, object]:
    """The JSON object of a record, without what is unknown."""
    body: dict[str, object] = {}
    for item in table:
        value = getattr(record, item.name)
        if item.required or (value is not None and value != item.default):
            body[item.name] = value if item.write is None else item.write(value)
    return body
