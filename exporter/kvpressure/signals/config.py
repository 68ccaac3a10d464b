"""Numbers in the labels of vLLM's ``cache_config_info``."""

from __future__ import annotations

from typing import Final

LARGEST: Final = 1e15  # beyond it no count of tokens, blocks or requests is meant


def positive(text: str | None) -> float | None:
    """The number that a label says, if it is above 0 and believable; ``None`` for anything else ("None", "nan", "x")."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 < value <= LARGEST else None
