"""A bill of materials (CycloneDX 1.6, JSON) of what the image installs, from the lock and the installed packages.

python -m lab.supply.sbom [FILE]
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any, Final

from kvpressure import __version__
from lab.supply.lock import LOCK, Locked, locked

_NAMESPACE: Final = uuid.UUID(
    "7d1d2bb6-7a49-4b5e-9d4e-0f6d0e1f3f52"
)  # of serial numbers: the same content gives the same one


def document(packages: list[Locked]) -> dict[str, Any]:
    """The bill. The same lock gives the same bytes: no time, no place."""
    names = [f"{package.name}=={package.version}" for package in packages]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, ' '.join([__version__, *names]))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "kvpressure",
                "name": "kvpressure",
                "version": __version__,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [_component(package) for package in packages],
        "dependencies": [{"ref": "kvpressure", "dependsOn": [_url(package) for package in packages]}],
    }


def _url(package: Locked) -> str:
    return f"pkg:pypi/{package.name.lower().replace('_', '-')}@{package.version}"


def _component(package: Locked) -> dict[str, Any]:
    licence = package.licence
    return {
        "type": "library",
        "bom-ref": _url(package),
        "name": package.name,
        "version": package.version,
        "purl": _url(package),
        **({"licenses": [{"expression": licence}]} if licence else {}),
        # A lock holds the digests of all files of a release, for every platform; a component's own hashes would be of
        # one.
        "properties": [{"name": "kvpressure:sha256", "value": digest} for digest in package.hashes],
    }


def main(arguments: list[str]) -> int:
    """Write the bill to a file, or to standard output."""
    text = json.dumps(document(locked(LOCK)), indent=2) + "\n"
    if not arguments:
        sys.stdout.write(text)
        return 0
    Path(arguments[0]).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments[0]).write_text(text, encoding="utf-8")
    print(f"{arguments[0]}: {text.count('purl')} components")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
