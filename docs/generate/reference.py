"""Write what pages say of the code from its declarations: ``python -m docs.generate [--check]``.

* limits, from the text under each constant: "What. Beyond: what happens. Shown as: where." (guarantees.md);
* packages, from the first sentence of each, in the order of the layers (docs/architecture.md);
* keys of a recording, from the tables that read and write them (docs/recordings.md);
* bytes of a cache type, from the formula (docs/capacity.md);
* commands, verdicts and the incidents of the demo, each as the program describes it (docs/toolbox.md, README.md,
  docs/dashboards.md).
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from docs.generate import parts
from lab.demo.scenario import SCENARIOS

from kvpressure import cli
from kvpressure.advice.mitigation import CAUSES
from kvpressure.capacity.kvbytes import CACHE_DTYPES, layer_bytes
from kvpressure.capacity.shapes import Layer
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.recording import format as recording
from kvpressure.recording.fields import Field

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "exporter/kvpressure"
_LIMIT: Final = re.compile(r"(?P<what>.+?)\. Beyond: (?P<beyond>.+?)\.(?: Shown as: (?P<shown>.+)\.)?", re.DOTALL)


class Limit(NamedTuple):
    """A constant that bounds what is kept: ``name`` as ``module.CONSTANT``, without the package."""

    name: str
    value: str
    what: str
    beyond: str
    shown: str


def limits() -> list[Limit]:
    """Every declared limit of the package, by module."""
    return [limit for path in sorted(PACKAGE.rglob("*.py")) for limit in _limits(path)]


def _limits(path: Path) -> Iterator[Limit]:
    text = path.read_text(encoding="utf-8")
    if " Beyond: " not in text:
        return
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    body = ast.parse(text).body
    for constant, after in itertools.pairwise(body):
        if not (isinstance(constant, ast.AnnAssign) and isinstance(constant.target, ast.Name)):
            continue
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            continue
        found = _LIMIT.fullmatch(" ".join(str(after.value.value).split()))
        if found:
            name = constant.target.id
            value = getattr(importlib.import_module(f"kvpressure.{module}"), name)
            what = found["what"][0].lower() + found["what"][1:]
            yield Limit(f"{module}.{name}", _amount(name, value), what, found["beyond"], found["shown"] or "–")


def _amount(name: str, value: int) -> str:
    if name.endswith("BYTES"):
        return f"{value // 2**20} MiB" if value % 2**20 == 0 else f"{value // 2**10} KiB"
    return str(value)


def limit_table() -> str:
    """What is kept, and how much of it."""
    rows = [(one.what, one.value, f"`{one.name}`", one.beyond, one.shown) for one in limits()]
    return parts.table(("what", "limit", "constant", "beyond it", "shown as"), rows)


def packages() -> str:
    """Packages and single modules, the top layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    names = [name.strip().removeprefix("kvpressure.") for layer in layers for name in layer.split("|")]
    return parts.table(("package", "what it does"), [_package(name) for name in names])


def _package(name: str) -> tuple[str, str]:
    face = PACKAGE / name / "__init__.py"
    path, shown = (face, f"`{name}/`") if face.is_file() else (PACKAGE / f"{name}.py", f"`{name}.py`")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0].replace("``", "`")
    first = re.sub(rf"^{name[:5]}\w*: ", "", first, flags=re.IGNORECASE)
    return shown, first[0].lower() + first[1:]


def recording_keys() -> str:
    """The keys of each entry of a tick; those that must be there are marked."""
    return parts.table(
        ("key of a tick", "keys of each entry"),
        [(f"`{key}`", _keys(table)) for key, table in recording.ENTRIES.items()],
    )


def _keys(table: tuple[Field, ...]) -> str:
    ordered = sorted(table, key=lambda field: not field.required)
    return ", ".join(f"**`{one.name}`**" if one.required else f"`{one.name}`" for one in ordered)


def cache_types() -> str:
    """Bytes of a head of 128 + 128 elements by cache type; of DeepSeek's vector for types that hold nothing else."""
    head = Layer("full", kv_heads=1, head_size_k=128, head_size_v=128)
    vector = Layer("mla", kv_heads=1, head_size_k=576, head_size_v=0)
    sizes: dict[str, list[str]] = {}
    for dtype in CACHE_DTYPES:
        try:
            size = f"{layer_bytes(head, 1, dtype)}"
        except InputError:
            size = f"{layer_bytes(vector, 1, dtype)} per token and layer (DeepSeek)"
        sizes.setdefault(size, []).append(f"`{dtype}`")
    rows = [(", ".join(names), size) for size, names in sizes.items()]
    return parts.table(("cache dtype", "bytes of a head of 128 + 128"), rows)


def command_list() -> str:
    """Every command and what it does."""
    return parts.table(("command", "does"), [(f"`{name}`", text) for name, text in cli.COMMANDS.items()])


def verdicts() -> str:
    """Every verdict and its cause, in vLLM's words."""
    called = dialect("vllm").called
    words = {name: called(name) for name in ("max_num_seqs", "preempted")}
    return parts.table(("verdict", "meaning"), [(f"`{name}`", text.format_map(words)) for name, text in CAUSES.items()])


def incidents() -> str:
    """The incidents of the demo with their pictures and the verdict that each must get."""
    rows = []
    for name, scenario in SCENARIOS.items():
        found = {what: f"images/incident-{name}-{what}.webp" for what in ("dashboard", "page")}
        pictures = ", ".join(f"[{what}]({path})" for what, path in found.items() if (ROOT / "docs" / path).is_file())
        rows.append((f"`{name}`", scenario.title, f"`{scenario.verdict}`", pictures or "–"))
    return parts.table(("scenario", "incident", "verdict", "pictures"), rows)


_PARTS: Final = (
    ("docs/reference/guarantees.md", "limits", limit_table),
    ("docs/architecture.md", "packages", packages),
    ("docs/recordings.md", "keys", recording_keys),
    ("docs/capacity.md", "types", cache_types),
    ("docs/toolbox.md", "commands", command_list),
    ("README.md", "verdicts", verdicts),
    ("docs/dashboards.md", "incidents", incidents),
)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Each page with its text as it should be."""
    new: dict[str, str] = {}
    for page, name, part in _PARTS:
        text = new.get(page) or (root / page).read_text(encoding="utf-8")
        new[page] = parts.put(text, name, part())
    return new


def main(root: Path = ROOT, check: bool = False) -> int:
    """Write the pages, or with ``check`` name each that would change; 1 = one would."""
    wrong = 0
    for page, text in pages(root).items():
        path = root / page
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{page}: out of date; run python -m docs.generate")
            wrong = 1
        else:
            path.write_text(text, encoding="utf-8")
    return wrong
