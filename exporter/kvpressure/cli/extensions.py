"""``--extensions NAME[,NAME]``: engines, sources, signals and conditions of other packages, used like built-in ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvpressure.diagnosis import conditions
from kvpressure.engines import registry as engines
from kvpressure.errors import InputError, shown
from kvpressure.extension_points import FLAG, VARIABLE
from kvpressure.signals import registry as signals
from kvpressure.sources import catalog

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_KINDS: Final = (catalog, engines, signals, conditions)


def names(text: str, where: str) -> list[str]:
    """The names in a comma-separated list. Raises ``InputError``."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in found if not _NAME.fullmatch(name)), None)
    if wrong is not None or not found:
        raise InputError(
            f"{where}: {shown(wrong or text)} is not a name; allowed: NAME or NAME,NAME of installed extensions"
        )
    return found


def adopt(wanted: Iterable[str], where: str) -> None:
    """Use these extensions from now on. Raises ``InputError`` for a name that no installed package offers."""
    for name in wanted:
        found = [kind.adopt(name) for kind in _KINDS]  # one name may be offered as several kinds
        if not any(found):
            raise InputError(
                f"{where}: no installed package offers an engine, source, signal or condition {shown(name)}; install a"
                " package that does"
            )


def from_command_line(arguments: list[str], environ: Mapping[str, str]) -> list[str]:
    """Adopt extensions of the environment and a leading ``--extensions``; returns the other arguments. Raises
    ``InputError``.
    """
    if environ.get(VARIABLE):
        adopt(names(environ[VARIABLE], VARIABLE), VARIABLE)
    if arguments and arguments[0].partition("=")[0] == FLAG:
        _, equals, value = arguments[0].partition("=")
        if not equals and len(arguments) < 2:
            raise InputError(f"{FLAG}: expected names; allowed: NAME or NAME,NAME of installed extensions")
        adopt(names(value if equals else arguments[1], FLAG), FLAG)
        return arguments[1 if equals else 2 :]
    return arguments
