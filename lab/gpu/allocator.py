"""Part ``allocator``: real fragmentation in torch's allocator, as torch, the plugin, the exporter and NVML see it."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvpressure.settings.thresholds import builtin
from kvpressure_vllm.allocator import KEYS
from kvpressure_vllm.registry_gauges import ALLOCATOR
from lab.gpu import privileges
from lab.gpu.children import Child, ChildError, module
from lab.gpu.exporter import POD, Exporter, idle_engine, plugin_registry, value
from lab.gpu.load import START_SECONDS
from lab.gpu.options import Options
from lab.gpu.result import Result

STEPS: Final = ("fill", "fragment", "fail", "release")
STEP_SECONDS: Final = 60.0
SAME: Final = 0.01
REPORT_SECONDS: Final = 12.0  # a report a second, read a second later, published a second later
NVML_SECONDS: Final = 2.0  # until its reading is of the same moment as the rest
ENGINE: Final = f'pod="{POD[1]}"'
SCOPE: Final = 'scope="allocator"'
NAMES: Final = tuple(name for name, _ in KEYS)
NO_EXPANDABLE: Final = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:False")


def run(result: Result, options: Options) -> None:
    """Start, fill, fragment, fail, release; after each all are asked."""
    with ExitStack() as stack:
        reports = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        torch = stack.enter_context(
            Child(
                options.fragment or module("fragment"),
                {**NO_EXPANDABLE, "KVPRESSURE_PLUGIN": "1", "PROMETHEUS_MULTIPROC_DIR": str(reports)},
            )
        )
        try:
            first = torch.answer(START_SECONDS)
        except ChildError as error:
            result.lacks("fragmentation", error)
            return
        result.data |= {"limit_bytes": first.pop("limit"), "steps": []}
        flag = stack.enter_context(idle_engine(reports))
        exporter = stack.enter_context(Exporter(privileges.AS_IS, flag, "--engine.pace=fixed"))
        _look(result, "start", first, reports, exporter)
        for step in STEPS:
            torch.tell(step)
            _look(result, step, torch.answer(STEP_SECONDS), reports, exporter)
    _judge(result, {step["step"]: step for step in result.data["steps"]})


def _look(result: Result, step: str, truth: dict[str, Any], reports: Path, exporter: Exporter) -> None:
    """Wait until the exporter's page has torch's figures, then note what everybody says."""
    wanted = truth["reserved_bytes"] - truth["allocated_bytes"]
    end = time.monotonic() + REPORT_SECONDS
    while True:
        report, page = _report(reports), exporter.page()
        same = {name: report.get(name) for name in NAMES} == {name: truth[name] for name in NAMES}
        shown = value(page, "fragmentation_bytes", ENGINE, SCOPE)
        if (same and shown == wanted) or time.monotonic() > end:
            break
        time.sleep(0.25)
    time.sleep(NVML_SECONDS)
    page = exporter.page()
    row = {
        "step": step,
        "torch": truth,
        "plugin": {name: report.get(name) for name in NAMES},
        "fragmentation_bytes": shown,
        "finding": value(page, "finding", ENGINE, 'finding="allocator_fragmentation"'),
        "nvml_used_bytes": value(page, "gpu_memory_used_bytes", 'gpu="0"'),
    }
    result.data["steps"].append(row)
    result.check(f"{step}: the plugin's figures are torch's", same, row["plugin"])
    result.check(f"{step}: fragmentation_bytes is reserved minus allocated", shown == wanted, f"{shown} and {wanted}")


def _report(reports: Path) -> dict[str, float]:
    """The plugin's figures by name."""
    return {
        sample.labels["figure"]: sample.value
        for metric in plugin_registry(reports).collect()
        for sample in metric.samples
        if sample.name == ALLOCATOR
    }


def _judge(result: Result, steps: dict[str, dict[str, Any]]) -> None:
    threshold = builtin()["fragmentation_warning_bytes"]
    result.data["threshold_bytes"] = threshold
    torch = {name: step["torch"] for name, step in steps.items()}
    fragmented = torch["fail"]["reserved_bytes"] - torch["fail"]["allocated_bytes"]
    result.check(
        f"reserved minus allocated exceeds {threshold / 1e9:g} GB", fragmented > threshold, f"{fragmented / 1e9:.2f} GB"
    )
    result.check(
        "an allocation fails meanwhile, and torch counts it",
        bool(torch["fail"]["said"]) and torch["fail"]["ooms"] > torch["fragment"]["ooms"],
        torch["fail"]["said"] or "it did not",
    )
    for step, expected in (("start", 0.0), ("fill", 0.0), ("fragment", 1.0), ("fail", 1.0), ("release", 0.0)):
        result.check(
            f"{step}: condition allocator_fragmentation is {expected:g}",
            steps[step]["finding"] == expected,
            steps[step]["finding"],
        )
        above = (steps[step]["fragmentation_bytes"] or 0) >= threshold
        result.check(
            f"{step}: the alert's comparison {'holds' if expected else 'does not hold'}",
            above == bool(expected),
            steps[step]["fragmentation_bytes"],
        )
    used = {name: step["nvml_used_bytes"] for name, step in steps.items()}
    if None in used.values():
        result.lacks("NVML's view from outside", f"memory used is absent: {used}")
        return
    result.check(
        "from outside nothing is seen of it: memory used is the same full and fragmented",
        abs(used["fill"] - used["fragment"]) < SAME * used["fill"],
        f"{used['fill']:.0f} and {used['fragment']:.0f}",
    )
    result.check(
        "from outside the release is seen", used["release"] < used["fragment"] - threshold, f"{used['release']:.0f}"
    )
