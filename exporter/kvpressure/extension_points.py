"""Extensions that other installed packages offer as entry points: an engine, a source, a signal or a condition.

Looked up only when one is named: looking costs tens of milliseconds, and no package may change what is read by
being installed.
"""

from __future__ import annotations

from typing import Final, TypeVar

from kvpressure.errors import InputError, shown

FLAG: Final = "--extensions"
VARIABLE: Final = "KVPRESSURE_EXTENSIONS"
T = TypeVar("T")


def offered(kind: str, name: str, wanted: type[T]) -> T | None:
    """The ``wanted`` of this name under ``kvpressure.<kind>s``; ``None`` if no installed package offers it.

    Raises ``InputError`` for one that does not load, is something else or has another name.
    """
    from importlib.metadata import entry_points

    point = next(iter(entry_points(group=f"kvpressure.{kind}s", name=name)), None)
    if point is None:
        return None
    what = f"{kind} {shown(name)} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # code of another package
        raise InputError(
            f"{what} of an extension package cannot be loaded: {error}; install a release of that package that supports"
            " this release of kvpressure"
        ) from error
    if not isinstance(found, wanted) or getattr(found, "name", None) != name:
        raise InputError(f"{what} is no {wanted.__name__} of that name; correct the entry point of the package")
    return found
