"""The nodes of the matrix: what the stub driver or the sysfs tree of each kind of GPU tells.

Figures are those of the products where they matter (memory, power limits, partitions); load figures are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.gpu.serving import without_gpu_libraries
from tests.sources.gpu.amd import smi_stub, trees
from tests.sources.gpu.amd.smi_stub import SmiDevice
from tests.sources.gpu.nvml_stub import GIB, Gpu, Mig, World, environment, kept, write

NEWER = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlGpmQueryDeviceSupport",
)
"""Symbols that a driver of the 450 and 470 branches does not have."""

GPU_LOST = {"all": 15}
XID = 8
"""NVML's event type of XIDs."""

Build = Callable[[tuple[str, ...]], Path]
"""Gives the stub NVML without these symbols."""


@dataclass(frozen=True)
class Node:
    """One node: a world behind NVML, or a sysfs tree with AMD's GPUs (``smi``: AMD's library beside it).

    ``ready`` is text that stands on the page once everything has been read that is to be seen. ``then`` is a second
    world that comes when the first is on the page, ``then_ready`` the texts that show all of it.
    """

    ready: str = "kvpressure_gpu_up"
    world: World | None = None
    then: World | None = None
    then_ready: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    tree: Callable[[Path], object] | None = None
    smi: tuple[SmiDevice, ...] = ()
    arguments: tuple[str, ...] = ()

    def environment(self, where: Path, nvml: Build, rocm: Callable[[], Path]) -> dict[str, str]:
        """Put worlds and the tree under ``where``; the environment that leads to them."""
        environ = without_gpu_libraries()
        (where / "sys").mkdir()
        if self.tree is not None:
            self.tree(where / "sys")
            pci(where / "sys", "0x1002", "0x120000")
        if self.smi:
            environ |= {"ROCM_PATH": str(rocm()), "KVP_SMI_WORLD": str(where / "smi")}
            smi_stub.write(where / "smi", self.smi)
        if self.world is not None:
            pci(where / "sys", "0x10de", "0x030200")
            write(where / "world", self.world)
            environ = environment(nvml(self.missing), where / "world", environ)
        return environ


def pci(sysfs: Path, vendor: str, kind: str) -> None:
    """A device of this class on the PCI bus."""
    device = sysfs / "bus/pci/devices/0000:05:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


def h100(**changes: object) -> Gpu:
    return Gpu(event_types=XID, **{"processes": ((4711, 48 * GIB),), **changes})


def mig_h100() -> Gpu:
    """An H100 cut into one half and two small instances, one slot empty; nobody asks it for utilization."""
    small, busy = {"memory_free": 6 * GIB}, {"sm": 30, "tensor": 5, "dram": 20}
    return h100(
        mig=1,
        utilization=None,
        gpm=1,
        processes=(),
        memory_free=36 * GIB,
        migs=[
            Mig(
                "MIG-11111111-0000-4000-8000-000000000001",
                name="NVIDIA H100 80GB HBM3 MIG 3g.40gb",
                gi=1,
                memory_total=40 * GIB,
                memory_free=4 * GIB,
                processes=((11, 35 * GIB),),
                sm=80,
                tensor=12,
                dram=70,
            ),
            Mig("MIG-22222222-0000-4000-8000-000000000002", gi=7, **small, processes=((12, 3 * GIB),), **busy),
            None,
            Mig("MIG-33333333-0000-4000-8000-000000000003", gi=9, **small, processes=()),
        ],
    )


#: The GPU is off the bus: its XID is published at once, the loss with the next look at all GPUs.
LOST: Final = ('xid="79"', 'kvpressure_gpus_seen{vendor="nvidia"} 7.0')


def eight(lost: int | None = None) -> World:
    """Eight H100, one of them perhaps fallen off the bus, with the XID that says so."""
    gpus: list[Gpu | None] = [h100(codes=GPU_LOST if index == lost else {}) for index in range(8)]
    return World(gpus=gpus, events=[] if lost is None else [(lost, XID, 79)])


def smi_mi300x() -> SmiDevice:
    """The first device of ``trees.mi300x`` as AMD's library sees it."""
    return SmiDevice(
        "0000:05:00.0", total_bytes=trees.MI300X_VRAM, used_bytes=120 * GIB, gfx=55, current_watts=480, cap=650_000_000
    )


def mi300x_with_gaps(root: Path) -> object:
    """A card of which sysfs shows the size of its memory alone."""
    return trees.mi300x(root, 1, used=0, busy=None, power_file=None)


NODES = {
    "h100": Node(world=World(gpus=[h100()])),
    "h100_gpm": Node(
        "kvpressure_gpu_tensor_activity_ratio",
        arguments=("--nvidia.gpm",),
        world=World(gpus=[h100(gpm=1, sm=88, tensor=9.5, dram=76)]),
    ),
    "h100_mig": Node(world=World(gpus=[mig_h100(), h100()])),
    "h100_mig_gpm": Node(
        'kvpressure_gpu_tensor_activity_ratio{gpu="0",uuid="MIG-2',
        arguments=("--nvidia.gpm",),
        world=World(gpus=[mig_h100()]),
    ),
    "gb10_unified_memory": Node(
        world=World(
            gpus=[Gpu(name="NVIDIA GB10", memory_total=None, power_limit_mw=None, power_mw=38_000, clocks_reasons=4)]
        )
    ),
    "old_driver": Node(
        missing=NEWER,
        world=World(
            driver_version="450.248.02",
            gpus=[
                Gpu(
                    name="Tesla V100-SXM2-32GB",
                    memory_total=32 * GIB,
                    memory_free=2 * GIB,
                    power_mw=180_000,
                    power_limit_mw=300_000,
                    clocks_reasons=4,
                )
            ],
        ),
    ),
    "one_of_eight_lost": Node('kvpressure_gpu_up{gpu="7"', world=eight(), then=eight(lost=3), then_ready=LOST),
    "mi250x": Node(tree=trees.mi250x),
    "mi300x_spx": Node(tree=trees.mi300x),
    "mi300x_cpx": Node(tree=trees.mi300x_cpx),
    "radeon": Node(tree=trees.radeon),
    "mi300x_amdsmi": Node(tree=mi300x_with_gaps, smi=(smi_mi300x(),)),
}


def real(path: Path) -> Node:
    """A node that ``make test-gpu`` asked under load."""
    world = kept(path)
    active = any(gpu is not None and gpu.tensor is not None for gpu in world.gpus)
    return Node(
        "kvpressure_gpu_tensor_activity_ratio" if active else "kvpressure_gpu_up", world, arguments=("--nvidia.gpm",)
    )


NODES |= {path.stem: real(path) for path in sorted((Path(__file__).parents[1] / "fixtures/gpu").glob("*.json"))}
