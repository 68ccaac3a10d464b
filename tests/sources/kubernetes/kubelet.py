"""A PodResources server on a unix socket: real gRPC, the kubelet's own messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.sources.kubernetes.podresources_api import api_pb2

Devices = Mapping[str, Sequence[str]]


def claim(
    name: str,
    namespace: str = "inference",
    container: str = "vllm",
    devices: Devices | None = None,
    dra: Sequence[tuple[str, str]] = (),
) -> Any:
    """A pod with devices by resource name, and DRA devices as (driver, device name)."""
    return api_pb2.PodResources(
        name=name,
        namespace=namespace,
        containers=[
            api_pb2.ContainerResources(
                name=container,
                devices=[
                    api_pb2.ContainerDevices(resource_name=resource, device_ids=list(ids))
                    for resource, ids in (devices or {}).items()
                ],
                dynamic_resources=[
                    api_pb2.DynamicResource(
                        claim_name="claim",
                        claim_resources=[
                            api_pb2.ClaimResource(driver_name=driver, pool_name="node-1", device_name=device)
                            for driver, device in dra
                        ],
                    )
                ],
            )
        ],
    )


class FakeKubelet:
    """``with FakeKubelet(path) as kubelet: kubelet.pods = [claim(...)]``."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: list[Any] = []
        self.raw: bytes | None = None  # answer with these bytes
        self._server: Any = None

    def __enter__(self) -> FakeKubelet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on a new socket file as the kubelet does after a restart."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._list,
            request_deserializer=api_pb2.ListPodResourcesRequest.FromString,
            response_serializer=lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler}),)
        )
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self.socket.unlink(missing_ok=True)

    def _list(self, _request: object, _context: object) -> Any:
        return self.raw if self.raw is not None else api_pb2.ListPodResourcesResponse(pod_resources=self.pods)
