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
    """Offers GPUs to a kubelet. As real plugins do, it watches the kubelet's socket: a kubelet that starts removes all
    sockets beside its own, so that the plugin serves on a new one and registers anew.
    """

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._kubelet = folder / "kubelet.sock"
        self._socket = folder / _PLUGIN
        self._uuids = uuids
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_registered, daemon=True)
        self._offer: _Offer | None = None

    def start(self) -> None:
        """Offer the GPUs from now on."""
        self._thread.start()

    def stop(self) -> None:
        """No more GPUs."""
        self._stopped.set()
        self._thread.join()
        self._end_offer()

    def _end_offer(self) -> None:
        if self._offer is not None:
            self._offer.end()
            self._offer = None

    def _keep_registered(self) -> None:
        known: tuple[int, int] | None = None
        while not self._stopped.wait(0.2):
            present = _identity(self._kubelet)
            if present is None or (present == known and self._socket.exists()):
                continue
            self._end_offer()
            self._offer = _Offer(self._socket, self._uuids)
            known = present if self._register() else None

    def _register(self) -> bool:
        request = text(1, "v1beta1") + text(2, _PLUGIN) + text(3, RESOURCE)
        try:
            with grpc.insecure_channel(f"unix:{self._kubelet}") as channel:
                channel.unary_unary("/v1beta1.Registration/Register", request_serializer=bytes)(request, timeout=10)
        except grpc.RpcError:  # it still starts, or has ended
            return False
        return True


class _Offer:
    """A server that lists the GPUs to one kubelet."""

    def __init__(self, path: Path, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._ended = threading.Event()
        same = {"request_deserializer": bytes, "response_serializer": bytes}
        methods = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._devices, **same),
            "Allocate": grpc.unary_unary_rpc_method_handler(lambda *_: text(1, b""), **same),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(lambda *_: b"", **same),
        }
        self._server: Any = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def end(self) -> None:
        """Stop serving, with the list that the kubelet still reads."""
        self._ended.set()
        self._server.stop(None).wait()

    def _devices(self, *_: object) -> Iterator[bytes]:
        yield b"".join(text(1, text(1, uuid) + text(2, "Healthy")) for uuid in self._uuids)
        self._ended.wait()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which socket lies at a path; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns
