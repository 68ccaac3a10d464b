"""Rule mutants: how many seeded faults do the generated unit tests find?

``python -m tools.rules.mutate`` changes one thing in one rule at a time - a comparison flipped or made strict, a
threshold moved by 10 %, a condition dropped, a label dropped from ``by`` or ``on``, a wait halved - and runs the tests
of the alerts that the rule feeds. A mutant is killed when a test fails. The result is written into the package, from
where ``kvpressure bundle`` prints it in ``docs/alerts.md``. Outcomes are kept for rules whose mutants
the same rules and tests judge as in the last run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.bundle.promql import metrics

from kvpressure.bundle import documents
from kvpressure.bundle.promtests import test_files
from kvpressure.bundle.rules import Options, load_groups, rule_file
from kvpressure.bundle.spec import RuleGroup
from kvpressure.bundle.text import duration, number, to_yaml
from kvpressure.settings.thresholds import builtin

FLIPPED = {">=": "<", ">": "<=", "<=": ">", "<": ">=", "==": "!="}
STRICT = {">=": ">", ">": ">=", "<=": "<", "<": "<="}
COMPARISON = re.compile(r"(?<![=!<>])(>=|<=|==|>|<)(?![=~>])")
NUMBER = re.compile(r"(?:>=|<=|>|<)\s*(\d+(?:\.\d+)?)")
LABELS = re.compile(r"\b(?:by|on) \(([^)]+)\)")
INTEGER = re.compile(r"min_over_time\(|:count|restarts:increase")
COUNTED = re.compile(r"count_over_time\([^)]*\) \* (\d+) $")
MATCHERS = re.compile(r"\{[^}]*\}")


@dataclass(frozen=True)
class Mutant:
    """One changed rule: position of the rule, what was done to it, and the rule."""

    index: int
    kind: str
    what: str
    rule: dict[str, Any]


def _outside(expr: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Matches of ``pattern`` that are not inside label matchers."""
    inside = [range(match.start(), match.end()) for match in MATCHERS.finditer(expr)]
    return (match for match in pattern.finditer(expr) if not any(match.start() in span for span in inside))


def expressions(expr: str) -> Iterator[tuple[str, str, str]]:
    """(kind, what, changed expression) for everything but conditions."""
    for match in _outside(expr, COMPARISON):
        for kind, table in (("comparison flipped", FLIPPED), ("comparison strictness", STRICT)):
            if match[1] in table:
                changed = expr[: match.start()] + table[match[1]] + expr[match.end() :]
                yield kind, f"{match[1]} -> {table[match[1]]} at {match.start()}", changed
    for match in _outside(expr, NUMBER):
        for factor in ("0.9", "1.1"):
            moved = number(float(Decimal(match[1]) * Decimal(factor)))
            if INTEGER.search(expr) and "." not in match[1]:  # 2.7 and 3 are the same bound for a count
                moved = str(int(match[1]) + (1 if factor > "1" else -1))
            counted = COUNTED.search(expr[: match.start()])
            if counted and "." not in match[1]:  # 300 and 330 seconds are the same bound for a count of minutes
                apart = max(float(counted[1]), abs(float(moved) - float(match[1])))
                moved = number(float(match[1]) + (apart if factor > "1" else -apart))
            if moved != match[1]:
                yield (
                    "threshold moved 10 %",
                    f"{match[1]} -> {moved}",
                    expr[: match.start(1)] + moved + expr[match.end(1) :],
                )
    for match in _outside(expr, LABELS):
        labels = match[1].split(", ")
        for label in labels:
            rest = ", ".join(item for item in labels if item != label)
            yield (
                "label dropped",
                f"{label} from {match[0]} at {match.start()}",
                expr[: match.start(1)] + rest + expr[match.end(1) :],
            )


def mutants(rules: Sequence[dict[str, Any]], groups: Sequence[RuleGroup], step: dict[int, float]) -> Iterator[Mutant]:
    """Every mutant of every rule."""
    levels = {
        (alert.name, level.severity): level for group in groups for alert in group.alerts for level in alert.levels
    }
    for index, rule in enumerate(rules):
        for kind, what, expr in expressions(rule["expr"]):
            yield Mutant(index, kind, what, {**rule, "expr": expr})
        if "alert" not in rule:
            continue
        level = levels[rule["alert"], rule["labels"]["severity"]]
        for item in level.conditions:
            yield Mutant(index, "condition dropped", item.name, {**rule, "expr": level.full_expr(drop=item.name)})
        for field, seconds in (("for", level.for_seconds), ("keep_firing_for", level.keep_seconds)):
            half = seconds / 2 // step[index] * step[index]  # what an evaluation can see
            if seconds:
                yield Mutant(index, "wait halved", field, {**rule, field: duration(half)})


def readers(rules: Sequence[dict[str, Any]], index: int) -> set[str]:
    """Names of the alerts, and of the recordings themselves, that rule ``index`` feeds."""
    if "alert" in rules[index]:
        return {rules[index]["alert"]}
    fed = {rules[index]["record"]}
    while True:
        more = {_name(rule) for rule in rules if metrics(rule["expr"]) & fed} - fed
        if not more:
            return fed
        fed |= more


def needed(rules: Sequence[dict[str, Any]], wanted: set[str]) -> set[str]:
    """``wanted`` and the recordings that they read, directly or through others."""
    found = set(wanted)
    while True:
        read = {name for rule in rules if _name(rule) in found for name in metrics(rule["expr"])}
        more = {rule["record"] for rule in rules if "record" in rule} & read - found
        if not more:
            return found
        found |= more


def survives(
    mutant: Mutant, document: dict[str, Any], tests: dict[str, dict[str, Any]], rules: Sequence[dict[str, Any]]
) -> bool:
    """Whether every test of the rule itself and of the alerts that it feeds still passes; its own first, they fail
    soonest.
    """
    return all(_passes(mutant, document, tests, rules, titles) for titles in judges(rules, mutant.index))


def judges(rules: Sequence[dict[str, Any]], index: int) -> list[set[str]]:
    """Titles of the tests that judge mutants of rule ``index``, in the order in which they run."""
    own = title_of(rules[index])
    if "alert" in rules[index]:
        return [{own}]
    fed = readers(rules, index)
    return [{own}, {title_of(rule) for rule in rules if _name(rule) in fed}]


def title_of(rule: dict[str, Any]) -> str:
    """With what the names of a rule's tests begin."""
    return str(rule["record"]) if "record" in rule else f"{rule['alert']} {rule['labels']['severity']}"


def judged_by(rules: Sequence[dict[str, Any]], index: int, tests: dict[str, dict[str, Any]]) -> str:
    """Fingerprint of everything that decides about the mutants of rule ``index``."""
    parts = [
        [_evaluated(rule) for rule in rules if _name(rule) in needed(rules, {title.split(" ")[0] for title in titles})]
        + [test for file in tests.values() for test in file["tests"] if _title(test["name"]) in titles]
        for titles in judges(rules, index)
    ]
    return hashlib.sha256(json.dumps([_evaluated(rules[index]), parts], sort_keys=True).encode()).hexdigest()[:16]


def _evaluated(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key != "annotations"}


def _name(rule: dict[str, Any]) -> str:
    return str(rule.get("record") or rule["alert"])


def _passes(
    mutant: Mutant,
    document: dict[str, Any],
    tests: dict[str, dict[str, Any]],
    rules: Sequence[dict[str, Any]],
    titles: set[str],
) -> bool:
    """Whether the tests that begin with ``titles`` pass, or there are none: nobody would notice."""
    involved = needed(rules, {title.split(" ")[0] for title in titles})  # other rules change nothing but the time
    changed, position = deepcopy(document), 0
    for group in changed["groups"]:
        kept = []
        for rule in group["rules"]:
            candidate = mutant.rule if position == mutant.index else rule
            if _name(rule) in involved:
                kept.append({key: value for key, value in candidate.items() if key != "group"})
            position += 1
        group["rules"] = kept
    changed["groups"] = [group for group in changed["groups"] if group["rules"]]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "rules.yaml").write_text(to_yaml(changed))
        files = []
        for name, file in tests.items():
            chosen = [test for test in file["tests"] if _title(test["name"]) in titles]
            if chosen:
                path = Path(directory, name)
                path.write_text(to_yaml({**file, "rule_files": ["rules.yaml"], "tests": chosen}))
                files.append(str(path))
        if not files:
            return True
        return subprocess.run(["promtool", "test", "rules", *files], capture_output=True, check=False).returncode == 0


def _title(name: str) -> str:
    return name.split(":", 1)[0] if not name.startswith("recording ") else name.split(" ")[1]


def run(workers: int, only: str, last: dict[str, Any]) -> dict[str, Any]:
    """All mutants; the summary that is stored. ``last``: that of the last run, whose outcomes are kept where the same
    rules and tests judge.
    """
    options = Options(builtin())
    groups = load_groups(options)
    document = rule_file(groups, options.values)
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    step = dict(
        enumerate(group.interval for group, raw in zip(groups, document["groups"], strict=True) for _ in raw["rules"])
    )
    tests = test_files(groups, options.values, "rules.yaml")
    judged = {title_of(rule): judged_by(rules, index, tests) for index, rule in enumerate(rules)}
    kept = {title for title, print_ in judged.items() if last.get("judged", {}).get(title) == print_}
    survived = set(last.get("survivors", ()))
    found = [m for m in mutants(rules, groups, step) if only in _name(m.rule)]

    def alive(mutant: Mutant) -> bool:
        if title_of(mutant.rule) in kept and not only:
            return _line(mutant) in survived
        return survives(mutant, document, tests, rules)

    with ThreadPoolExecutor(workers) as pool:
        outcome = list(pool.map(alive, found))
    total = Counter(m.kind for m in found)
    killed = Counter(m.kind for m, lives in zip(found, outcome, strict=True) if not lives)
    return {
        "rules": documents.digest(document),
        "kinds": {kind: {"mutants": total[kind], "killed": killed[kind]} for kind in sorted(total)},
        "survivors": sorted(_line(m) for m, lives in zip(found, outcome, strict=True) if lives),
        "judged": judged,
    }


def _line(mutant: Mutant) -> str:
    return f"{title_of(mutant.rule)}: {mutant.kind}: {mutant.what}"


def main() -> int:
    """Run, print, and store the result when all rules were mutated. 1 = fewer than ``--floor`` percent killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="rules whose name contains this; stores nothing")
    parser.add_argument("--all", action="store_true", help="keep nothing of the last run")
    parser.add_argument("--floor", type=float, default=95.0)
    arguments = parser.parse_args()
    last = {} if arguments.all else json.loads(documents.MUTATION_FILE.read_text())
    result = run(arguments.workers, arguments.only, last)
    mutants_, killed = (sum(kind[key] for kind in result["kinds"].values()) for key in ("mutants", "killed"))
    for line in result["survivors"]:
        print("survived:", line)
    for kind, counts in result["kinds"].items():
        print(f"{kind}: {counts['killed']} of {counts['mutants']}")
    share = 100 * killed / mutants_ if mutants_ else 0.0
    print(f"killed {killed} of {mutants_} mutants: {share:.1f} %")
    if not arguments.only:
        documents.MUTATION_FILE.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if share >= arguments.floor else 1


if __name__ == "__main__":
    sys.exit(main())
