"""How tests call promtool: behind the live servers of other tests, which it would make late with a thread a core."""

from __future__ import annotations

from typing import Final

PROMTOOL: Final = ("nice", "-n", "10", "promtool")
