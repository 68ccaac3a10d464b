"""A stand-in ``libamd_smi.so`` behind the real ``amdsmi`` package, and a child process that reads through both.

The package binds every symbol at import, so the list of symbols is taken from the installed wrapper.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("smi_stub.c")
ROOT = Path(__file__).parents[5]


def wrapper_symbols() -> list[str]:
    """Every function that the installed wrapper binds at import."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec.origin is not None, "the tests need the amdsmi package (extra: dev)"
    text = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", text)))


def build(directory: Path, missing: Iterable[str] = ()) -> Path:
    """Compile the library into ``directory``/lib, without the symbols in ``missing``. Returns ``directory``, which
    is what ``ROCM_PATH`` names.
    """
    library = directory / "lib"
    library.mkdir(parents=True)
    text = SOURCE.read_text(encoding="utf-8")
    defined = set(re.findall(r"^int (\w+)\(", text, re.M))
    others = [name for name in wrapper_symbols() if name not in defined and name not in missing]
    generated = directory / "stub.c"
    generated.write_text(text + "".join(f"int {name}(void) {{ return 2; }}\n" for name in others), encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library / "libamd_smi.so", generated], check=True)
    return directory


@dataclass
class SmiDevice:
    """What the library says of one device: numbers, "-" (not supported) or "!30" (that status)."""

    bus: str
    total_bytes: object = "-"
    used_bytes: object = "-"
    total_mib: object = "-"
    used_mib: object = "-"
    gfx: object = "-"
    current_watts: object = "-"
    socket_watts: object = "-"
    average_watts: object = "-"
    limit_watts: object = "-"
    cap: object = "-"

    def line(self) -> str:
        return " ".join(["device", self.bus, *(str(getattr(self, name)) for name in list(self.__dict__)[1:])])


def write(path: Path, devices: Iterable[SmiDevice], version: tuple[int, int, int] = (26, 0, 2), init: int = 0) -> None:
    """What the library says from now on."""
    lines = [f"version {version[0]} {version[1]} {version[2]}", f"init {init}", *(d.line() for d in devices)]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.rename(path)


def readings(rocm: Path, world: Path, sysfs: Path, times: int = 1, step: float = 31.0) -> list[dict[str, Any]]:
    """Readings of an ``AmdSource`` in a process of its own, ``step`` seconds of its clock apart. ``log``: what was
    logged so far. The process may print nothing else.
    """
    environ = {**os.environ, "ROCM_PATH": str(rocm), "KVP_SMI_WORLD": str(world)}
    environ.pop("ROCM_HOME", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.sources.gpu.amd.smi_stub.child", str(sysfs), str(times), str(step)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
