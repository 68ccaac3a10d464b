"""The bundle before VictoriaMetrics' own rule evaluator, and where its language says something else than PromQL.

vmalert-tool reads the same cases under other names: ``metricsql_expr_test``, and the metric name kept by ``round``.
What it judges differently for good reason is left out, and ``DIFFERENCES`` says why; everything else has to pass.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIFFERENCES = {
    "a counter's first sample counts as growth from 0, so events from before the first scrape of a new cluster or exporter alert once": re.compile(  # noqa: E501
        r"gpu:kvpressure_xid_errors:increase"
    ),
    "a recording rule that reads another one of its group lags by one interval, and so does its alert": re.compile(
        r"GpuMemoryHigh|GpuLost|InferenceModelDown|InferenceKVCachePressure|InferenceSlow"
        r"|pool:kvpressure_(?:answered:last_timestamp_seconds|pods_missing:count|replicas_\w+:max|rollout:present)"
        r"|InferenceModelUnobserved|InferenceCapacityLost"
    ),
    "ALERTS of the same group are seen one evaluation later, so a ticket may accompany its page (Alertmanager's inhibition drops it)": re.compile(  # noqa: E501
        r"InferenceRequestsFailing"
    ),
}
_ROUNDED = re.compile(r"round\((\w[\w:]*)\{.*\}, 0\.0001\)")


def different(name: str) -> bool:
    """Whether the cases of this alert or recording are judged differently by MetricsQL or vmalert."""
    return any(pattern.fullmatch(name) for pattern in DIFFERENCES.values())


def converted(document: Mapping[str, Any]) -> dict[str, Any]:
    """A promtool test file as vmalert-tool reads it."""
    (test,) = document["tests"]
    checks = [_expression(check) for check in test["promql_expr_test"]]
    kept = {key: value for key, value in test.items() if key != "promql_expr_test"}
    return {**document, "tests": [{**kept, "metricsql_expr_test": checks}]}


def _expression(check: Mapping[str, Any]) -> dict[str, Any]:
    rounded = _ROUNDED.fullmatch(check["expr"])
    name = rounded[1] if rounded else ""
    samples = [{**sample, "labels": f"{name}{sample['labels']}"} for sample in check["exp_samples"]]
    return {**check, "exp_samples": samples}


def version(programs: Path) -> str:
    """Which release; Debian's programs do not know theirs, the package beside them does."""
    package = next((programs.parents[2] / "debs").glob("victoria-metrics_*.deb"))
    return f"vmalert-tool {package.name.split('_')[1].split('+')[0]}"


def judge(programs: Path, tree: Path) -> str:
    """What vmalert or vmalert-tool of ``programs`` does not accept in ``tree``; empty when everything passes."""
    refused = _run(programs / "vmalert", "-dryRun", f"-rule={tree}/alerts/kvpressure-rules.yaml")
    for path in sorted(tree.glob("cases/*/*.json")):
        if not different(path.stem):
            target = tree / f"victoria-{path.name}"
            target.write_text(json.dumps(converted(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
            refused += _run(programs / "vmalert-tool", "unittest", "--disableAlertgroupLabel", f"--files={target}")
    return refused


def _run(*command: str | Path) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else f"{command[-1]}: {(result.stdout + result.stderr)[-1500:]}\n"
