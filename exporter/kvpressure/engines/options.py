"""Options of an inference server by their spellings: how its command line is read, and which name was misspelt.

``options.json`` in the server's folder lists them; ``lab/packages.py`` writes it from the packages of releases.
"""

from __future__ import annotations

import difflib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from kvpressure.engines.shell import UNKNOWN
from kvpressure.model.arguments import WITH_VALUE
from kvpressure.model.frozen import frozen
from kvpressure.redaction import REDACTED

FLAG: Final = "flag"  # without a value
OFF: Final = "off"  # switches a flag off
VALUE: Final = "value"  # which may be optional
LIST: Final = "list"  # one value or several, of which the first is read

# Options that decide advice; only these are worth a warning when misspelt.
_DECIDING: Final = (
    *WITH_VALUE,
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "num_gpu_blocks_override",
    "override_generation_config",
)
_CLOSE: Final = 0.85  # of difflib's ratio: one or two letters of a name
_NUMBER: Final = re.compile(r"-\d+(?:\.\d+)?")


@frozen
class Options:
    """``spellings``: of every option of every known release, with its common name and its kind."""

    spellings: Mapping[str, tuple[str, str]]
    names: frozenset[str]
    ordered: Sequence[str] = ()

    def knows(self, name: str) -> bool:
        """Whether some release has an option of this common name, or one with such a field (``name.field``)."""
        return name.partition(".")[0] in self.names

    def explain(self, options: Iterable[tuple[str, str | None]]) -> bool:
        """Whether every word that was read belongs to an option of some release: another may set anything."""
        return all(map(self.knows, (name for name, _ in options)))

    def read(self, words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """(common name, value) of every option: "True" for one without a value, "False" for one that is switched off,
        ``None`` for a value that is not visible. Other words have the name "". A name that no release has is taken for
        an option with a value.
        """
        index = 0
        while index < len(words):
            word = words[index]
            name, kind, value = self._option(word)
            index += 1
            if not name:
                yield "", word
                continue
            if value is None and index < len(words) and _takes(kind, words[index]):
                value = words[index]
                index += 1
            while kind == LIST and index < len(words) and _takes(kind, words[index]):
                index += 1
            value = "False" if kind == OFF else "True" if value is None else value
            yield name, None if UNKNOWN in value or value == REDACTED else value

    def _option(self, word: str) -> tuple[str, str, str | None]:
        """(common name, kind, value after ``=`` or behind a letter); name "" for other words."""
        head, equals, value = word.partition("=")
        head, dot, field = head.partition(".")
        head = head.replace("_", "-")
        found = self.spellings.get(head)
        if found is None and head.startswith("--") and len(head) > 2:
            found = self._shortened(head) or (head[2:].replace("-", "_"), VALUE)
        if found is not None:
            return f"{found[0]}{dot}{field}", found[1], value if equals else None
        name, kind = self.spellings.get(word[:2], ("", "")) if not word.startswith("--") else ("", "")
        return name, kind, word[2:]

    def _shortened(self, head: str) -> tuple[str, str] | None:
        """The only option that begins so: servers accept a beginning that no two options share."""
        following = self.ordered[bisect_left(self.ordered, head) :]
        begun = takewhile(lambda spelling: spelling.startswith(head), following)
        option = self.spellings.get(next(begun, ""))
        return option if all(self.spellings[other] == option for other in begun) else None

    def misspelt(self, names: Iterable[str]) -> dict[str, str]:
        """Unknown names -> the deciding option that is one or two letters away."""
        deciding = [*filter(self.knows, _DECIDING)]
        unknown = sorted(name for name in set(names) if not self.knows(name))
        return {name: near[0] for name in unknown if (near := difflib.get_close_matches(name, deciding, 1, _CLOSE))}


def _takes(kind: str, following: str) -> bool:
    """Whether an option of this kind takes the following word for its value."""
    if kind in (FLAG, OFF):
        return kind == FLAG and following.lower() in ("true", "false", "0", "1")
    return not following.startswith("-") or _NUMBER.fullmatch(following) is not None


def read_options(path: Path, common: Mapping[str, str]) -> Options:
    """The table in a file; ``common``: the server's name of an option -> its common name."""
    rows = json.loads(path.read_text(encoding="utf-8")).items()
    named = ((spelling, *row.split()) for spelling, row in rows)
    spellings = {spelling: (common.get(name, name), kind) for spelling, name, kind in named}
    return Options(spellings, frozenset(name for name, _ in spellings.values()), sorted(spellings))
