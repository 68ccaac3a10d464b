"""Whoever takes one of several engines takes the one in most trouble by ``engine_order.worst_first``. What each command
then prints: ``tests/toolbox/test_worst_engine_first.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import kvpressure

PACKAGE: Final = Path(kvpressure.__file__).parent
CHOSEN_OTHERWISE: Final = {
    "answered[0]": "sorted before",
    "max(self.answered, told)": "a number of answers",
    "next((engine for engine in state.engines if engine.key == self.key))": "the same engine at another moment",
    "next((engine.error for engine in state.engines if engine.error is not None), failed)": "a reason, no engine",
    "page.engines[0]": "what all engines of one server share",
    "sorted({case.view.name for case in cases})": "a list of names",
    "sorted(self._engines.keys() - engines.keys())": "each is logged",
}
"""Why this place needs no order of trouble."""
_ENGINES: Final = re.compile(r"\b(?:engines|views|cases|answered)\b")


def test_no_code_chooses_an_engine_by_an_order_of_its_own() -> None:
    seen = set()
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in ("cli", "toolbox", "publish", "runtime"):
            continue
        for found in ast.walk(ast.parse(file.read_text())):
            match found:
                case ast.Call(func=ast.Name("min" | "max" | "sorted" | "next"), args=[among, *_], keywords=keywords):
                    ordered = any("worst_first(" in f"{ast.unparse(one.value)}(" for one in keywords)
                case ast.Subscript(value=among, slice=ast.Constant(0)):
                    ordered = False
                case _:
                    continue
            text = ast.unparse(found)
            if _ENGINES.search(ast.unparse(among)) and not ordered and "reason_text" not in text:
                seen.add(text)
                wrong += [] if text in CHOSEN_OTHERWISE else [f"{file.name}:{found.lineno}: {text}"]
    assert not wrong
    assert seen == set(CHOSEN_OTHERWISE)
