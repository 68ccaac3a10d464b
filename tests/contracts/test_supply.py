"""What the exporter is made of: every dependency pinned by hash, under a licence that allows it, and listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.supply.lock import LOCK, ROOT, allows, locked
from lab.supply.sbom import document, main

PACKAGES = locked()


def test_the_lock_is_read_whole() -> None:
    assert len(PACKAGES) == sum(
        "==" in line for line in LOCK.read_text().splitlines() if not line.startswith((" ", "#"))
    )
    assert {"prometheus-client", "requests"} <= {package.name for package in PACKAGES}


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_dependency_is_pinned_by_hash(file: Path) -> None:
    assert [package.name for package in locked(file) if not package.hashes] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_dependency_has_a_licence_that_allows_it(package) -> None:
    assert allows(package.licence), f"{package.name}: {package.licence}"


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("", False),
        (None, False),
    ],
)
def test_only_listed_licences_are_allowed(licence: str | None, allowed: bool) -> None:
    assert allows(licence) is allowed


def test_what_is_not_pinned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text("requests>=2\n")
    with pytest.raises(ValueError, match="not pinned"):
        locked(tmp_path / "lock.txt")


def test_the_bill_lists_every_package_and_is_the_same_each_time(tmp_path: Path) -> None:
    assert main([str(tmp_path / "build" / "sbom.json")]) == 0
    bill = json.loads((tmp_path / "build" / "sbom.json").read_text())
    assert bill == json.loads(json.dumps(document(PACKAGES)))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed = {(one["name"], one["version"]): one for one in bill["components"]}
    assert set(listed) == {(package.name, package.version) for package in PACKAGES}
    assert all(one["licenses"] and one["properties"] for one in listed.values())
    assert sorted(bill["dependencies"][0]["dependsOn"]) == sorted(one["bom-ref"] for one in listed.values())
