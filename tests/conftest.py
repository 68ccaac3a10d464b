"""For every test: property tests draw the same examples each time, a busy machine is no failure, modules with long
tests begin first, so that no core idles at the end, and garbage is collected seldom.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("kvpressure", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpressure")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub of NVIDIA's library, built once."""
    from tests.sources.gpu.nvml_stub import build

    return build(tmp_path_factory.mktemp("nvml"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that have tests marked ``slow`` or ``live`` come first; the order within a module stays."""
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("live")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Thousands of collected tests are not walked again and again for garbage: a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
