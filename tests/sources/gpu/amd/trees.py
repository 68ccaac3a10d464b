"""sysfs trees of AMD nodes, shaped after the kernel's documentation of amdgpu and KFD.

File names, units and which part has which file follow Documentation/gpu/amdgpu (driver-misc, thermal) and
Documentation/ABI of the kernel; sizes and PCI ids are those of the products. Numbers that only identify something
(unique ids, gpu ids) are made up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
MI300X_VRAM = 206_141_652_992
MI250X_GCD_VRAM = 68_702_699_520
RADEON_VRAM = 25_753_026_560


@dataclass
class Card:
    """One PCI device. ``partitions`` > 1 = that many KFD nodes, the further ones on platform devices."""

    bus: str
    device_id: str = "0x74a1"
    vram: int = MI300X_VRAM
    used: int = 100 * GIB
    unique_id: str | None = "8f6c2a1d4e3b5a70"
    product: str | None = "AMD Instinct MI300X OAM"
    power_file: str | None = "power1_input"
    power: int = 612_000_000
    cap: int = 750_000_000
    busy: int | None = 97
    partitions: int = 1
    partition_used: tuple[int, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


@dataclass
class Tree:
    root: Path
    xcp_name: str = "amdgpu_xcp_{}"
    kfd: bool = True
    driver: str | None = "6.12.12"
    cards: int = 0
    renders: int = 128
    nodes: int = 0
    xcps: int = 0

    def __post_init__(self) -> None:
        self.write("class/drm/version", "drm 1.1.0 20060810")
        if self.driver is not None:
            (self.root / "module/amdgpu").mkdir(parents=True)
            if self.driver:
                self.write("module/amdgpu/version", self.driver)
        if self.kfd:
            self.write("class/kfd/kfd/topology/nodes/0/gpu_id", "0")  # the CPUs
            self.write("class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0")
            self.nodes = 1

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
        return target

    def add(self, card: Card) -> Path:
        """A card, its hwmon, its KFD nodes. Returns the device directory."""
        directory = self.root / "devices/pci0000:00" / card.bus
        relative = str(directory.relative_to(self.root))
        first_render = self._drm(relative)
        contents = {
            "vendor": "0x1002",
            "device": card.device_id,
            "mem_info_vram_total": str(card.vram),
            "mem_info_vram_used": str(card.used),
            "current_compute_partition": "CPX" if card.partitions > 1 else "SPX",
            "current_memory_partition": "NPS1",
        }
        if card.unique_id is not None:
            contents["unique_id"] = card.unique_id
        if card.product is not None:
            contents["product_name"] = card.product
        if card.busy is not None:
            contents["gpu_busy_percent"] = str(card.busy)
        if card.power_file is not None:
            contents[f"hwmon/hwmon{self.cards}/{card.power_file}"] = str(card.power)
            contents[f"hwmon/hwmon{self.cards}/power1_cap"] = str(card.cap)
            contents[f"hwmon/hwmon{self.cards}/name"] = "amdgpu"
        for name, text in {**contents, **card.files}.items():
            self.write(f"{relative}/{name}", text)
        for number in range(card.partitions):
            render = first_render if number == 0 else self._drm(self._platform())
            if self.kfd:
                self._node(card, number, render)
        return directory

    def _platform(self) -> str:
        name = self.xcp_name.format(self.xcps)
        self.xcps += 1
        (self.root / "devices/platform" / name).mkdir(parents=True)
        return f"devices/platform/{name}"

    def _drm(self, device: str) -> int:
        """A card and a render node below ``device``, linked from the class. Returns the render minor."""
        render = self.renders
        for name in (f"card{self.cards}", f"renderD{render}"):
            node = self.root / device / "drm" / name
            node.mkdir(parents=True)
            (node / "device").symlink_to("../..")
            (self.root / "class/drm" / name).symlink_to(os.path.relpath(node, self.root / "class/drm"))
        self.cards += 1
        self.renders += 1
        return render

    def _node(self, card: Card, partition: int, render: int) -> None:
        domain, bus, slot = card.bus.split(":")
        location = int(bus, 16) << 8 | int(slot.split(".")[0], 16) << 3 | partition
        top = f"class/kfd/kfd/topology/nodes/{self.nodes}"
        self.write(f"{top}/gpu_id", str(gpu_id(render)))
        self.write(
            f"{top}/properties",
            "\n".join(
                [
                    "cpu_cores_count 0",
                    "simd_count 152",
                    "vendor_id 4098",
                    f"device_id {int(card.device_id, 16)}",
                    f"location_id {location}",
                    f"domain {int(domain, 16)}",
                    f"drm_render_minor {render}",
                    f"unique_id {int(card.unique_id or '0', 16)}",
                    "local_mem_size 0",
                    "num_xcc 1",
                ]
            ),
        )
        self.write(
            f"{top}/mem_banks/0/properties",
            f"heap_type 1\nsize_in_bytes {card.vram // card.partitions}\nflags 0\nwidth 8192\nmem_clk_max 1300",
        )
        if card.partition_used:
            self.write(f"{top}/mem_banks/0/used_memory", str(card.partition_used[partition]))
        self.nodes += 1

    def process(self, pid: int, memory: dict[int, int]) -> None:
        """A KFD process and its device memory by render minor."""
        for render, used in memory.items():
            self.write(f"class/kfd/kfd/proc/{pid}/vram_{gpu_id(render)}", str(used))
            self.write(f"class/kfd/kfd/proc/{pid}/sdma_{gpu_id(render)}", "0")
        self.write(f"class/kfd/kfd/proc/{pid}/pasid", "32771")


def gpu_id(render: int) -> int:
    """KFD's id of the node with this render minor."""
    return 20_000 + 7 * render


def mi300x(root: Path, gpus: int = 8, **changes: object) -> Tree:
    tree = Tree(root)
    for number, bus in enumerate(("05", "27", "47", "65", "85", "a7", "c7", "e5")[:gpus]):
        tree.add(Card(f"0000:{bus}:00.0", unique_id=f"8f6c2a1d4e3b5a{number:02x}", **changes))
    return tree


def mi300x_cpx(root: Path, gpus: int = 1, **changes: object) -> Tree:
    """MI300X in CPX mode: eight partitions a card."""
    share = 12 * GIB
    values: dict[str, object] = {"partitions": 8, "partition_used": (share,) * 8, "used": 8 * share + GIB, **changes}
    return mi300x(root, gpus, **values)


def mi250x(root: Path) -> Tree:
    """One MI250X: two dies, each a PCI device of its own; power is told by the first die only."""
    tree = Tree(root)
    for number, (bus, power, cap) in enumerate((("c1", 310_000_000, 560_000_000), ("c6", 0, 0))):
        tree.add(
            Card(
                f"0000:{bus}:00.0",
                "0x7408",
                vram=MI250X_GCD_VRAM,
                used=(40 - number) * GIB,
                unique_id=f"2f1e0d9c8b7a695{number}",
                product="AMD INSTINCT MI250X",
                power_file="power1_average",
                power=power,
                cap=cap,
                busy=88 - 2 * number,
            )
        )
    return tree


def radeon(root: Path) -> Tree:
    """A Radeon RX 7900 XTX with the driver of the kernel's tree: no product name, no unique id, no KFD memory."""
    tree = Tree(root, driver="")
    tree.add(
        Card("0000:03:00.0", "0x744c", RADEON_VRAM, 2 * GIB, None, None, "power1_average", 54_000_000, 327_000_000, 12)
    )
    return tree
