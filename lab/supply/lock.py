"""The locked dependencies and what their installed packages say of themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LOCK: Final = ROOT / "requirements" / "serve.txt"  # what the image holds
ALLOWED: Final = frozenset(  # permissive, and MPL-2.0, which asks for its own files only
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
_NAMED: Final = {  # as packages without an SPDX expression write theirs
    "apache software license": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
_PINNED: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)([^\\]*)\\?$")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Locked:
    """One pinned dependency with the digests of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def licence(self) -> str | None:
        """SPDX expression of the installed package; ``None`` where it is not installed or says nothing that
        is known.
        """
        try:
            about = metadata.metadata(self.name)
        except metadata.PackageNotFoundError:
            return None
        if about["License-Expression"]:
            return str(about["License-Expression"])
        told = [text.rpartition("::")[2].strip() for text in about.get_all("Classifier") or () if "License ::" in text]
        for text in (*told, str(about["License"] or "").splitlines()[0] if about["License"] else ""):
            known = text if text in ALLOWED else _NAMED.get(text.lower())
            if known:
                return known
        return None


def locked(path: Path = LOCK) -> list[Locked]:
    """Every dependency of a lock file. Raises ``ValueError`` for a line that pins nothing."""
    return list(_entries(path.read_text(encoding="utf-8")))


def _entries(text: str) -> Iterator[Locked]:
    blocks = re.split(r"\n(?=[^\s#])", re.sub(r"^\s*#.*$\n?", "", text, flags=re.MULTILINE).strip())
    for block in blocks:
        first = block.splitlines()[0].rstrip()
        found = _PINNED.match(first)
        if found is None:
            raise ValueError(f"{first!r} is not pinned; allowed: NAME==VERSION with hashes")
        yield Locked(found[1], found[2].strip(), tuple(_HASH.findall(block)))


def allows(licence: str | None) -> bool:
    """Whether one of the licences that may be chosen is on the list, and all that hold together are."""
    if not licence:
        return False
    choices = re.split(r"\s+OR\s+", licence.replace("(", " ").replace(")", " ").strip())
    return any(all(part.strip() in ALLOWED for part in re.split(r"\s+AND\s+", choice)) for choice in choices)
