"""The work of reading PodResources messages is bounded; what is read is compared with protobuf in ``tests/fuzz``."""

from __future__ import annotations

import time

import pytest

from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes import podresources_message
from kvpressure.sources.kubernetes.podresources_message import read_containers

pytestmark = pytest.mark.slow


def test_an_answer_of_too_many_fields_is_given_up() -> None:
    with pytest.raises(SourceError, match="too_large"):
        list(read_containers(b"\x0a\x00" * (podresources_message.MAX_FIELDS + 1)))


@pytest.mark.parametrize(
    "piece",
    [b"\x0a\x00", b"\x13", b"\x12\x7f" + bytes(127), b"\x0a\x04\x1a\x02\x0a\x00", b"\x08" + b"\xff" * 9 + b"\1"],
)
def test_the_time_is_linear_in_the_bytes(piece: bytes) -> None:
    def seconds(times: int) -> float:
        data = piece * times
        began = time.process_time()
        try:
            for _ in read_containers(data):
                pass
        except SourceError:
            pass
        return time.process_time() - began

    small, large = min(seconds(1_000) for _ in range(3)), min(seconds(8_000) for _ in range(3))
    assert large < 8 * small * 3 + 0.01
