"""Reads the kubelet's ``ListPodResourcesResponse`` (PodResources API v1): only the fields that name devices.

The wire format is small, and the protobuf library would need more memory than the answer. Field numbers are those of
``pkg/apis/podresources/v1/api.proto`` of kubernetes/kubelet; unknown fields are skipped. Every byte
is read once per level of nesting, and there are four.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvpressure.sources.base import SourceError

MAX_FIELDS: Final = 200_000
"""Fields read in one answer; a node of 500 pods has some thousands."""

_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}  # bytes by wire type
_GROUPS: Final = (3, 4)  # of old messages; proto3 has none
_MAX_VARINT_BYTES: Final = 10
_MAX_FIELD_NUMBER: Final = (1 << 29) - 1


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
    """The containers of an answer, one at a time. Raises ``SourceError``."""
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
            raise SourceError("bad_answer", "text that is not UTF-8") from error

    def spans(self, start: int, end: int, *wanted: int) -> dict[int, list[tuple[int, int]]]:
        """Positions of the texts and messages with the field numbers ``wanted`` between ``start`` and ``end``."""
        found: dict[int, list[tuple[int, int]]] = {number: [] for number in wanted}
        at = start
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise SourceError("too_large", f"more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, end)
            number, kind = tag >> 3, tag & 7
            if not 0 < number <= _MAX_FIELD_NUMBER:
                raise SourceError("bad_answer", "no such field number")
            if kind == _BYTES:
                length, first = self._varint(at, end)
                at = first + length
                if number in found:
                    found[number].append((first, at))
            elif kind == _VARINT:
                _, at = self._varint(at, end)
            elif kind in _FIXED:
                at += _FIXED[kind]
            else:
                raise SourceError("bad_answer", "a group" if kind in _GROUPS else "no such field")
            if at > end:
                raise SourceError("bad_answer", "cut off")
        return found

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """(number at ``at``, where it ends)."""
        value = 0
        for place in range(_MAX_VARINT_BYTES):
            if at + place >= end:
                raise SourceError("bad_answer", "cut off")
            byte = self._data[at + place]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value, at + place + 1
        raise SourceError("bad_answer", "a number without an end")
