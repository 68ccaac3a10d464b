"""Recorded incidents before a running vmalert: does it fire what Prometheus' own engine fires on the same samples?

vmalert-tool holds the scraped series of the incidents in a VictoriaMetrics of its own, each incident as a cluster, lets
vmalert evaluate the rules over them at the interval of most pages, and is asked at the end which alerts
fired at any time. What promtool says of the same series is what is expected.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final

import yaml

from kvpressure.bundle.spec import EVALUATION_INTERVALS
from lab.accuracy.data import incidents
from lab.alerts.engine import HIDDEN, evaluate_each
from lab.alerts.replayed import scrapes
from lab.alerts.series import SCRAPE_SECONDS, Series

_PACE: Final = float(EVALUATION_INTERVALS["steady"])  # seconds; one rule counts evaluations of its recording
_SAMPLE: Final = re.compile(r"\{([^{}]*)\} [\d.]+E\+\d\d")
_EXPONENT: Final = re.compile(r"-?[\d.]+e[+-]\d+")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

Fired = frozenset[tuple[str, str, str]]
"""Incident, alert, severity."""


def by_prometheus(rules: Path, many: Mapping[str, Series]) -> Fired:
    """What Prometheus' engine fires at any time."""
    return frozenset(
        (name, one.name, one.labels["severity"])
        for name, active in evaluate_each(many, rules=rules, evaluation_seconds=_PACE).items()
        for one in active
        if one.firing
    )


def by_vmalert(programs: Path, rules: Path, many: Mapping[str, Series]) -> Fired:
    """What vmalert fires at any time: it is told to expect nothing, and what it prints instead is the answer."""
    with tempfile.TemporaryDirectory(prefix="kvpressure-") as folder:
        path = Path(folder, "incidents.yaml")
        text = yaml.dump(_document(rules, many), Dumper=yaml.CSafeDumper, sort_keys=False, width=1 << 30)
        path.write_text(text, encoding="utf-8")
        command = [str(programs / "vmalert-tool"), "unittest", "--disableAlertgroupLabel", f"--files={path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode and "got:" not in said:
        raise RuntimeError(f"vmalert-tool: {said.strip()[-1000:]}")
    got = [line for line in said.splitlines() if line.lstrip().startswith("got:")]
    labels = [dict(_LABEL.findall(sample)) for line in got for sample in _SAMPLE.findall(line)]
    return frozenset((one["cluster"], one["alertname"], one["severity"]) for one in labels)


def _document(rules: Path, many: Mapping[str, Series]) -> dict[str, Any]:
    """A test file of vmalert-tool that asks at the last evaluation of each incident which alerts have fired."""
    groups = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    series = [
        {"series": labelled.replace("{", f'{{cluster="{name}",', 1), "values": _EXPONENT.sub(_written_out, values)}
        for name, one in many.items()
        for labelled, values in one.between(0, one.scrapes)
        if "NaN" not in values
    ]
    questions = [
        {"expr": _question(name), "eval_time": f"{_last_evaluation(one):g}s", "exp_samples": []}
        for name, one in many.items()
    ]
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{_PACE:g}s",
        "group_eval_order": [group["name"] for group in groups],
        "tests": [
            {
                "name": "incidents",
                "interval": f"{SCRAPE_SECONDS:g}s",
                "input_series": series,
                "metricsql_expr_test": questions,
            }
        ],
    }


def _written_out(number: re.Match[str]) -> str:
    """vmalert-tool 1.112 reads no exponents."""
    return f"{float(number[0]):f}"


def _question(name: str) -> str:
    wanted = f'cluster="{name}",alertstate="firing",alertname!~"{"|".join(HIDDEN)}"'
    return f"count by (cluster, alertname, severity) (count_over_time(ALERTS{{{wanted}}}[1d]))"


def _last_evaluation(series: Series) -> float:
    """Seconds; as ``evaluate_each`` counts them."""
    return (ceil(series.scrapes * SCRAPE_SECONDS / _PACE) - 1) * _PACE


def judge(programs: Path, rules: Path, names: Sequence[str] = ()) -> str:
    """What only one of the two fires, a line each; empty when they agree. ``names``: recordings, or all incidents."""
    many = {name: scrapes(name, SCRAPE_SECONDS) for name in names or [item.name for item in incidents()]}
    theirs, ours = by_vmalert(programs, rules, many), by_prometheus(rules, many)
    if not ours:
        return "Prometheus' engine fired nothing, so nothing was compared\n"
    only = [("vmalert", theirs - ours), ("Prometheus", ours - theirs)]
    return "".join(f"only {who} fires {' '.join(one)}\n" for who, which in only for one in sorted(which))
