"""Lists read item by item: the same as ``json.loads``, however the bytes are cut; bounded, linear, and strict."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvpressure.sources.kubernetes.json_list import CHUNK, ListError, read_list


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def read(data: bytes, size: int = CHUNK, most: int = 1 << 20) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    found: list[dict[str, Any]] = []

    reader = read_list(cut(data, size), most)
    while True:
        try:
            found.append(next(reader))
        except StopIteration as end:
            return found, end.value


def test_what_is_no_list() -> None:
    ends = (b"null}", b"[1]}", b"[{},]}", b"[{}{}]}", b"[]}x", b"[]", b"[],}", b'[{"a":"\xff"}]}')
    bombs = (b'[{"a":' + b"[" * 100_000, b'[{"a":' + b"1" * 5_000 + b"}]}")
    begun = (b'{"metadata":{},"items":' + end for end in (*ends, *bombs))
    for data in (b"", b"[]", b"{}", b'{"items":[]}', b'{"metadata":{}}', *begun):
        with pytest.raises(ListError):
            read(data)


def test_one_value_is_bounded_and_the_list_is_not() -> None:
    item = {"a": "x" * 900}
    data = json.dumps({"metadata": {}, "items": [item] * 500}).encode()
    assert len(read(data, 100, most=1000)[0]) == 500
    for damaged in (data.replace(b"x" * 900, b"x" * 9000, 1), data.replace(b"{}", b'{"a":"' + b"x" * 9000 + b'"}', 1)):
        with pytest.raises(ListError):
            read(damaged, 100, most=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", [b'"x",', b"[1],", b'{"a":{}},', b'"' + b"\\\\" * 40 + b'",', b'"\xc3\xa4\xe2\x82\xac",']
)
def test_the_time_is_linear_in_the_size_of_an_item(piece: bytes) -> None:
    def seconds(times: int) -> float:
        data = b'{"metadata":{},"items":[{"a":[' + piece * times + b"1]}]}"
        gc.collect()
        gc.disable()  # it looks at all that is alive, again and again
        began = time.process_time()
        try:
            read(data, 1024, most=len(data))
            return time.process_time() - began
        finally:
            gc.enable()

    times = 400_000 // len(piece)
    small, large = min(seconds(times // 16) for _ in range(3)), min(seconds(times) for _ in range(3))
    assert large < 16 * small * 4 + 0.01
