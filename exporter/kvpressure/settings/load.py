"""Reads settings from flags and a YAML file; errors name the place of a value."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpressure.errors import InputError, nearest, shown
from kvpressure.settings import yaml_lines as yaml_nodes
from kvpressure.settings.options import Option


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A checked value and where it was written (``--flag`` or ``file:line: key``)."""

    value: Any
    where: str


Found = Iterable[tuple[str, GivenValue]]


def from_flags(args: argparse.Namespace, table: Mapping[str, Option]) -> Found:
    """Settings from flags."""
    for name, entry in table.items():
        raw = getattr(args, name, None)
        if raw is None or raw == []:  # a positional argument that was not given is an empty list
            continue
        where = f"--{name}"
        if isinstance(raw, list) and not entry.repeat:
            if len(raw) > 1:
                raise InputError(f"{where}: given {len(raw)} times; allowed: once")
            raw = raw[0]
        yield name, GivenValue(entry.check(raw, where), where)


def from_file(path: str, table: Mapping[str, Option]) -> Found:
    """Settings from the YAML file."""
    root = yaml_nodes.read(path)
    if root.children is None:
        raise InputError(f"{root.where}: the file is not a mapping; allowed: keys and values")
    for name, node in root.children.items():
        if name not in table:
            close = nearest(name, table, 0.85)
            similar = f"did you mean {close}?" if close else "--help lists all"
            raise InputError(f"{node.where}: unknown key {shown(name)}; {similar}")
        where = f"{node.where}: {name}"
        yield name, GivenValue(table[name].check(node.value, where), where)
