"""A device plugin of the kubelet for GPUs that only the stand-in driver knows: ``nvidia.com/gpu``.

The messages are few and small, so that they are written by hand (k8s.io/kubelet,
``pkg/apis/deviceplugin/v1beta1/api.proto``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

RESOURCE: Final = "nvidia.com/gpu"
_SERVICE: Final = "v1beta1.DevicePlugin"
_PLUGIN: Final = "stand-in.sock"


def text(field: int, value: str | bytes) -> bytes:
    """A length-delimited field of less than 16384 bytes."""
    raw = value.encode() if isinstance(value, str) else value
    size = len(raw)
    length = bytes([size]) if size < 128 else bytes([size & 0x7F | 0x80, size >> 7])
    return bytes([field << 3 | 2]) + length + raw


class DevicePlugin:
    """Offers GPUs to a kubelet; ``register`` again after the kubelet was started anew."""

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._folder = folder
        self._uuids = uuids
        self._stopped = threading.Event()
        self._server: Any = None

    def start(self) -> None:
        """Serve on a socket beside the kubelet's and make it known."""
        same = {"request_deserializer": bytes, "response_serializer": bytes}
        methods = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._devices, **same),
            "Allocate": grpc.unary_unary_rpc_method_handler(lambda *_: text(1, b""), **same),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
        }
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self._server.add_insecure_port(f"unix:{self._folder / _PLUGIN}")
        self._server.start()
        request = text(1, "v1beta1") + text(2, _PLUGIN) + text(3, RESOURCE)
        with grpc.insecure_channel(f"unix:{self._folder / 'kubelet.sock'}") as channel:
            channel.unary_unary(
                "/v1beta1.Registration/Register", request_serializer=bytes, response_deserializer=bytes
            )(request, timeout=30)

    def stop(self) -> None:
        """No more GPUs."""
        self._stopped.set()
        self._server.stop(None)

    def _devices(self, *_: object) -> Iterator[bytes]:
        yield b"".join(text(1, text(1, uuid) + text(2, "Healthy")) for uuid in self._uuids)
        self._stopped.wait()
