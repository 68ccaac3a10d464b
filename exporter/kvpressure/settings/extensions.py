"""Engines, sources and signals of other packages, used when somebody names them.

A package offers an engine under the entry point group ``kvpressure.engines``, a source under ``kvpressure.sources`` and a signal under
``kvpressure.signals``. Nothing is looked up unless ``kvpressure --extensions NAME[,NAME] COMMAND`` or ``KVPRESSURE_EXTENSIONS=NAME,NAME`` asks for it: looking costs tens of
milliseconds, and no installed package may change what is read by being installed. From then on it is like a built-in one: a source has
its ``--collector.NAME`` flags, an engine is recognised among pods, metrics pages and logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvpressure.engines import registry
from kvpressure.errors import InputError
from kvpressure.sources import catalog

FLAG: Final = "--extensions"
VARIABLE: Final = "KVPRESSURE_EXTENSIONS"
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")


def names(text: str, where: str) -> list[str]:
    """The names in a comma-separated list. Raises ``InputError``."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in found if not _NAME.fullmatch(name)), None)
    if wrong is not None or not found:
        raise InputError(
            f"{where}: {(wrong or text)!r:.80} is no name; allowed: NAME or NAME,NAME of installed extensions"
        )
    return found


def adopt(wanted: Iterable[str], where: str, adopt_signal: Callable[[str], bool]) -> None:
    """Use these extensions from now on. Raises ``InputError`` for a name that no installed package offers."""
    for name in wanted:
        source, signal = catalog.adopt(name), adopt_signal(name)
        if not registry.offers(name) and source is None and not signal:
            raise InputError(
                f"{where}: no installed package offers an engine, a source or a signal {name!r}; allowed: one that does"
            )
        if registry.offers(name):
            registry.adopt(name)


def from_command_line(
    arguments: list[str], environ: Mapping[str, str], adopt_signal: Callable[[str], bool]
) -> list[str]:
    """Adopt what the environment and a leading ``--extensions`` name; gives the other arguments. ``adopt_signal`` adds a signal, if one
    of this name is offered: signals lie above settings. Raises ``InputError``.
    """
    if environ.get(VARIABLE):
        adopt(names(environ[VARIABLE], VARIABLE), VARIABLE, adopt_signal)
    if arguments and arguments[0].partition("=")[0] == FLAG:
        _, equals, value = arguments[0].partition("=")
        if not equals and len(arguments) < 2:
            raise InputError(f"{FLAG}: expected names; allowed: NAME or NAME,NAME of installed extensions")
        adopt(names(value if equals else arguments[1], FLAG), FLAG, adopt_signal)
        return arguments[1 if equals else 2 :]
    return arguments
