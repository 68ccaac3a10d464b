"""The reader of PodResources messages beside protobuf's own: same answer, same refusals, bounded work."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes import podresources_message
from kvpressure.sources.kubernetes.podresources_message import (
    ContainerResources,
    read_containers,
)
from tests.sources.kubernetes.podresources_api import api_pb2

pytestmark = pytest.mark.slow


def by_protobuf(answer: Any) -> list[ContainerResources]:
    """The same, read by the library."""
    return [
        ContainerResources(
            pod.namespace,
            pod.name,
            container.name,
            tuple((d.resource_name, name) for d in container.devices for name in d.device_ids),
            tuple(
                (c.driver_name, c.device_name)
                for resource in container.dynamic_resources
                for c in resource.claim_resources
            ),
        )
        for pod in answer.pod_resources
        for container in pod.containers
    ]


class _Group(Exception):
    """A group, which protobuf reads."""


def _read(data: bytes) -> list[ContainerResources]:
    try:
        return list(read_containers(data))
    except SourceError as error:
        raise (_Group if error.detail == "a group" else error) from None


def agrees(data: bytes) -> None:
    """What protobuf accepts is read alike, but for groups, which proto3 has not; what it refuses may pass only in parts
    that are not read.
    """
    try:
        expected = by_protobuf(api_pb2.ListPodResourcesResponse.FromString(data))
    except DecodeError:
        try:
            list(read_containers(data))
        except SourceError:
            return
        return
    with suppress(_Group):
        assert _read(data) == expected


@pytest.mark.attack("any bytes as the kubelet's answer", "read as protobuf reads it, or refused")
@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_does_or_refused(data: bytes) -> None:
    agrees(data)


def test_an_answer_of_too_many_fields_is_given_up() -> None:
    with pytest.raises(SourceError, match="too_large"):
        list(read_containers(b"\x0a\x00" * (podresources_message.MAX_FIELDS + 1)))


@pytest.mark.parametrize(
    "piece",
    [
        b"\x0a\x00",
        b"\x13",
        b"\x12" + b"\x7f" + bytes(127),
        b"\x0a\x04\x1a\x02\x0a\x00",
        b"\x08" + b"\xff" * 9 + b"\x01",
    ],
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
