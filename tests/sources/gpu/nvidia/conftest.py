"""Fixtures: the stub library, complete and as older drivers have it, and children that read through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.sources.gpu.nvml_stub import World, build
from tests.sources.gpu.nvml_stub.driver import Child, StartChild


@pytest.fixture(scope="session")
def shared_child(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One process for all tests that leave nothing behind in it."""
    with Child(nvml_library, tmp_path_factory.mktemp("shared") / "world", World()) as child:
        yield child


@pytest.fixture
def start(shared_child: Child, nvml_library: Path, tmp_path: Path) -> Iterator[StartChild]:
    """``start(world, **settings)``: a source over the complete library. ``missing=[...]`` leaves symbols out;
    ``own_process=True`` for what hangs or counts threads.
    """
    with ExitStack() as stack:

        def starter(
            world: World,
            *,
            missing: tuple[str, ...] = (),
            own_process: bool = False,
            **settings: Any,
        ) -> Child:
            if missing or own_process:
                library = build(tmp_path / "old-driver", missing) if missing else nvml_library
                return stack.enter_context(Child(library, tmp_path / "world", world, **settings))
            stack.callback(shared_child.close_source)
            shared_child.set(world)
            shared_child.begin(**settings)
            return shared_child

        yield starter
