"""What commands print for people."""

from __future__ import annotations

import json
import sys


def answer(form: str, values: object, text: str) -> None:
    """Print the result of a command: ``values`` where ``form`` is json, else ``text``."""
    print(json.dumps(values, indent=2) if form == "json" else text, flush=True)


def waiting(text: str) -> None:
    """Say on a terminal's standard error what takes a while."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr)
