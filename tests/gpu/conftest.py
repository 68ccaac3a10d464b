"""Stub libraries, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.gpu.nodes import Build
from tests.sources.gpu.amd import smi_stub
from tests.sources.gpu.nvml_stub import build


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``nvml(missing)``: the stub NVML without these symbols."""
    return cache(lambda missing: build(tmp_path_factory.mktemp("nvml"), missing))


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """``rocm()``: a directory with the stub of AMD's library."""
    return cache(lambda: smi_stub.build(tmp_path_factory.mktemp("rocm")))
