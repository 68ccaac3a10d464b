"""For every test: property tests draw the same examples each time, a busy machine is no failure, and modules with long
tests begin first, so that no core idles at the end.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("kvpressure", deadline=None, derandomize=True)
settings.load_profile("kvpressure")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that have tests marked ``slow`` or ``live`` come first; the order within a module stays."""
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("live")}
    items.sort(key=lambda item: item.path not in long)
