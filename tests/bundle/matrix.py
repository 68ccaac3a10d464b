"""The bundle before newer judges: promtool, amtool and VictoriaMetrics' vmalert of the following Debian releases.

``python -m bundle.matrix`` (from ``tests/``) fetches the packages with apt into ``.tools/matrix`` - nothing is installed - and runs
the rules, their unit tests and the Alertmanager example through them, for every source and profile. Prometheus 3 has left-open
ranges, so a test that holds on 2.42, 2.53 and 3.5 asserts nothing that depends on that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bundle import victoria
from bundle.conftest import ROOT
from kvpressure.bundle.render import render, write
from kvpressure.bundle.rules import PROFILES, SOURCES, Options
from kvpressure.thresholds import builtin

SUITES = ("trixie", "forky")
PACKAGES = ("promtool", "prometheus-alertmanager", "victoria-metrics")
PROGRAMS = ("promtool", "amtool", "vmalert", "vmalert-tool")
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
    if all((programs / name).exists() for name in PROGRAMS):
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


def judge(name: str, promtool: Path, amtool: Path, tree: Path) -> bool:
    """Whether both accept everything in ``tree``; says what they do not accept."""
    commands = [[promtool, "check", "rules", "alerts/kvpressure-rules.yaml"],
                *([promtool, "test", "rules", str(path)] for path in sorted(tree.glob("alerts/tests/*.yaml"))),
                [amtool, "check-config", "alerts/alertmanager.yaml"]]
    good = True
    for command in commands:
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if result.returncode:
            good = False
            print(f"{name}: {' '.join(map(str, command[1:]))}\n{(result.stdout + result.stderr)[-2000:]}")
    print(f"{name}: {'accepted' if good else 'REFUSED'}", flush=True)
    return good


def version(program: Path) -> str:
    """First line of what the program says about itself, shortened."""
    result = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return " ".join((result.stdout or result.stderr).split()[:3]).rstrip(",")


def main() -> int:
    """Judge with the installed programs and with those of each suite. 1 = something was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="*", default=list(SUITES))
    suites = parser.parse_args().suites
    judges = [(Path("promtool"), Path("amtool"), None)] + [
        (programs / "promtool", programs / "amtool", programs) for programs in map(fetch, suites)]
    failures = 0
    for promtool, amtool, programs in judges:
        for source in SOURCES:
            for profile in PROFILES:
                with tempfile.TemporaryDirectory() as directory:
                    write(render(Options(builtin(), profile=profile, source=source)), Path(directory))
                    failures += not judge(f"{version(promtool)} and {version(amtool)}: {source}, {profile}", promtool, amtool, Path(directory))
                    if programs and (source, profile) == ("kvpressure", "default"):
                        failures += not judge_victoria(programs, Path(directory))
    for why in victoria.DIFFERENCES:
        print(f"not asked of VictoriaMetrics: {why}")
    return 1 if failures else 0


def judge_victoria(programs: Path, tree: Path) -> bool:
    """Whether vmalert accepts the rules, and vmalert-tool their tests."""
    refused = victoria.judge(programs, tree)
    print(refused, end="")
    package = next((programs.parents[2] / "debs").glob("victoria-metrics_*.deb")).name.split("_")[1]  # Debian's programs do not know their version
    print(f"vmalert-tool of victoria-metrics {package}: kvpressure, default: {'REFUSED' if refused else 'accepted'}", flush=True)
    return not refused


if __name__ == "__main__":
    sys.exit(main())
