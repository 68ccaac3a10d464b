"""The bundle before newer judges: promtool and amtool of the following Debian releases.

``python -m bundle.matrix`` (from ``tests/``) fetches the packages with apt into ``.tools/matrix`` - nothing is installed - and runs
the rules, their unit tests and the Alertmanager example through them, for every source and profile. Prometheus 3 has left-open
ranges, so a test that holds on 2.42, 2.53 and 3.5 asserts nothing that depends on that.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bundle.conftest import ROOT
from kvpressure.bundle.render import render, write
from kvpressure.bundle.rules import PROFILES, SOURCES, Options
from kvpressure.thresholds import builtin

SUITES = ("trixie", "forky")
PACKAGES = ("promtool", "prometheus-alertmanager")
TOOLS = ROOT / ".tools" / "matrix"


def archive() -> str:
    """The Debian archive this machine uses."""
    lines = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"], capture_output=True,
                           text=True, check=True).stdout.split()
    return next(line for line in lines if line.rstrip("/").endswith("/debian"))


def fetch(suite: str) -> Path:
    """The programs of ``suite``, unpacked; fetched only once."""
    home = TOOLS / suite
    programs = home / "root" / "usr" / "bin"
    if (programs / "promtool").exists() and (programs / "amtool").exists():
        return programs
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (home / name).mkdir(parents=True, exist_ok=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (home / "sources.list").write_text(f"deb [signed-by={keyring}] {archive()} {suite} main\n")
    apt = ["apt-get", "-q", "-o", f"Dir::Etc::sourcelist={home}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null",
           "-o", f"Dir::State::lists={home}/lists", "-o", f"Dir::Cache={home}/cache"]
    subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*apt, "download", *PACKAGES], check=True, cwd=home / "debs", stdout=subprocess.DEVNULL)
    for package in (home / "debs").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(home / "root")], check=True)
    return programs


def judge(name: str, promtool: str, amtool: str, tree: Path) -> bool:
    """Whether both accept everything in ``tree``; says what they do not accept."""
    commands = [[promtool, "check", "rules", "alerts/kvpressure-rules.yaml"],
                *([promtool, "test", "rules", str(path)] for path in sorted(tree.glob("alerts/tests/*.yaml"))),
                [amtool, "check-config", "alerts/alertmanager.yaml"]]
    good = True
    for command in commands:
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if result.returncode:
            good = False
            print(f"{name}: {' '.join(command[1:])}\n{(result.stdout + result.stderr)[-2000:]}")
    return good


def version(program: str) -> str:
    """First line of what the program says about itself, shortened."""
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return " ".join((result.stdout or result.stderr).split()[:3]).rstrip(",")


def main() -> int:
    """Judge with the installed programs and with those of each suite. 1 = something was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="*", default=list(SUITES))
    suites = parser.parse_args().suites
    pairs = [(path for name in ("promtool", "amtool") if (path := shutil.which(name))), *(
        (str(programs / "promtool"), str(programs / "amtool")) for programs in map(fetch, suites))]
    failures = 0
    for promtool, amtool in pairs:
        for source in SOURCES:
            for profile in PROFILES:
                with tempfile.TemporaryDirectory() as directory:
                    write(render(Options(builtin(), profile=profile, source=source)), Path(directory))
                    good = judge(f"{version(promtool)}, {source}, {profile}", promtool, amtool, Path(directory))
                failures += not good
                print(f"{version(promtool)} and {version(amtool)}: {source}, {profile}: {'accepted' if good else 'REFUSED'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
