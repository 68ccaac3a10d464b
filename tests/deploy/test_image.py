"""The image, as far as that goes without building it; ``make image-test`` builds and starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.chart import ROOT, chart, load_script
from kvpressure import __version__

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


def test_the_stage_that_runs_installs_nothing_and_removes_pip() -> None:
    assert "pip install" not in FINAL
    assert "apt" not in FINAL
    assert re.search(r"rm -rf .*site-packages/pip\*", FINAL)
    assert FINAL.count("COPY ") == 1


def test_labels_user_and_command() -> None:
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in FINAL
    assert f"ARG VERSION={__version__}\n" in FINAL
    assert chart().metadata["appVersion"] == __version__
    assert re.search(r"^USER 0\nENTRYPOINT \[\"kvpressure\"\]\nCMD \[\"serve\"\]\n\Z", FINAL, re.MULTILINE)


def test_the_context_has_what_is_copied_and_no_more() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        part.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.*)$", BUILD, re.MULTILINE)
        for part in line.split()[:-1]
    }
    assert kept == copied


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("usr/bin/gcc", "compiler"),
        ("usr/bin/x86_64-linux-gnu-gcc-12", "compiler"),
        ("usr/local/bin/pip3.11", "installer"),
        ("usr/local/lib/python3.11/site-packages/pip/__init__.py", "installer"),
        ("opt/kvpressure/lib/python3.11/site-packages/setuptools-80.0.dist-info/METADATA", "installer"),
        ("root/.bash_history", "shell history"),
        ("root/.python_history", "shell history"),
        ("root/.cache/pip/x", "cache"),
        ("opt/kvpressure/lib/python3.11/site-packages/kvpressure/__pycache__/a.pyc", "cache"),
        ("src/pyproject.toml", "sources of the build"),
        ("usr/lib/os-release", None),
        ("opt/kvpressure/bin/kvpressure", None),
    ],
)
def test_the_check_recognises_what_is_not_wanted(path: str, what: str | None, tmp_path: Path) -> None:
    check = load_script(ROOT / "tools" / "image" / "check.py")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("")
    assert check.check_files(tmp_path) == ([f"{what}: /{path}"] if what else [])
