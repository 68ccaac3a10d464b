"""What a recording's replay says, as three digests: a change that should move no answer moves none of them, and one
that should shows how far it reaches.

Kept in ``digests.txt``, which ``UPDATE_DIGESTS=1`` rewrites where ``tests/accuracy`` compares; the commit says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvpressure.model.state import State
from kvpressure.recording.timeline import json_line

KEPT: Final = Path(__file__).with_name("digests.txt")
PARTS: Final = {
    "verdict": ("verdict", "confidence", "grade", "row", "runner_up", "stage", "signals"),
    "conditions": ("conditions", "documented_signature"),
    "evidence": ("evidence",),
}
STEP: Final = (
    5  # every fifth tick: what moves an answer moves it for longer, and writing a tick costs as much as judging
)


class Digests:
    """The digests of one recording while it is replayed."""

    def __init__(self) -> None:
        self._hashes = [hashlib.sha256() for _ in PARTS]
        self._ticks = 0

    def add(self, t: float, state: State) -> None:
        """Take one tick."""
        self._ticks += 1
        for engine in state.engines if self._ticks % STEP == 1 else ():
            said = json.loads(json_line(t, engine), parse_float=_nine_digits)
            for total, keys in zip(self._hashes, PARTS.values(), strict=True):
                row = [said["pod"], said["engine"], *(said[key] for key in keys)]
                total.update(json.dumps(row, sort_keys=True).encode())

    def __str__(self) -> str:
        return " ".join(total.hexdigest()[:16] for total in self._hashes)


def _nine_digits(text: str) -> float:
    """The number without its last digits, in which versions of Python differ."""
    return float(f"{float(text):.9g}")


def write(now: Mapping[str, str]) -> None:
    """Keep these digests by recording."""
    rows = (f"{name} {digests}" for name, digests in sorted(now.items()))
    KEPT.write_text("\n".join([f"recording {' '.join(PARTS)}", *rows, ""]), encoding="utf-8")


def moved(now: Mapping[str, str]) -> dict[str, list[str]]:
    """Recordings whose digests are not the kept ones, each with the parts that differ."""
    kept = dict(line.split(" ", 1) for line in KEPT.read_text(encoding="utf-8").splitlines()[1:])
    return {
        name: [part for part, digest in zip(PARTS, now.get(name, "").split(), strict=False) if digest not in old]
        for name in sorted(kept.keys() | now.keys())
        if (old := kept.get(name, "")) != now.get(name)
    }
