"""The image, as far as that goes without building it; ``make image-test`` builds and starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import ROOT
from tests.helpers.web import serving_pages

DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILD, FINAL = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


def test_hadolint_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_what_is_installed_is_pinned_by_hash() -> None:
    installs = re.findall(r"pip install[^&\n]*", BUILD)
    assert len(installs) == 3
    for command in installs:
        assert "--require-hashes" in command or "--no-deps --no-build-isolation" in command
    for name in re.findall(r"-r (\S+)", BUILD):
        text = (ROOT / name).read_text()
        assert all("--hash=sha256:" in entry for entry in re.findall(r"^\S+==.*(?:\n .*)*", text, re.MULTILINE))


def test_a_release_gives_every_argument_that_has_no_default_of_its_own() -> None:
    """Else a label of the published image says "unknown", and its base is whatever the tag points to that day."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    (build,) = [step for step in workflow["jobs"]["build"]["steps"] if "build-args" in step.get("with", {})]
    given = {line.partition("=")[0] for line in build["with"]["build-args"].splitlines()}
    assert given == {*re.findall(r'^ARG (\w+)=(?:unknown|"")$', DOCKERFILE, re.MULTILINE), "VERSION"}
    assert build["with"]["platforms"] == "linux/amd64,linux/arm64"


def _health_command() -> list[str]:
    command: list[str] = json.loads(re.search(r"^HEALTHCHECK .*?CMD (\[[^\n]*\])$", FINAL, re.DOTALL | re.MULTILINE)[1])
    return [sys.executable, *command[1:]]


@pytest.mark.live
def test_the_health_check_asks_the_exporter() -> None:
    def healthy(address: str) -> bool:
        environment = {"HEALTHCHECK_URL": f"{address}/-/healthy"}
        return subprocess.run(_health_command(), env=environment, capture_output=True).returncode == 0

    with serving_pages(lambda path: b"" if path == "/-/healthy" else None) as address:
        assert healthy(address)
    assert not healthy(address)
    with serving_pages(lambda _: None) as address:
        assert not healthy(address)
