"""YAML with line numbers, for configuration files whose mistakes are reported with their line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpressure.errors import InputError, refused_file, shown
from kvpressure.files import read_file

if TYPE_CHECKING:
    import yaml

MAX_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a settings file. Beyond: one error line."""
NODE_LIMIT: Final = 10_000  # aliases can make a short file huge
"""Values in a settings file, aliases written out. Beyond: one error line."""
MAX_NESTING: Final = 100  # brackets and braces that are open at once
MAX_MERGED: Final = 100_000
"""Merged keys (`<<`) in a file of settings or manifests, written out. Beyond: one error line."""

_ALLOWED: Final = 'allowed: YAML with lines "name: value"'
_LONGEST_PATH: Final = 200  # in an error: the line stays one to read


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its place (``file:line``). ``children`` only for a mapping, by key."""

    value: Any
    where: str
    children: Mapping[str, YamlNode] | None = None


def short_path(path: str | Path) -> str:
    """A path for an error, cut where it is very long."""
    name = str(path)
    return name if len(name) <= _LONGEST_PATH else f"{name[:_LONGEST_PATH]}..."


@cache
def bounded_loader() -> type[yaml.SafeLoader]:
    """``yaml.SafeLoader`` that costs what a text is long. PyYAML looks at every open bracket with each token, and
    writes merged keys (``<<``) out, twice as many for each line.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        _merged = 0

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= MAX_NESTING:
                raise RecursionError("nested too deep")
            super().fetch_flow_collection_start(token)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            before = len(node.value)
            super().flatten_mapping(node)
            self._merged += max(0, len(node.value) - before)
            if self._merged > MAX_MERGED:
                problem = f"more than {MAX_MERGED} merged keys"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    return Loader


def read(path: str | Path, pipe: bool = True) -> YamlNode:
    """The root of the file; an empty file is an empty mapping. ``pipe``: it may be one, and is waited for. Raises
    ``InputError``.
    """
    import yaml

    try:
        text = read_file(path, MAX_BYTES + 1, pipe=pipe)
        if len(text) > MAX_BYTES:
            raise InputError(f"{short_path(path)}: larger than {MAX_BYTES} bytes; {_ALLOWED}")
        loader = bounded_loader()(text.decode())
        root = loader.get_single_node()
        if root is None:
            return YamlNode({}, f"{path}:1", {})
        return _NodeReader(str(path), loader).node(root)
    except OSError as error:
        raise InputError(refused_file(short_path(path), error, "a readable YAML file")) from error
    except RecursionError as error:
        raise InputError(f"{path}: nested too deep; {_ALLOWED}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not text in UTF-8"
        raise InputError(f"{path}{line}: not valid YAML: {' '.join(str(problem).split())}; {_ALLOWED}") from error


class _NodeReader:
    def __init__(self, path: str, loader: Any) -> None:
        self._path = path
        self._loader = loader
        self._sizes: dict[int, int] = {}  # by node: aliases are counted as often as they stand, and looked at once

    def _size(self, node: Any) -> int:
        """Values in ``node`` and below, aliases written out. One that holds itself has more than any limit."""
        known = self._sizes.get(id(node))
        if known is None:
            self._sizes[id(node)] = NODE_LIMIT + 1
            below = node.value if isinstance(node.value, list) else []
            parts = [part for entry in below for part in (entry if isinstance(entry, tuple) else (entry,))]
            known = self._sizes[id(node)] = 1 + sum(map(self._size, parts))
        return known

    def node(self, node: Any) -> YamlNode:
        import yaml

        where = f"{self._path}:{node.start_mark.line + 1}"
        if self._size(node) > NODE_LIMIT:
            raise InputError(f"{where}: more than {NODE_LIMIT} values; allowed: fewer")
        if not isinstance(node, yaml.MappingNode):
            return YamlNode(self._construct(node, where), where)
        if node.tag != yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG:
            raise InputError(f"{where}: a mapping of type {shown(node.tag)}; allowed: plain mappings")
        children: dict[str, YamlNode] = {}
        for key, value in node.value:
            line = f"{self._path}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{line}: a key that is not text; allowed: plain keys")
            self._construct(key, line)  # refuses what YAML refuses: a key of another type that is none of it
            if key.value in children:
                raise InputError(f"{line}: {shown(key.value)} given twice; allowed: once")
            child = self.node(value)
            children[key.value] = YamlNode(child.value, line, child.children)
        return YamlNode({key: child.value for key, child in children.items()}, where, children)

    def _construct(self, node: Any, where: str) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except ValueError as error:  # a date that does not exist, a number of thousands of digits
            raise InputError(f"{where}: not a value: {' '.join(str(error).split())[:80]}; {_ALLOWED}") from error
