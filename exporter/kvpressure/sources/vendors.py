"""Names of a vendor's GPUs in Kubernetes and on the PCI bus, which other sources need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.model.readings import GpuReading


@dataclass(frozen=True, slots=True)
class OwnedDevice:
    """A GPU by its UUID. ``shared``: its id shows that it may be shared."""

    uuid: str
    shared: bool = False


OTHER_ACCELERATORS: Final = (
    "google.com/tpu",
    "habana.ai/gaudi",
    "aws.amazon.com/neuron",
    "huawei.com/",  # Ascend
    "ibm.com/spyre",
    "gpu.intel.com/",
    "volcano.sh/vgpu",
    "k8s.amazonaws.com/vgpu",
    "aliyun.com/gpu",
    "cambricon.com/",
    "hygon.com/",
    "iluvatar.ai/",
    "metax-tech.com/",
    "mthreads.com/",
)
"""Prefixes of Kubernetes resource names of devices that no source reads, and of schedulers that share GPUs."""

_NETWORK: Final = re.compile(r"[^/]*/(?:v?nic|hostdev|rdma.*)")


def is_network(resource: str) -> bool:
    """Whether a resource with a GPU vendor's prefix is a network adapter."""
    return _NETWORK.fullmatch(resource) is not None


FindDevice = Callable[[str, Sequence[GpuReading]], OwnedDevice | None]


@dataclass(frozen=True, slots=True)
class GpuVendor:
    """``resources``: prefixes of its Kubernetes resource names. ``dra_driver``: its driver for dynamic resource
    allocation. ``from_plugin`` finds the GPU of a device plugin's id (without sharing suffix), ``from_dra`` that of a
    DRA device; PCI addresses and UUIDs of known GPUs need neither.
    """

    resources: tuple[str, ...]
    dra_driver: str
    from_plugin: FindDevice
    from_dra: FindDevice
