"""Reads the kubelet's ``ListPodResourcesResponse`` (PodResources API v1): only the fields that name devices.

The wire format is small, and the protobuf library would need more memory than the answer. Field numbers are those of
``pkg/apis/podresources/v1/api.proto`` of kubernetes/kubelet; unknown fields are skipped, as protobuf does. Every byte
is read once per level of nesting, and there are four.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_FIELDS: Final = 200_000
"""Fields read in one answer; a node of 500 pods has some thousands."""

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_MAX_VARINT_BYTES: Final = 10
_MAX_FIELD_NUMBER: Final = (1 << 29) - 1


class MessageError(ValueError):
    """Bytes that are no valid message."""


class TooManyFieldsError(MessageError):
    """More fields than ``MAX_FIELDS``."""


Pairs = tuple[tuple[str, str], ...]


class ContainerResources(NamedTuple):
    """Devices of one container. ``devices``: (resource name, id) of device plugins; ``claimed``: (driver, device) of
    DRA.
    """

    namespace: str
    pod: str
    name: str
    devices: Pairs
    claimed: Pairs


def read_containers(answer: bytes) -> Iterator[ContainerResources]:
    """The containers of an answer, one at a time. Raises ``MessageError``."""
    reader = _MessageReader(answer)
    for span in reader.spans(0, len(answer), 1)[1]:
        yield from reader.pod(*span)


class _MessageReader:
    """Reads one answer and counts its fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0

    def pod(self, start: int, end: int) -> Iterator[ContainerResources]:
        found = self.spans(start, end, 1, 2, 3)
        namespace, name = self._last(found[2]), self._last(found[1])
        for first, last in found[3]:
            parts = self.spans(first, last, 1, 2, 5)
            devices = tuple(pair for span in parts[2] for pair in self._devices(*span))
            resources = [span for dynamic in parts[5] for span in self.spans(*dynamic, 4)[4]]
            claimed = tuple(self._claimed(*span) for span in resources)
            yield ContainerResources(namespace, name, self._last(parts[1]), devices, claimed)

    def _devices(self, start: int, end: int) -> list[tuple[str, str]]:
        found = self.spans(start, end, 1, 2)
        resource = self._last(found[1])
        return [(resource, self._text(*span)) for span in found[2]]

    def _claimed(self, start: int, end: int) -> tuple[str, str]:
        found = self.spans(start, end, 2, 4)
        return self._last(found[2]), self._last(found[4])

    def _last(self, spans: list[tuple[int, int]]) -> str:
        """The last of several texts, "" without one; all are validated, as protobuf does."""
        return [self._text(*span) for span in spans][-1] if spans else ""

    def _text(self, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError as error:
            raise MessageError("text that is not UTF-8") from error

    def spans(self, start: int, end: int, *wanted: int) -> dict[int, list[tuple[int, int]]]:
        """Positions of the texts and messages with the field numbers ``wanted`` between ``start`` and ``end``."""
        found: dict[int, list[tuple[int, int]]] = {number: [] for number in wanted}
        groups: list[int] = []
        at = start
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise TooManyFieldsError(f"more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, end)
            number, kind = tag >> 3, tag & 7
            if number > _MAX_FIELD_NUMBER or (number == 0 and not groups):  # protobuf allows 0 inside skipped groups
                raise MessageError("no such field number")
            first = at
            if kind == _BYTES:
                length, first = self._varint(at, end)
                at = first + length
                if number in found and not groups:
                    found[number].append((first, at))
            else:
                at = self._skip(number, kind, at, end, groups)
            if at > end:
                raise MessageError("cut off")
        if groups:
            raise MessageError("a group without an end")
        return found

    def _skip(self, number: int, kind: int, at: int, end: int, groups: list[int]) -> int:
        """Where the next field begins. ``groups``: the open groups, which may nest."""
        if kind == _VARINT:
            return self._varint(at, end)[1]
        if kind == _FIXED64:
            return at + 8
        if kind == _FIXED32:
            return at + 4
        if kind == _GROUP:
            groups.append(number)
        elif kind != _GROUP_END or not groups or groups.pop() != number:
            raise MessageError("no such field")
        return at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """(number at ``at``, where it ends)."""
        value = 0
        for place in range(_MAX_VARINT_BYTES):
            if at + place >= end:
                raise MessageError("cut off")
            byte = self._data[at + place]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value, at + place + 1
        raise MessageError("a number without an end")
