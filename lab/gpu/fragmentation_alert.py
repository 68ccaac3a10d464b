"""Does the shipped alert fire on the measured figures, and clear? Asked of Prometheus's own engine, where it is."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from lab.gpu.children import ROOT
from lab.gpu.exporter import POD

RULES: Final = ROOT / "alerts/kvpressure-rules.yaml"
ALERT: Final = "InferenceMemoryFragmentation"
STEPS: Final = (("fill", 0), ("fail", 1), ("release", 0))
HOLD_MINUTES: Final = 30  # of each figure: twice what the alert waits
LABELS: Final = f'namespace="{POD[0]}",pod="{POD[1]}",model_name="none",engine="0"'
FIGURES: Final = ("fragmentation_bytes", "finding")
READ: Final = f'kvpressure_documented_number{{number="fragmentation",{LABELS}}}'
"""What the alert reads: the bytes, while the finding holds."""

Figures = Mapping[str, float | None]
"""``fragmentation_bytes`` and ``finding`` as the exporter showed them at a step."""


def sentence(shown: Mapping[str, Figures]) -> str:
    """What came of it, or why it was not asked. ``shown``: the figures by step."""
    told = {name: [shown[step][name] for step, _ in STEPS if step in shown] for name in FIGURES}
    if any(None in values or len(values) < len(STEPS) for values in told.values()):
        return f"The alert {ALERT} was not asked: a figure is absent."
    if shutil.which("promtool") is None:
        return f"The alert {ALERT} was not asked: promtool is not there."
    wrong = _promtool([(size or 0.0) * (fragmented or 0.0) for size, fragmented in zip(*told.values(), strict=True)])
    held = f"each figure held for {HOLD_MINUTES} minutes in Prometheus's rule engine (`promtool test rules`)"
    if wrong is None:
        return f"The alert {ALERT} is silent when full, fires when fragmented and clears after the release ({held})."
    return f"**The alert {ALERT} does not do as it should** ({held}): `{wrong}`"


def _promtool(read: Sequence[float]) -> str | None:
    """None when all is as expected, else promtool's complaint."""
    ends = [HOLD_MINUTES * (number + 1) - 1 for number in range(len(STEPS))]
    firing = f'count(ALERTS{{alertname="{ALERT}",alertstate="firing"}}) or vector(0)'
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": READ, "values": " ".join(f"{value:.0f}x{HOLD_MINUTES - 1}" for value in read)}
                ],
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{end}m", "exp_samples": [{"labels": "{}", "value": expected}]}
                    for end, (_, expected) in zip(ends, STEPS, strict=True)
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "test.yaml"
        path.write_text(yaml.safe_dump(test))
        done = subprocess.run(
            ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
        )
    return None if done.returncode == 0 else " ".join((done.stdout + done.stderr).split())[:300]
