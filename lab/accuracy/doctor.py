"""Holds the rule that the comparison calls vllm-doctor's to the installed package.

``python -m lab.accuracy.doctor PYTHON`` asks the package under that interpreter (a virtual environment under
``build/``) about a grid of KV usage and queues, and compares with the rule in ``telemetry.ONE_LINE_RULES``. Exit 1
where they differ.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Final

from lab.accuracy.run import Sample
from lab.accuracy.telemetry import ONE_LINE_RULES

_ASK: Final = """
import json, sys
from vllm_doctor.metrics import MetricSeriesSnapshot
from vllm_doctor.rules.kv_cache_pressure import KVCachePressureRule
rule = KVCachePressureRule()
said = []
for kv, waiting in json.load(sys.stdin):
    found = rule.run(MetricSeriesSnapshot(kv_cache_usage_perc=kv, num_requests_waiting=waiting))
    said.append(None if found is None else found.confidence.value)
json.dump(said, sys.stdout)
"""


def main() -> int:
    """Compare; prints what differs."""
    grid = list(itertools.product([n / 200 for n in range(201)], [0.0, 1.0, 30.0]))
    asked = subprocess.run(
        [sys.argv[1], "-c", _ASK], input=json.dumps(grid), capture_output=True, text=True, check=True
    )
    rules = dict(ONE_LINE_RULES)
    high, any_ = (rule for name, rule in rules.items() if name.startswith("vllm-doctor"))
    wrong = 0
    for (kv, waiting), said in zip(grid, json.loads(asked.stdout), strict=True):
        sample = Sample(0.0, kv=kv, waiting=waiting)
        if (high(sample), any_(sample)) != (said == "high", said is not None):
            wrong += 1
            print(f"usage {kv:g}, {waiting:g} waiting: vllm-doctor says {said}")
    print(f"{len(grid)} points, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
