"""For every test: property tests draw the same examples each time, and a busy machine is no failure.

``known_failures.txt`` names tests that are known to fail, each with its reason. They run all the same, are shown in the
summary with that reason, and the list may only get shorter: one that passes again is to be taken out.
"""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvpressure", deadline=None, derandomize=True)
settings.load_profile("kvpressure")

KNOWN_FAILURES = Path(__file__).with_name("known_failures.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``known_failures.txt``: a test's name, or its beginning, then " # " and the reason."""
    lines = [line for line in KNOWN_FAILURES.read_text().splitlines() if line and not line.startswith("#")]
    known = dict(line.split(" # ", 1) for line in lines)
    for item in items:
        for name, reason in known.items():
            if item.nodeid == name or item.nodeid.startswith((f"{name}[", f"{name}::", f"{name}/")):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
