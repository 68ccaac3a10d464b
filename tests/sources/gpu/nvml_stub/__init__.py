"""A stand-in NVIDIA driver for tests: a real ``libnvidia-ml.so.1``, compiled here, that tells what a file says.

The binding under test is the real ``pynvml``; it loads its library by the linker's path, so whatever uses it runs
in a child process with ``environment(...)``. The file may change while the child runs. Typical use::

    library = build(tmp_path)                       # session fixture ``nvml_library`` does this once
    world = World(gpus=[Gpu(), Gpu(codes={"nvmlDeviceGetMemoryInfo": 15})])
    write(tmp_path / "world", world)
    subprocess.Popen([...], env=environment(library, tmp_path / "world"))

``Child`` runs an ``NvidiaSource`` in such a process and gives its readings back as parsed JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

GIB = 1024**3
SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"

Processes = Iterable[tuple[int, int | None]]


@dataclass
class Mig:
    """A MIG instance. Fields set to None are answered with NOT_SUPPORTED."""

    uuid: str
    name: str | None = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    gi: int | None = 1
    ci: int | None = 0
    start: int | None = 0
    memory_total: int | None = 10 * GIB
    memory_free: int | None = 4 * GIB
    processes: Processes | None = ()
    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None
    codes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Gpu:
    """One GPU. Fields set to None are answered with NOT_SUPPORTED; ``uuid`` None = derived from the index.

    ``codes`` gives return codes by function name ("all" = every call), ``hangs`` seconds that a call blocks.
    ``migs`` may hold None for an empty slot.
    """

    uuid: str | None = None
    name: str | None = "NVIDIA H100 80GB HBM3"
    minor: int | None = None
    bus: str | None = None
    memory_total: int | None = 80 * GIB
    memory_free: int | None = 30 * GIB
    utilization: int | None = 70
    memory_utilization: int | None = 40
    power_mw: int | None = 350_000
    power_limit_mw: int | None = 700_000
    clocks_reasons: int | None = 0
    processes: Processes | None = ()
    mps_processes: Processes | None = None
    mig: int | None = 0
    max_mig: int | None = None
    migs: list[Mig | None] = field(default_factory=list)
    gpm: int | None = None
    gpm_status: int | None = None
    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None
    event_types: int | None = None
    codes: Mapping[str, int] = field(default_factory=dict)
    hangs: Mapping[str, float] = field(default_factory=dict)


@dataclass
class World:
    """What the stub driver tells. ``count`` None = as many as ``gpus``; a None in ``gpus`` is a slot that is gone."""

    gpus: list[Gpu | None] = field(default_factory=list)
    driver_version: str | None = "580.65.06"
    count: int | None = None
    epoch: int = 0
    codes: Mapping[str, int] = field(default_factory=dict)
    hangs: Mapping[str, float] = field(default_factory=dict)
    events: list[tuple[int, int, int]] = field(default_factory=list)

    def render(self) -> str:
        """The world file's text; the keys are described in ``nvml_stub.c``."""
        count = len(self.gpus) if self.count is None else self.count
        lines = [f"count={count}", f"epoch={self.epoch}"]
        if self.driver_version is not None:
            lines.append(f"driver_version={self.driver_version}")
        lines += [f"{name}={code}" for name, code in self.codes.items()]
        lines += [f"hang.{name}={seconds}" for name, seconds in self.hangs.items()]
        lines += [f"event.{i}={gpu}:{kind}:{data}" for i, (gpu, kind, data) in enumerate(self.events)]
        for index, gpu in enumerate(self.gpus):
            if gpu is not None:
                lines += _gpu_lines(index, gpu)
        return "\n".join(lines) + "\n"


def kept(path: Path) -> World:
    """The world of a file that ``make test-gpu`` made of a real node (``lab/gpu/inventory.py``)."""
    told = json.loads(path.read_text())
    gpus: list[Gpu | None] = [
        Gpu(**{**gpu, "migs": [None if mig is None else Mig(**mig) for mig in gpu.get("migs", ())]})
        for gpu in told["gpus"]
    ]
    return World(gpus=gpus, driver_version=told["driver_version"])


def gpu_uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


_NOT_FIELDS = {"codes", "hangs", "migs", "uuid", "minor", "bus"}


def _value(value: object) -> str:
    if isinstance(value, (int, float, str)):
        return str(value)
    assert isinstance(value, Iterable)
    return ",".join(f"{pid}:{'na' if used is None else used}" for pid, used in value)


def _gpu_lines(index: int, gpu: Gpu) -> list[str]:
    prefix = f"gpu.{index}."
    lines = [
        f"{prefix}uuid={gpu.uuid or gpu_uuid(index)}",
        f"{prefix}minor={index if gpu.minor is None else gpu.minor}",
        f"{prefix}bus={gpu.bus or f'00000000:{index + 1:02X}:00.0'}",
    ]
    lines += _field_lines(prefix, gpu)
    lines += [f"{prefix}hang.{name}={seconds}" for name, seconds in gpu.hangs.items()]
    for slot, mig in enumerate(gpu.migs):
        if mig is not None:
            lines.append(f"{prefix}mig.{slot}.uuid={mig.uuid}")
            lines += _field_lines(f"{prefix}mig.{slot}.", mig)
    return lines


def _field_lines(prefix: str, device: Gpu | Mig) -> list[str]:
    lines = [
        f"{prefix}{f.name}={_value(value)}"
        for f in fields(device)
        if f.name not in _NOT_FIELDS and (value := getattr(device, f.name)) is not None
    ]
    return lines + [f"{prefix}{name}={code}" for name, code in device.codes.items()]


def build(directory: Path, missing: Iterable[str] = ()) -> Path:
    """Compile the library into ``directory`` without the symbols in ``missing`` (an older driver); its path."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY
    version_script = directory / "symbols.map"
    hidden = "".join(f" {name};" for name in missing)
    version_script.write_text("{ global: *;" + (f" local:{hidden}" if hidden else "") + " };\n")
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-lpthread"]
    command = ["cc", f"-Wl,--version-script={version_script}", "-o", library, SOURCE, *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def write(path: Path, world: World | str) -> None:
    """Replace the world file at once, so that the stub never reads half of it."""
    text = world if isinstance(world, str) else world.render()
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)


def environment(library: Path | None, world: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that is to see the stub; ``library`` None = a node without the library."""
    env = dict(os.environ if base is None else base)
    env["NVML_STUB_WORLD"] = str(world)
    if library is not None:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(library.parent), env.get("LD_LIBRARY_PATH")]))
    return env
