"""Quote the recipes of ``tests/recipes`` in CONTRIBUTING.md: ``python -m tools.recipes [--check]``.

A recipe is a folder, introduced by the docstring of ``tests/recipes/test_<folder>.py``. What a person writes by hand
is quoted whole, in the order of the paths.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "tests" / "recipes"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- recipes: written by python -m tools.recipes -->\n", "<!-- end of recipes -->\n"
LANGUAGES = {".py": "python", ".txt": "ini", ".yaml": "yaml", ".j2": "jinja"}


def files(recipe: Path) -> list[Path]:
    """What a person writes by hand: everything but metadata and empty files."""
    return [
        path
        for path in sorted(recipe.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.name != "METADATA" and path.read_text().strip()
    ]


def quoted(root: Path) -> str:
    """All recipes below ``root`` as Markdown."""
    parts = []
    for recipe in sorted(path for path in root.glob("*") if path.is_dir() and files(path)):
        test = root / f"test_{recipe.name}.py"
        about = (ast.get_docstring(ast.parse(test.read_text())) or "").strip()
        title = recipe.name.replace("_", " ")
        parts.append(f"### Add: {title}\n\n{about}\n\nProved by `tests/recipes/{test.name}`.\n")
        for path in files(recipe):
            fence = LANGUAGES.get(path.suffix, "")
            parts.append(f"`{path.relative_to(root)}`\n\n```{fence}\n{path.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def document(text: str, root: Path = RECIPES) -> str:
    """``text`` with today's recipes between its two marks. Raises ``ValueError`` where one is missing."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    recipes = quoted(root)
    return f"{before}{BEGIN}\n{recipes}\n{END}{after}" if recipes else f"{before}{BEGIN}{END}{after}"


def main() -> int:
    """Write, or with ``--check`` say whether it would change something."""
    text = DOCUMENT.read_text(encoding="utf-8")
    new = document(text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print("CONTRIBUTING.md: recipes are not those of tests/recipes; make generate writes them")
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
