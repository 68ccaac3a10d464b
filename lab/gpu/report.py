"""The results as a document: ``report.md`` beside the results; docs/reports/gpu.md sums it up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lab.gpu import fragmentation_alert, plan
from lab.gpu.result import Result, load

HEAD: Final = """\
# Checked on a real GPU

Written by `make test-gpu` (`lab/gpu`), on any machine with an NVIDIA GPU, `nvidia-smi` and a Python with torch:

```sh
make test-gpu                                  # all parts, about 20 minutes, results and report in build/gpu
make test-gpu ARGS="--list"                    # what it would do
make test-gpu ARGS="--part calls --part counters --part report" GPU_PYTHON=/path/to/python
```

It needs the packages that `kvpressure serve` needs in that Python, no network and no installation. Parts run
separately. What could not be measured is listed with the reason. `--publish` keeps results and report in `lab/gpu/results`, and
makes a fixture of the GPU's answers (`tests/fixtures/gpu`) for another golden page of the tests.
"""  # noqa: E501
NOT_RUN: Final = "Not run yet."
GIB: Final = 2**30
MOST_CHECKS: Final = 25  # listed one by one; of more only those that failed


def render(directory: Path) -> str:
    """The document. Raises ``ValueError`` for results of another format."""
    results = {part.name: load(directory, part.name) for part in plan.PARTS}
    there = [result for result in results.values() if result is not None]
    blocks = [
        HEAD,
        _machines(there) if there else f"**{NOT_RUN}** No GPU was available, so there are no results.\n",
    ]
    for part in plan.PARTS:
        blocks += [f"## {part.name}\n", f"{part.what[0].upper()}{part.what[1:]}.\n"]
        result = results[part.name]
        blocks += [f"{NOT_RUN}\n"] if result is None else _part(result)
    return "\n".join(blocks)


def write(directory: Path) -> Path:
    """Write the document beside the results; its path."""
    path = directory / "report.md"
    path.write_text(render(directory))
    return path


def count(directory: Path) -> str:
    """How much was checked, in one line."""
    return _count([result for name in plan.NAMES if (result := load(directory, name)) is not None])


def _count(results: Sequence[Result]) -> str:
    checks = [check for result in results for check in result.checks]
    failed = sum(not check["ok"] for check in checks)
    early = sum(result.failed is not None for result in results)
    lacking = sum(len(result.missing) for result in results)
    ended = f" {early} parts ended early;" if early else ""
    return f"{len(checks)} checks, {failed} failed;{ended} {lacking} things could not be asked."


def _machines(results: Sequence[Result]) -> str:
    """On what, when, how much was as it should be."""
    seen: list[Mapping[str, Any]] = []
    for result in results:
        if result.machine and result.machine not in seen:
            seen.append(result.machine)
    rows = [(name, *(str(machine.get(name, "")) for machine in seen)) for name in (seen[0] if seen else {})]
    day = time.strftime("%Y-%m-%d", time.gmtime(max(result.started for result in results)))
    text = f"{day}: {_count(results)}"
    return f"{_table(('', *('run' for _ in seen)), rows)}\n{text}\n" if rows else text + "\n"


def _part(result: Result) -> list[str]:
    blocks = [f"**Ended early:** `{result.failed.strip().splitlines()[-1]}`\n"] if result.failed else []
    blocks += [block for block in _DATA[result.part](result.data) if block]
    blocks.append(_checks(result.checks))
    if result.missing:
        blocks.append("Could not be asked:\n")
        blocks.append("\n".join(f"* {item['what']}: {_cell(item['reason'])}" for item in result.missing) + "\n")
    return blocks


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    """All of a few; of many those that failed."""
    if len(checks) > MOST_CHECKS:
        failed = [check for check in checks if not check["ok"]]
        return (
            f"{len(checks) - len(failed)} of {len(checks)} checks held{'; not these:' if failed else '.'}\n\n"
            + _checks(failed)
        )
    return _table(
        ("check", "", "found"),
        [(check["what"], "ok" if check["ok"] else "**FAIL**", check["found"]) for check in checks],
    )


def _calls(data: Mapping[str, Any]) -> Iterable[str]:
    identities = {name: found for name, found in data.get("identities", {}).items() if "reading_ms" in found}
    rows = [
        (
            name,
            found["process"].get("CapEff", ""),
            _times(found["opening_ms"]),
            _times(found["reading_ms"]),
            "{with} of {readings}, last in {last}".format(**found["activity"]),
            _pairs(found["errors"]),
        )
        for name, found in identities.items()
    ]
    if rows:
        yield _table(
            ("identity", "capabilities", "open and read, ms", "read, ms", "readings with GPM activity", "errors"), rows
        )
        yield (
            "Times are median / p99 / most. Codes are NVML's return codes and how often they came: 7 answers the "
            "question for a list's size, 6 is nothing new, 10 a wait in which nothing happened.\n"
        )
    if data.get("driver_parameters"):
        yield f"Driver parameters: {_pairs(data['driver_parameters'])}.\n"
    functions = sorted({name for found in identities.values() for name in found["calls"]})
    cells = [
        (f"`{function}`", *(_call(found["calls"].get(function)) for found in identities.values()))
        for function in functions
    ]
    if cells:
        yield _table(("microseconds: median / p99 / most (n, codes)", *identities), cells)


def _counters(data: Mapping[str, Any]) -> Iterable[str]:
    yield _table(
        ("load", "quantity", "nvidia-smi", "ours", "theirs", "unit", "apart: median", "most", "n"),
        [
            (
                row["phase"],
                row["quantity"],
                row["by"],
                row["ours"],
                row["theirs"],
                row["unit"],
                _dash(row["apart_median"]),
                _dash(row["apart_most"]),
                row["n"],
            )
            for row in data.get("rows", ())
        ],
    )
    if data.get("rows"):
        yield "Ours and theirs are medians over the phase; apart compares readings of the same moment.\n"


def _loads(data: Mapping[str, Any]) -> Iterable[str]:
    rates = data.get("rates", {})
    yield _table(
        ("load", "TFLOP/s", "GB/s", "tensor", "DRAM", "SM", "power", "utilization"),
        [
            (
                kind,
                _per_second(rates, kind, "flops", 1e12),
                _per_second(rates, kind, "bytes", 1e9),
                *(
                    _share(figures[name])
                    for name in ("tensor_activity_ratio", "dram_activity_ratio", "sm_activity_ratio")
                ),
                _power(figures),
                _share(figures["utilization_ratio"]),
            )
            for kind, figures in data.get("figures", {}).items()
        ],
    )
    yield _table(
        ("level", "load", "compute factor", "starved", "saturated"),
        [
            (level, kind, _dash(said["factor"]), _dash(said["starved"]), _dash(said["saturated"]))
            for level, loads in data.get("levels", {}).items()
            for kind, said in loads.items()
        ],
    )


def _allocator(data: Mapping[str, Any]) -> Iterable[str]:
    steps = data.get("steps", ())
    yield _table(
        (
            "step",
            "torch reserved",
            "allocated",
            "inactive split",
            "retries",
            "OOMs",
            "`fragmentation_bytes`",
            "finding",
            "NVML used",
        ),
        [
            (
                step["step"],
                _gib(step["torch"]["reserved_bytes"]),
                _gib(step["torch"]["allocated_bytes"]),
                _gib(step["torch"]["inactive_split_bytes"]),
                step["torch"]["alloc_retries"],
                step["torch"]["ooms"],
                _gib(step["fragmentation_bytes"]),
                _dash(step["finding"]),
                _gib(step["nvml_used_bytes"]),
            )
            for step in steps
        ],
    )
    if steps:
        yield f"GiB. {fragmentation_alert.sentence({step['step']: step for step in steps})}\n"


def _processes(data: Mapping[str, Any]) -> Iterable[str]:
    yield _table(
        ("start", "import, s", "open and first reading, s", "next reading, s"),
        [
            (number, start["import"], start["first_reading"], start["next_reading"])
            for number, start in enumerate(data.get("starts", ()), 1)
        ],
    )
    if "page_with_gpu_seconds" in data:
        yield f"The exporter's page shows the GPU {data['page_with_gpu_seconds']} s after the process was started.\n"
    if "from_namespace" in data:
        found = len(data["from_namespace"])
        yield f"From a pid namespace of its own the source is told {found} of {len(data.get('ours', {}))} processes.\n"


def _leak(data: Mapping[str, Any]) -> Iterable[str]:
    if "memory_kib" in data:
        yield (
            f"{data['minutes']:g} minutes as {data['identity']}: {data['memory_kib'] / 1024:.0f} MiB resident at the"
            f" end ({data['grown']['memory_kib']:+.0f} KiB, {data['grown']['threads']:+.0f} threads,"
            f" {data['grown']['files']:+.0f} files); {_percent_of_a_core(data['cpu_share'])}; scrapes"
            f" {_times(data['scrape_ms'])} ms; GPM activity in {data['gpm']['with']} of {data['gpm']['scrapes']}.\n"
        )
    if "throughput" in data:
        rates = data["throughput"]
        yield (
            f"Load without the exporter {rates['without'] / 1e9:.1f} GB/s, beside it {rates['beside'] / 1e9:.1f} GB/s "
            f"({-rates['slower']:+.2%}; spread of single seconds {rates['spread']:.2%}; {rates['seconds'][0]} and "
            f"{rates['seconds'][1]} seconds in turns).\n"
        )


_DATA: Final[Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]]] = {
    "calls": _calls,
    "counters": _counters,
    "loads": _loads,
    "allocator": _allocator,
    "processes": _processes,
    "leak": _leak,
}


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "/")


def _times(times: Mapping[str, Any]) -> str:
    return f"{times['median']:g} / {times['p99']:g} / {times['max']:g}" if times.get("n") else "-"


def _call(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    codes = "" if set(found["codes"]) == {"0"} else ", " + _pairs(found["codes"])
    return f"{_times(found)} ({found['n']}{codes})"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "none"


def _dash(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _per_second(rates: Mapping[str, Any], kind: str, name: str, unit: float) -> str:
    value = rates.get(kind, {}).get(name)
    return "-" if not value else f"{value / unit:.0f}"


def _percent_of_a_core(share: float | None) -> str:
    return "CPU not known" if share is None else f"{share:.2%} of a core"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _power(figures: Mapping[str, float | None]) -> str:
    watts, limit = figures["power_watts"], figures["power_limit_watts"]
    return "-" if watts is None else f"{watts:.0f} W" + (f" ({watts / limit:.0%})" if limit else "")


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"
