"""The other GPU exporters that the benchmarks run beside this one, pinned, in a virtual environment under ``build/``.

All of them run on the stub NVIDIA driver of the tests, with every function that the binding knows (those that the tests
do not need answer "not supported", as a driver does).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.sources.gpu.nvml_stub import LIBRARY, SOURCE

VENV: Final = Path(__file__).parents[1] / "build" / "bench-compare"
GLANCES: Final = "[prometheus]\nhost=127.0.0.1\nport={port}\nprefix=glances\nlabels=src:glances\n"


@dataclass(frozen=True, slots=True)
class Contender:
    """An exporter: its pinned packages, and the command that serves on a port (it may write into a directory)."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[int, Path], list[str]]


def _tool(name: str) -> str:
    return str(VENV / "bin" / name)


def _nvitop(port: int, _: Path) -> list[str]:
    return [_tool("nvitop-exporter"), "--bind-address", "127.0.0.1", "--port", str(port)]


def _glances(port: int, directory: Path) -> list[str]:
    config = directory / "glances.conf"
    config.write_text(GLANCES.format(port=port))
    return [
        _tool("glances"),
        "-C",
        str(config),
        "--export",
        "prometheus",
        "--disable-plugin",
        "all",
        "--enable-plugin",
        "gpu",
        "--quiet",
        "--time",
        "1",
    ]


def _kvpressure(port: int, _: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        f"127.0.0.1:{port}",
        "--no-collector.engines",
        "--no-collector.amd",
    ]


NVITOP: Final = Contender("nvitop-exporter 1.7.2", ("nvitop-exporter==1.7.2",), _nvitop)
CONTENDERS: Final = (
    Contender("kvpressure, GPUs only", (), _kvpressure),
    NVITOP,
    Contender("Glances 4.5.8, its GPU plugin alone", ("glances==4.5.8", "nvidia-ml-py", "prometheus_client"), _glances),
    Contender(
        "four values a GPU, read on every scrape",
        ("nvidia-ml-py", "prometheus_client"),
        lambda port, _: [_tool("python"), str(Path(__file__).with_name("smallest_exporter.py")), str(port)],
    ),
)


def build_driver(directory: Path) -> Path:
    """The stub driver with every function of the binding; the library's path."""
    import pynvml

    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(str(pynvml.__file__)).read_text()))
    names |= {f"{name}{suffix}" for name in names for suffix in ("_v2", "_v3") if not re.search(r"_v\d$", name)}
    known = set(re.findall(r"\bnvml[A-Z]\w+", SOURCE.read_text()))
    missing = "\n".join(f"int {name}(void) {{ return 3; }}" for name in sorted(names - known))
    source = directory / "driver.c"
    source.write_text(f'#include "{SOURCE}"\n{missing}\n')
    library: Path = directory / LIBRARY
    subprocess.run(
        ["cc", "-std=gnu11", "-w", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread"], check=True
    )
    return library


def install(packages: Sequence[str]) -> None:
    """Install into the virtual environment, which is made if need be. Raises ``RuntimeError`` with pip's last line."""
    if not packages:
        return
    if not (VENV / "bin" / "pip").exists():
        venv.create(VENV, with_pip=True)
    done = subprocess.run(
        [_tool("pip"), "install", "--quiet", "--disable-pip-version-check", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def plain(url: str) -> str:
    """The page without compression."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def wait_for_gpus(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the page has values of GPUs. Raises ``RuntimeError`` when it does not come."""
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        try:
            if re.search(r"^\w*gpu\w*\{", plain(url), re.MULTILINE):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"does not run: exit status {process.poll()}" if process.poll() is not None else "shows no GPU")
