"""One node for all tests of this folder, with the chart installed as ``docs/deploy.md`` says and one vLLM server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.__main__ import INSIDE
from tests.node.requirements import IMAGE, missing

if os.environ.get(INSIDE):
    from tests.node.cluster import Node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that is ready, its GPUs offered."""
    if reason := missing() or ("" if os.environ.get(INSIDE) else "not in namespaces of its own"):
        pytest.skip(f"no node: {reason} (make -C lab try-node)")
    with Node(tmp_path_factory.mktemp("node"), Path(os.environ[IMAGE])) as made:
        yield made
