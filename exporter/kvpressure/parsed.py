"""Values of parsed JSON and YAML from outside: what is not of the expected type counts as missing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text; ``None`` for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def mappings(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list; none if it is no list."""
    return [item for item in items(value) if isinstance(item, Mapping)]


def text(value: object) -> str:
    """``value`` if it is a text, else ""."""
    return value if isinstance(value, str) else ""


def moment(value: object) -> float | None:
    """Unix seconds of a time as Kubernetes writes it (RFC 3339; without a zone it is UTC); ``None`` if it is none."""
    try:
        time = datetime.fromisoformat(text(value))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE](-?\d{1,2}))?")
_SCALE: Final = {
    "": 1.0,
    **{prefix: 1000.0**power for prefix, power in zip("numkMGTPE", (-3, -2, -1, 1, 2, 3, 4, 5, 6), strict=True)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", 1)},
}


def quantity(value: object) -> float | None:
    """A Kubernetes quantity (``500m``, ``64Gi``, ``1e9``, 4) as a number; None when invalid or negative."""
    found = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if found is None:
        return None
    return float(found[1]) * (10.0 ** int(found[3]) if found[3] else _SCALE[found[2] or ""])
