"""What the exporter is made of: every dependency pinned by hash, under a licence that allows it, and listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab.supply import advisories
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
        ("MIT", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("GPL-3.0-only", False),
        ("AGPL-3.0-or-later", False),
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


@pytest.mark.parametrize(
    ("status", "errors", "expected"),
    [
        (0, "", 0),
        (1, "Found 1 known vulnerability in 1 package", 1),
        (1, "Max retries exceeded with url", advisories.UNKNOWN),
        (2, "", advisories.UNKNOWN),
    ],
)
def test_advisories_are_clean_found_or_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, errors: str, expected: int
) -> None:
    monkeypatch.setattr(advisories, "find_spec", lambda _name: object())
    done = subprocess.CompletedProcess([], status, "name version id\n", errors)
    monkeypatch.setattr(advisories.subprocess, "run", lambda *_, **__: done)
    assert advisories.check() == expected
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == (expected == advisories.UNKNOWN)


def test_a_dependency_that_the_index_has_no_advisories_of_is_not_called_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--strict``, pip-audit passes it over and says that nothing is known: as behind a mirror."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        skipped = "ERROR:pip_audit._cli:bcrypt: Dependency not found on PyPI and could not be audited: bcrypt (5.0.0)"
        return subprocess.CompletedProcess(command, int("--strict" in command), "", skipped)

    monkeypatch.setattr(advisories, "find_spec", lambda _name: object())
    monkeypatch.setattr(advisories.subprocess, "run", run)
    assert advisories.check() == advisories.UNKNOWN


def test_without_the_tool_one_line_says_so() -> None:
    code = (
        "import sys; sys.modules['pip_audit'] = None; from lab.supply import advisories as a; a.find_spec = lambda n:"
        " None; sys.exit(a.check())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("advisories: not checked: pip-audit is not installed")
    assert len(done.stderr.splitlines()) == 1
