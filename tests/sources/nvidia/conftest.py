"""Fixtures: the stub library, complete and as older drivers have it, and children that read through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nvml_stub import World, build
from nvml_stub.driver import Child, StartChild


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete stub library."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start(nvml_library: Path, tmp_path: Path) -> Iterator[StartChild]:
    """``start(world, **settings)``: a child over the complete library; ``missing=[...]`` leaves symbols out."""
    with ExitStack() as stack:

        def starter(world: World, *, missing: tuple[str, ...] = (), **settings: Any) -> Child:
            library = build(tmp_path / "old-driver", missing) if missing else nvml_library
            return stack.enter_context(Child(library, tmp_path / "world", world, **settings))

        yield starter
