"""How what fails says why."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest

from kvpressure.sources.base import SourceError


def reason_of(read: Callable[[], object], among: Container[str]) -> str:
    """The reason with which a reading fails, which is one of a closed set."""
    with pytest.raises(SourceError) as caught:
        read()
    assert caught.value.reason in among
    return caught.value.reason
