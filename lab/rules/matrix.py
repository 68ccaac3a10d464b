"""The bundle before newer judges: promtool, amtool and VictoriaMetrics' vmalert of the following Debian releases.

``python -m lab.rules.matrix`` fetches the packages with apt into ``.tools/matrix`` - nothing is installed - and runs
the rules, their cases and the Alertmanager example through them, for every profile; vmalert also has
to fire on the recorded incidents what Prometheus fires. Prometheus 3 has left-open ranges, so a test that holds on
2.42, 2.53 and 3.5 asserts nothing that depends on that. What all of them said is ``docs/reports/rule-matrix.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.bundle.conftest import ROOT
from tests.helpers.rule_cases import alert_test, alerts, recording_test, recordings

from kvpressure.bundle.render import RULES, VLLM_ONLY, render, write
from kvpressure.bundle.rules import PROFILES, Options, load_groups
from kvpressure.settings.thresholds import builtin
from lab.rules import replayed, victoria

SUITES = ("trixie", "forky")
PACKAGES = ("promtool", "prometheus-alertmanager", "victoria-metrics")
PROGRAMS = ("promtool", "amtool", "vmalert", "vmalert-tool")
TOOLS = ROOT / ".tools" / "matrix"
PAGE = """\
# Which programs accept the rules, {day}

`make -C lab rule-matrix` checks rules, their cases and the Alertmanager example with newer packages of Debian.

| judge | what | accepts |
|---|---|---|
{rows}

VictoriaMetrics judges some cases differently, so its run leaves them out:

{left_out}
* vmalert-tool takes no NaN samples, so series with NaN are left out of the tests.
"""
REPORT = ROOT / "docs" / "reports" / "rule-matrix.md"


def archive() -> str:
    """The Debian archive this machine uses."""
    lines = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
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
    apt = [
        "apt-get",
        "-q",
        "-o",
        f"Dir::Etc::sourcelist={home}/sources.list",
        "-o",
        "Dir::Etc::sourceparts=/dev/null",
        "-o",
        f"Dir::State::lists={home}/lists",
        "-o",
        f"Dir::Cache={home}/cache",
    ]
    subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*apt, "download", *PACKAGES], check=True, cwd=home / "debs", stdout=subprocess.DEVNULL)
    for package in (home / "debs").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(home / "root")], check=True)
    return programs


def judge(promtool: Path, amtool: Path, tree: Path) -> str:
    """What the two do not accept in ``tree``; empty when everything passes."""
    commands = [
        *([promtool, "check", "rules", rules] for rules in (RULES, VLLM_ONLY)),
        *([promtool, "test", "rules", str(path)] for path in sorted(tree.glob("cases/*/*.json"))),
        [amtool, "check-config", "alerts/alertmanager.yaml"],
    ]
    refused = ""
    for command in commands:
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if result.returncode:
            refused += f"{' '.join(map(str, command[1:]))}\n{(result.stdout + result.stderr)[-2000:]}"
    return refused


def write_cases(options: Options, tree: Path) -> None:
    """The cases of alerts and recordings as files for ``promtool test rules`` below ``tree``."""
    packs = {"literal" if options.profile == "literal" else "kvpressure": options}
    if options.profile == "default":
        packs["vllm"] = replace(options, source="vllm")
    for pack, chosen in packs.items():
        rules, groups = tree / (VLLM_ONLY if pack == "vllm" else RULES), load_groups(chosen)
        cases = {name: alert_test(rules, name, pack, groups) for name in alerts(pack)}
        cases |= {name: recording_test(rules, name, pack) for name in recordings(pack)}
        (tree / "cases" / pack).mkdir(parents=True)
        for name, document in cases.items():
            (tree / "cases" / pack / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def version(program: Path) -> str:
    """First line of what the program says about itself, shortened."""
    result = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return (result.stdout or result.stderr).split(",")[0] + " " + (result.stdout or result.stderr).split()[2]


def main() -> int:
    """Judge with the installed programs and with those of each suite. 1 = something was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="*", default=list(SUITES))
    suites = parser.parse_args().suites
    judges = [(Path("promtool"), Path("amtool"), None)] + [
        (programs / "promtool", programs / "amtool", programs) for programs in map(fetch, suites)
    ]
    found: list[dict[str, Any]] = []
    for promtool, amtool, programs in judges:
        for profile in PROFILES:
            with tempfile.TemporaryDirectory() as directory:
                tree = Path(directory)
                options = Options(builtin(), profile=profile)
                write(render(options), tree)
                write_cases(options, tree)
                note(found, f"{version(promtool)} and {version(amtool)}", profile, judge(promtool, amtool, tree))
                if programs and profile == "default":
                    name = victoria.version(programs)
                    note(found, name, profile, victoria.judge(programs, tree))
                    note(found, name, "all incidents replayed", replayed.judge(programs, tree / RULES))
    if suites == list(SUITES):
        page = PAGE.format(
            day=datetime.now(UTC).date().isoformat(),
            rows="\n".join("| {judge} | {what} | {accepted} |".format_map(item) for item in found),
            left_out="\n".join(f"* {text};" for text in victoria.DIFFERENCES),
        )
        REPORT.write_text(page, encoding="utf-8")
    return 0 if all(item["accepted"] for item in found) else 1


def note(found: list[dict[str, Any]], judge_name: str, what: str, refused: str) -> None:
    """Keep and print one judgement."""
    found.append({"judge": judge_name, "what": what, "accepted": not refused})
    print(f"{judge_name}: {what}: {'REFUSED' if refused else 'accepted'}\n{refused}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
