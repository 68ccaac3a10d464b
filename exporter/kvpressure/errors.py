"""Errors of usage or input: one line with what was wrong, where, and what is allowed."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Final

from kvpressure import redaction

_LONGEST: Final = 100
_SHORT: Final = reprlib.Repr()  # never more than a few items: aliases can make a short file a value of millions


class InputError(ValueError):
    """Wrong usage or input. The text is one line; commands print it and exit with status 2."""


def shown(value: object) -> str:
    """A wrong value for the line of an error: quoted, on one line, shortened and without secrets."""
    text = repr(redaction.value(value[:4096])) if isinstance(value, str) else redaction.value(_SHORT.repr(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def refused_file(where: str, error: Exception, give: str) -> str:
    """The line for a file or directory that the system refuses: where it was named, why, and what to give instead."""
    return f"{redaction.value(where)}: {getattr(error, 'strerror', None) or error}; give {give}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that a misspelt ``word`` probably meant; ``None`` if none is close. ``cutoff``: 1 = equal."""
    import difflib  # needed after a mistake only

    return next(iter(difflib.get_close_matches(word[:100], list(known), 1, cutoff)), None)
