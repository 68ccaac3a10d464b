"""Documents and workflows for people who carry the project on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.release import notes as release_notes

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


class TestWorkflows:
    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_actions_are_pinned_to_a_commit_and_nothing_is_allowed_by_default(self, path: Path) -> None:
        used = [step["uses"] for step in steps(path) if "uses" in step]
        assert used
        assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []
        assert yaml.safe_load(path.read_text())["permissions"] == {}

    @pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
    def test_what_runs_the_repositorys_code_can_write_nothing(self, path: Path) -> None:
        """A build runs what dependencies bring. Rights are held by jobs that run none of it, behind an environment."""
        for name, job in jobs(path).items():
            rights = {right for right, access in job["permissions"].items() if access != "read"}
            runs = " ".join(step.get("uses", "") + step.get("run", "") for step in job["steps"])
            built = re.search(r"checkout@|setup-\w+@|build-push|\b(?:python|pip|make|docker build)", runs)
            assert not (rights and built), name
            assert bool(rights) == ("environment" in job), name

    def test_everything_that_is_released_is_attested_or_signed_by_its_digest(self) -> None:
        publish = jobs(ROOT / ".github/workflows/release.yml")["publish"]["steps"]
        files = "files/*"
        attested = [step.get("with", {}).get("subject-path") for step in publish].index(files)
        runs = [step.get("run", "") for step in publish]
        (released,) = (place for place, run in enumerate(runs) if "gh release create" in run)
        assert attested < released
        assert re.search(rf'"\$GITHUB_REF_NAME" {re.escape(files)} --', runs[released])
        pushed = [run for run in runs if re.search(r"\b(?:skopeo copy|helm push|docker push)\b", run)]
        assert len(pushed) == 2
        assert all(re.search(r'cosign sign --yes "\S+@\$(\(cat )?digest', run) for run in pushed)


def test_the_release_has_one_version_and_notes() -> None:
    assert release_notes.other_versions("0.1.0") == []
    assert release_notes.notes("0.1.0").startswith("First release.")
