"""What a release of an inference server has, read from its installed or unpacked package without importing it:
``python -m lab.packages PACKAGE_DIR ... [--write]``.

Prints what kvpressure does not know of it: spellings of options, metric names, KV cache types, and texts of log lines
that the release no longer has. ``--write`` keeps each release under ``tests/fixtures/releases`` and writes the tables
of options that kvpressure reads: the union of all kept releases, of which the newest counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvpressure.capacity.kvbytes import CACHE_DTYPES
from kvpressure.engines import registry
from kvpressure.engines.log_table import LineForm
from kvpressure.engines.options import FLAG, LIST, OFF, VALUE
from kvpressure.engines.sglang import log_lines as sglang_lines
from kvpressure.engines.sglang.arguments import COMMON
from kvpressure.engines.vllm import log_lines as vllm_lines
from kvpressure.model.arguments import parse_version
from kvpressure.model.state import LIMITS

ROOT: Final = Path(__file__).parents[1]
RELEASES: Final = ROOT / "tests" / "fixtures" / "releases"
FAMILIES: Final = ROOT / "tests" / "fixtures" / "engine-pages" / "families.md"
OWN_NAMES: Final[Mapping[str, Mapping[str, str]]] = {"vllm": {}, "sglang": COMMON}
LOG_TABLES: Final[Mapping[str, Sequence[LineForm]]] = {"vllm": vllm_lines.TABLE, "sglang": sglang_lines.TABLE}
OPTION_FILES: Final = {
    "vllm": ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/openai/api_server.py"),
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields/*.py"),
}
CONFIG_FILES: Final = ("config.py", "config/*.py")
OUTSIDE: Final = {"benchmarks", "test"}
CACHE_TYPES: Final = {"CacheDType", "kv_cache_dtype"}
PARTS: Final = ("", "_total", "_bucket", "_info")

Options = dict[str, str]
"""Spelling -> destination and kind."""


@dataclass(frozen=True)
class Package:
    """The sources of an engine's package, by its folder."""

    folder: Path

    @property
    def engine(self) -> str:
        """Name of the engine: vllm or sglang."""
        return self.folder.name

    @cached_property
    def version(self) -> str:
        """By the metadata beside it."""
        found = self.folder.parent.glob(f"{self.engine}*.dist-info/METADATA")
        (text,) = (path.read_text(encoding="utf-8") for path in found)
        return re.findall(r"^Version: ([\d.]+)", text, re.MULTILINE)[0]

    @cached_property
    def sources(self) -> dict[Path, str]:
        """Its modules, but those that measure it from outside."""
        paths = (path for path in sorted(self.folder.rglob("*.py")) if not OUTSIDE & {*path.parts})
        return {path: path.read_text(encoding="utf-8") for path in paths}

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """Its modules that declare options or configuration, parsed."""
        globs = OPTION_FILES[self.engine] + CONFIG_FILES
        declared = {path for pattern in globs for path in self.folder.glob(pattern)}
        return {path: ast.parse(self.sources[path]) for path in sorted(declared)}

    @cached_property
    def fields(self) -> dict[str, dict[str, ast.AnnAssign]]:
        """The annotated fields of its classes, by class."""
        classes = (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        return {one.name: dict(_fields(one)) for one in classes}

    @cached_property
    def has_inverses(self) -> bool:
        """Whether each ``--enable-x`` has a ``--disable-x``, and the other way round."""
        return any("class EnableDisableAction" in source for source in self.sources.values())


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _fields(of_class: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for node in of_class.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


# --- options --------------------------------------------------------------------------------------------------------


def options(package: Package) -> Options:
    """Every spelling of the server's options."""
    found: Options = {}
    for pattern in OPTION_FILES[package.engine]:
        for path in sorted(package.folder.glob(pattern)):
            tree = package.trees[path]
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found |= _of_class(package, node)
            classes = dict(_classes_of_keywords(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and _name(node.func) == "add_argument":
                    found |= _of_call(package, node, classes)
    return found


def _name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _of_class(package: Package, of_class: ast.ClassDef) -> Options:
    """Options that a class declares by its fields: vLLM's frontend, and SGLang's fields with ``A[type, Arg(...)]``."""
    found: Options = {}
    for field, node in _fields(of_class):
        if of_class.name.endswith("FrontendArgs"):
            found |= _spelled(package, [f"--{field.replace('_', '-')}"], field, _by_type(node), has_off=True)
        elif isinstance(node.annotation, ast.Subscript) and _name(node.annotation.value) == "A":
            found |= _declared(package, field, node.annotation.slice)
    return found


def _declared(package: Package, field: str, declared: ast.expr) -> Options:
    if not isinstance(declared, ast.Tuple):
        return {}
    (of_type, *notes) = declared.elts
    keywords = {word.arg: word.value for note in notes if isinstance(note, ast.Call) for word in note.keywords}
    if "no_cli" in keywords or any(isinstance(note, ast.Call) and _name(note.func) == "Derived" for note in notes):
        return {}
    own = _text(keywords.get("cli_name")) or f"--{field.replace('_', '-')}"
    aliases = keywords.get("aliases")
    spellings = [own, *(map(_text, aliases.elts) if isinstance(aliases, ast.List) else ())]
    return _spelled(package, spellings, field, _kind(keywords) or _of_type(ast.unparse(of_type)))


def _classes_of_keywords(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of variables -> the class from whose fields ``get_kwargs`` makes the keywords of ``add_argument``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _name(node.value.func) == "get_kwargs":
            yield _name(node.targets[0]), _name(node.value.args[0])


def _of_call(package: Package, call: ast.Call, classes: Mapping[str, str]) -> Options:
    spellings = [text for word in call.args if (text := _text(word)).startswith("-")]
    if not spellings:
        return {}
    keywords = {word.arg: word.value for word in call.keywords if word.arg}
    first = next((text for text in spellings if text.startswith("--")), spellings[0])
    to = _text(keywords.get("dest")) or first.strip("-").replace("-", "_")
    kind = _kind(keywords)
    by_field = next(
        (node for word in call.keywords if not word.arg for node in ast.walk(word.value) if _is_item(node)), None
    )
    if kind is None and isinstance(by_field, ast.Subscript):
        field = package.fields.get(classes.get(_name(by_field.value), ""), {}).get(_text(by_field.slice))
        return _spelled(package, spellings, to, VALUE if field is None else _by_type(field), has_off=True)
    has_off = _name(keywords.get("action")) == "BooleanOptionalAction"
    return _spelled(package, spellings, to, kind or VALUE, has_off=has_off)


def _is_item(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and bool(_text(node.slice))


def _kind(keywords: Mapping[str | None, ast.expr]) -> str | None:
    """By an action or a number of values; ``None`` where neither is stated."""
    action = keywords.get("action")
    stated = _text(action) or _name(action)
    if "nargs" in keywords:
        return LIST if _text(keywords["nargs"]) in ("+", "*") else VALUE
    if stated == "store_false":
        return OFF
    return FLAG if stated == "store_true" or "True" in stated or stated == "BooleanOptionalAction" else None


def _by_type(field: ast.AnnAssign) -> str:
    return _of_type(ast.unparse(field.annotation))


def _of_type(text: str) -> str:
    words = set(re.findall(r"\w+", re.sub(r"(?i:dict)\[.*\]|Literal\[.*\]", "", text)))
    if "bool" in words:
        return VALUE if "str" in words else FLAG
    return LIST if {"list", "List", "tuple", "Tuple", "set"} & words else VALUE


def _spelled(package: Package, spellings: Iterable[str], to: str, kind: str, *, has_off: bool = False) -> Options:
    """The spellings of one option, with those that switch it off."""
    found = dict.fromkeys(spellings, f"{to} {kind}")
    for spelling in [one for one in found if has_off and kind == FLAG and one.startswith("--")]:
        found[f"--no-{spelling[2:]}"] = f"{to} {OFF}"
        for own, inverse in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
            if package.has_inverses and spelling.startswith(own):
                found[inverse + spelling.removeprefix(own)] = f"{to} {OFF}"
    return found


# --- what else a release has ----------------------------------------------------------------------------------------


def metrics(package: Package) -> list[str]:
    """Names of its metrics, without prefix."""
    name = re.compile(rf"""["']{package.engine}:([a-z0-9_]+[a-z0-9])["']""")
    return sorted({found for source in package.sources.values() for found in name.findall(source)})


def cache_types(package: Package) -> list[str]:
    """Types of KV cache elements that ``--kv-cache-dtype`` takes."""
    found: set[str] = set()
    for tree in package.trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and {_name(to) for to in node.targets} & CACHE_TYPES:
                found |= {text for one in ast.walk(node.value) if (text := _text(one))}
    return sorted(found)


def log_texts(package: Package) -> list[str]:
    """Keywords of kvpressure's table of log lines that its sources contain."""
    source = "".join(package.sources.values())
    return sorted({row.keyword for row in LOG_TABLES[package.engine] if row.keyword in source})


def defaults(package: Package) -> dict[str, str]:
    """Defaults of the limits that its configuration classes state as constants."""
    found: dict[str, str] = {}
    for fields in package.fields.values():
        for name, node in fields.items():
            stated = {word.arg: word.value for word in node.value.keywords} if isinstance(node.value, ast.Call) else {}
            value = stated.get("default", node.value)
            if OWN_NAMES[package.engine].get(name, name) in LIMITS and isinstance(value, ast.Constant):
                found.setdefault(name, ast.unparse(value))
    return found


def release(package: Package) -> dict[str, Any]:
    """All of it."""
    return {
        "defaults": defaults(package),
        "cache_types": cache_types(package),
        "log_texts": log_texts(package),
        "metrics": metrics(package),
        "options": dict(sorted(options(package).items())),
    }


# --- what kvpressure does not know ----------------------------------------------------------------------------------


def is_read(engine: str, metric: str) -> bool:
    """Whether samples of a metric are read, or the list of families says why not."""
    samples = registry.samples()
    listed = set(re.findall(r"`([^`]+)`", FAMILIES.read_text(encoding="utf-8")))
    return any(f"{engine}:{metric}{part}" in samples or f"{metric}{part}" in listed for part in PARTS)


def unknown(engine: str, found: Mapping[str, Any]) -> dict[str, list[str]]:
    """What kvpressure does not know of a release, by kind."""
    table = registry.dialect(engine).options.spellings
    texts = {row.keyword for row in LOG_TABLES[engine] if "POST" not in row.keyword}  # those are of its web server
    return {
        "options": [f"{one} ({to})" for one, to in found["options"].items() if one not in table],
        "metrics": [name for name in found["metrics"] if not is_read(engine, name)],
        "KV cache types": sorted({*found["cache_types"]} - {*CACHE_DTYPES}),
        "log texts that it does not have": sorted(texts - {*found["log_texts"]}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and with ``--write`` keep."""
    parser = argparse.ArgumentParser(prog="python -m lab.packages", description=__doc__)
    parser.add_argument("packages", nargs="+", type=Path, metavar="PACKAGE_DIR")
    parser.add_argument("--write", action="store_true", help="keep the releases and write the tables of options")
    arguments = parser.parse_args(argv)
    for package in map(Package, arguments.packages):
        found = release(package)
        print(f"{package.engine} {package.version}: {len(found['options'])} spellings, {len(found['metrics'])} metrics")
        for what, names in unknown(package.engine, found).items():
            print(f"  {what}: {', '.join(names) or '-'}")
        if arguments.write:
            RELEASES.mkdir(exist_ok=True)
            kept = RELEASES / f"{package.engine}-{package.version}.json"
            kept.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    if arguments.write:
        for engine in LOG_TABLES:
            write_options(engine)
    return 0


def merged(engine: str) -> Options:
    """The options of all kept releases; where they differ, as the newest has them."""
    kept = sorted(RELEASES.glob(f"{engine}-*.json"), key=lambda path: parse_version(path.stem.split("-")[1]) or ())
    found: Options = {}
    for path in kept:
        found |= json.loads(path.read_text(encoding="utf-8"))["options"]
    return dict(sorted(found.items()))


def write_options(engine: str) -> None:
    """Write the table of options of an engine."""
    path = ROOT / "exporter" / "kvpressure" / "engines" / engine / "options.json"
    path.write_text(json.dumps(merged(engine), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
