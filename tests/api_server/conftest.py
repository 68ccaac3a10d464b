"""One API server for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server import cluster as programs
from tests.api_server.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server that has just started, with the custom resources that were given."""
    if reason := programs.missing():
        pytest.skip(f"no API server: {reason} (make -C lab try-api-server)")
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        assert made.ask("POST", "/apis/node.k8s.io/v1/runtimeclasses", body=runtime).status_code == 201
        yield made


@pytest.fixture(scope="session")
def custom_kinds(cluster: Cluster) -> set[str]:
    folder = os.environ.get(programs.DEFINITIONS, "")
    return cluster.define(Path(folder)) if folder else set()
