"""How what fails says why."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest

from kvpressure.sources.base import SourceError


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error``, whatever it is given."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def reason_of(read: Callable[[], object], among: Container[str]) -> str:
    """The reason with which a reading fails, which is one of a closed set."""
    with pytest.raises(SourceError) as caught:
        read()
    assert caught.value.reason in among
    return caught.value.reason
