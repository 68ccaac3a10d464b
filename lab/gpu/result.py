"""What one part found: checks, figures, and what could not be asked."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1


@dataclass
class Result:
    """Filled by a part while it runs; ``failed`` is why it ended early, if it did.

    ``checks``: what was expected, whether it held, what was found. ``missing``: what could not be asked, and the
    reason.
    """

    part: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    failed: str | None = None
    format: int = FORMAT

    def check(self, what: str, good: bool, found: object) -> None:
        """Note and print whether something is as it should be."""
        self.checks.append({"what": what, "ok": bool(good), "found": str(found)})
        print(f"  {'ok  ' if good else 'FAIL'} {self.part}: {what}: {found}", flush=True)

    def lacks(self, what: str, reason: object) -> None:
        """Note and print what could not be asked, and why."""
        self.missing.append({"what": what, "reason": str(reason)})
        print(f"  --   {self.part}: {what}: not asked: {reason}", flush=True)

    @property
    def good(self) -> bool:
        """True when the part came to its end and every check held."""
        return self.failed is None and all(check["ok"] for check in self.checks)

    def write(self, directory: Path) -> Path:
        """Write ``<part>.json``."""
        self.seconds = round(time.time() - self.started, 1)
        path = directory / f"{self.part}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def load(directory: Path, part: str) -> Result | None:
    """The result of a part; ``None`` when it was not run. Raises ``ValueError`` for a file of another format."""
    path = directory / f"{part}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of format {FORMAT}")
    return Result(**found)
