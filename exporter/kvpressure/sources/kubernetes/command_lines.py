"""The command lines of a pod's containers, parsed once as long as they stay the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import CUT, Command, bounded
from kvpressure.engines.registry import default, dialects, public_environment, variable_prefixes
from kvpressure.parsed import items, mapping, mappings, text

MAX_COMMAND_CHARACTERS: Final = 16384  # of the command lines of one pod, and of the variables of each container
"""Command line and script of one pod, characters. Beyond: cut; limits then count as unknown.
Shown as: `source_errors_total{source="pods",reason="command_cut"}`.
"""
MAX_KEPT_CHARACTERS: Final = 8 * 1024 * 1024  # of parsed command lines of all pods, cached

_VARIABLE: Final = re.compile(r"\$[({]?([A-Za-z_]\w*)")
_FIELD: Final = re.compile(r"metadata\.(name|namespace|uid|(labels|annotations)\['([^']{1,317})'\])")


class CommandLine:
    """Command line of one container; each dialect parses it once, on demand."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], characters: int) -> None:
        self.argv = bounded(argv, characters)
        used = {name for part in self.argv for name in _VARIABLE.findall(part)}
        named = {name: value for name, value in env.items() if name in used or name.startswith(variable_prefixes())}
        self.env = _bounded_env(named)
        self.cut = len(self.env) < len(named) or any(CUT in part for part in self.argv)
        self.characters = sum(map(len, self.argv)) + sum(len(name) + len(value) for name, value in self.env.items())
        self._likely = [one for one in dialects() if one.may_start(argv, env)]
        self._read: dict[str, Command] = {}

    def read(self, one: EngineDialect) -> Command:
        """The command line as this engine parses it."""
        if one.name not in self._read:
            self._read[one.name] = one.read_command(self.argv, self.env)
        return self._read[one.name]

    @cached_property
    def starts(self) -> EngineDialect | None:
        """The engine whose server it names, or None."""
        return next((one for one in self._likely if self.read(one).starts_server), None)

    @cached_property
    def shown(self) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """Arguments and variables that may be recorded."""
        engine = self.starts or default()
        return engine.public_words(self.read(engine).args) if self.argv else (), public_environment(self.env)


def _bounded_env(env: Mapping[str, str]) -> Mapping[str, str]:
    left, kept = MAX_COMMAND_CHARACTERS, {}
    for name, value in env.items():
        if len(name) + len(value) <= left:
            left -= len(name) + len(value)
            kept[name] = value
    return kept


class CommandLines:
    """Cache of parsed command lines by pod, because most changes of a pod are of its status. Not thread-safe."""

    def __init__(self, most_characters: int = MAX_KEPT_CHARACTERS) -> None:
        self._pods: dict[str, tuple[int, list[CommandLine]]] = {}  # by uid, the last used last
        self._left = most_characters

    def of(
        self, uid: str, containers: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> list[CommandLine]:
        """The command line of each container. ``fields``: the pod's metadata, to which variables may refer."""
        given = [(tuple(_argv(c)), _environment(c, fields or {})) for c in containers]
        mark = hash(tuple((argv, tuple(env.items())) for argv, env in given))
        before = self._pods.pop(uid, None)
        if before is not None and before[0] == mark:
            self._pods[uid] = before
            return before[1]
        self._release(before)
        lines, left = [], MAX_COMMAND_CHARACTERS
        for argv, env in given:
            lines.append(CommandLine(argv, env, left))
            left = max(0, left - sum(map(len, lines[-1].argv)))
        self._pods[uid] = (mark, lines)
        self._left -= _weight(lines)
        while self._left < 0:
            self._release(self._pods.pop(next(iter(self._pods))))
        return lines

    def forget(self, uid: str) -> None:
        """Remove a pod."""
        self._release(self._pods.pop(uid, None))

    def keep(self, uids: Iterable[str]) -> None:
        """Remove all other pods."""
        for uid in self._pods.keys() - set(uids):
            self.forget(uid)

    def _release(self, pod: tuple[int, list[CommandLine]] | None) -> None:
        self._left += 0 if pod is None else _weight(pod[1])


def _weight(lines: list[CommandLine]) -> int:
    return 500 + sum(500 + 2 * line.characters for line in lines)  # read and shown


def _argv(container: Mapping[str, Any]) -> list[str]:
    parts = [*items(container.get("command")), *items(container.get("args"))]
    return [part for part in parts if isinstance(part, str)]


def _environment(container: Mapping[str, Any], metadata: Mapping[str, Any]) -> Mapping[str, str]:
    given = (
        (item.get("name"), item.get("value") if "value" in item else _field(item, metadata))
        for item in mappings(container.get("env"))
    )
    return {text(name): value for name, value in given if isinstance(value, str)}


def _field(variable: Mapping[str, Any], metadata: Mapping[str, Any]) -> object:
    """Value of a variable from the pod's own metadata (downward API); None when it comes from elsewhere."""
    path = text(mapping(mapping(variable.get("valueFrom")).get("fieldRef")).get("fieldPath"))
    found = _FIELD.fullmatch(path)
    if found is None:
        return None
    return mapping(metadata.get(found[2])).get(found[3]) if found[2] else metadata.get(found[1])
