"""How numbers are written in an exposition."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """As prometheus_client writes it: always with a point, an exponent from a million on."""
    value = float(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    point = text.find(".")
    if value > 0 and point > 6:
        digits = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
        return f"{digits}e+{point - 1:02d}"
    return text
