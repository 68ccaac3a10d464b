"""The public part of a command line and an environment: only what is known to be no secret.

A command line is rebuilt from what was understood: options by name, with values that are numbers or true or false, or
of options that are known to hold no secret (a model's name, a type, a backend). Other options have no value. What was
not understood is left out and its place marked, so that the result never counts as complete. No text of a script, no
expanded variable and no unknown word can leave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvpressure import redaction
from kvpressure.engines.command import CUT
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.redaction import REDACTED

MAX_VALUE: Final = 512  # characters of a value, or of one text in JSON
MAX_JSON: Final = 16_384

_NUMBER: Final = re.compile(r"[-+]?\d{1,15}(?:\.\d{1,12})?(?:[eE][-+]?\d{1,3})?[kKmMgGtT]?|[-+]?\.\d{1,12}")
_WORD: Final = frozenset({"true", "false", "none", "null", "auto"})
_TEXT: Final = re.compile(rf"[\w.:/@+\-]{{1,{MAX_VALUE}}}")
_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")
_OPTION: Final = re.compile(r"[a-z]{1,24}\d{0,2}(?:[_.][a-z]{1,24}\d{0,2}){0,9}")  # as programs name theirs


@frozen
class PublicNames:
    """What a server's names say of their values.

    ``start``: the words that start it. ``flag``: an argument as an option. ``options``, ``variables``: their values are
    names, types or modes. ``json_options``: their JSON holds limits and modes; texts in it stay under ``json_keys``
    only. ``prefixes``: of the server's own variables.
    """

    start: tuple[str, ...]
    flag: Callable[[str], str]
    prefixes: tuple[str, ...]
    options: frozenset[str]
    json_options: frozenset[str] = frozenset()
    json_keys: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()

    def command(self, args: EngineArgs) -> tuple[str, ...]:
        """A command line with the public part of these arguments."""
        shown = [f"{self.flag(name)}={text}" for name, text in self.arguments(args.values).items()]
        return (*self.start, *shown, *(() if args.complete or "config" in args.values else (CUT,)))

    def arguments(self, values: Mapping[str, str | None]) -> dict[str, str]:
        """The arguments that may be named, with the public part of their values."""
        return {
            name: REDACTED if text is None else self.value(name, text)
            for name, text in values.items()
            if name in self.options or name in self.json_options or _OPTION.fullmatch(name)
        }

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The server's own variables; only numbers and known modes keep their values."""
        return {
            name: _name_text(text) if name in self.variables else self.value(name, text)
            for name, text in env.items()
            if name.startswith(self.prefixes) and _KEY.fullmatch(name) and not redaction.is_secret(name)
        }

    def value(self, name: str, text: str) -> str:
        """``text`` as the value of option ``name``, or ``REDACTED``."""
        last = name.rpartition(".")[2]
        if redaction.is_secret(name) or redaction.is_secret(last):
            return REDACTED
        if _NUMBER.fullmatch(text) or text.lower() in _WORD:
            return text
        if name in self.json_options:
            return self._json_text(text)
        known = name in self.options or (name.partition(".")[0] in self.json_options and last in self.json_keys)
        return _name_text(text) if known else REDACTED

    def _json_text(self, text: str) -> str:
        if len(text) > MAX_JSON:
            return REDACTED
        try:
            return json.dumps(self._json(json.loads(text), ""))
        except (ValueError, RecursionError):
            return REDACTED

    def _json(self, node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return {key: self._json(item, key) for key, item in node.items() if _KEY.fullmatch(key)}
        if isinstance(node, list):
            return [self._json(item, name) for item in node]
        if node is None or isinstance(node, bool):
            return node
        if redaction.is_secret(name):
            return REDACTED
        if isinstance(node, int | float):
            return node if _NUMBER.fullmatch(str(node)) else REDACTED
        return _name_text(node) if name in self.json_keys else REDACTED


def _name_text(text: str) -> str:
    """``text`` if it is a plain name, path or type without a login or token, else ``REDACTED``."""
    return text if _TEXT.fullmatch(text) and redaction.text(text) == text else REDACTED
