"""The bundle before VictoriaMetrics' own rule evaluator, and where its language says something else than PromQL.

vmalert-tool reads the same test files under other names: ``metricsql_expr_test``, an ``alertgroup`` on every alert, the
metric name kept by ``round``. It takes no NaN as an input. What it judges differently for good reason is left out, and
``DIFFERENCES`` says why; everything else has to pass.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DIFFERENCES = {
    "a counter's first sample counts as growth from 0, so events from before the first scrape of a new cluster or exporter alert once": re.compile(  # noqa: E501
        r"born-in-new-|^recording (?:gpu:kvpressure_xid_errors|container:kvpressure_allocation_failures):increase"
    ),
    "a recording rule that reads another one of its group lags by one interval, and so does its alert": re.compile(
        r"^(?:GpuMemoryHigh |GpuLost |InferenceModelDown critical|InferenceKVCachePressure critical"
        r"|InferenceRequestsWaitTooLong |recording workload:kvpressure_pods_up:last_timestamp_seconds)"
    ),
}
_ROUNDED = re.compile(r"round\((\S+), 0\.0001\)")
_ALERT = re.compile(r'alertname="(\w+)",')


def different(text: str) -> bool:
    """Whether a test or a series is one that MetricsQL or vmalert judge differently."""
    return any(pattern.search(text) for pattern in DIFFERENCES.values())


def converted(document: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    """A promtool test file as vmalert-tool reads it. ``groups``: alert -> its group."""
    tests = [_converted(test, groups) for test in document["tests"] if not different(test["name"])]
    return {**document, "tests": tests}


def _converted(test: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    kept = [
        series for series in test["input_series"] if "NaN" not in series["values"] and not different(series["series"])
    ]
    found = {**test, "input_series": kept}
    if "promql_expr_test" in found:
        found["metricsql_expr_test"] = [_expression(check, groups) for check in found.pop("promql_expr_test")]
    return found


def _expression(check: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Any]:
    rounded = _ROUNDED.fullmatch(check["expr"])
    samples = [
        {**sample, "labels": f"{rounded[1]}{sample['labels']}" if rounded else _grouped(sample["labels"], groups)}
        for sample in check["exp_samples"]
        if not different(sample["labels"])
    ]
    return {**check, "exp_samples": samples}


def _grouped(labels: str, groups: Mapping[str, str]) -> str:
    return _ALERT.sub(lambda match: f'{match[0]}alertgroup="{groups[match[1]]}",', labels)


def version(programs: Path) -> str:
    """Which release; Debian's programs do not know theirs, the package beside them does."""
    package = next((programs.parents[2] / "debs").glob("victoria-metrics_*.deb"))
    return f"vmalert-tool {package.name.split('_')[1].split('+')[0]}"


def judge(programs: Path, tree: Path) -> str:
    """What vmalert or vmalert-tool of ``programs`` does not accept in ``tree``; empty when everything passes."""
    rules = yaml.safe_load((tree / "alerts/kvpressure-rules.yaml").read_text())
    groups = {rule["alert"]: group["name"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    refused = _run(programs / "vmalert", "-dryRun", f"-rule={tree}/alerts/kvpressure-rules.yaml")
    for path in sorted(tree.glob("alerts/tests/*.yaml")):
        document = converted(yaml.safe_load(path.read_text()), groups)
        if document["tests"]:
            target = tree / "alerts" / f"victoria-{path.name}"
            target.write_text(
                yaml.safe_dump({**document, "rule_files": ["kvpressure-rules.yaml"]}, sort_keys=False, width=1 << 20)
            )
            refused += _run(programs / "vmalert-tool", "unittest", "--disableAlertgroupLabel", f"--files={target}")
    return refused


def _run(*command: str | Path) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else f"{command[-1]}: {(result.stdout + result.stderr)[-1500:]}\n"
