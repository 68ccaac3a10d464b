"""The whole path: what one pod's endpoint, GPU, container, log and plugin say, through the pipeline to
metrics, JSON and page.
"""

# ruff: noqa: PT018 - a property is one assertion

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, Final

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import GpuProcess, Snapshot, Termination
from kvpressure.runtime.plausibility import believed
from kvpressure.sources.base import Reading
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.fuzz import ours, parsers
from tests.fuzz.draws import SECRET, Subject, number
from tests.helpers.three_engines import BAD, GIB, PODS, Shown, T, assert_innocent

NAMES: Final = (
    *("m", "<img src=x onerror=alert(1)>", "\x1b[2J", "\u202eevil", "a\nb 1", '"}', "é", "m" * 300, "' onload='x"),
    *("{{7*7}}", ""),
)
VALUES: Final = (None, 0, 1, -1, 5, 0.5, 1.0, -0.5, 2**30, 80 * GIB, 2**60, 1e308, 10**400, float("inf"), float("nan"))
GPU_FIELDS: Final = (
    *("memory_total_bytes", "memory_used_bytes", "utilization_ratio", "sm_activity_ratio"),
    *("tensor_activity_ratio", "dram_activity_ratio", "power_watts", "power_limit_watts"),
)
CONTAINER_FIELDS: Final = (
    *("restarts", "cpu_usage_seconds", "cpu_limit_cores", "cpu_periods", "cpu_throttled_periods"),
    *("memory_working_set_bytes", "memory_limit_bytes"),
)
TICKS: Final = 4  # of the cases that do not say how many
_CONTROL_IN_JSON: Final = re.compile(r"\\u(?:001b|0000|202e)")
_SERIES: Final = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*",?)*\})?) (\S+)')


def make_node(rng: Random) -> dict[str, Any]:
    """What is read of the second of three pods, tick by tick."""
    ticks = rng.choice((1, 2, 2, 2, 2, 2, 3, 4))
    changes: dict[str, Any] = {"ticks": ticks}
    if rng.random() < 0.8:
        lines = _lines(rng)
        changes["pages"] = [_page(rng, tick, lines if rng.random() < 0.7 else _lines(rng)) for tick in range(ticks)]
    if rng.random() < 0.4:
        changes["gpu"] = {name: rng.choice(VALUES) for name in rng.sample(GPU_FIELDS, rng.randrange(1, 5))}
    if rng.random() < 0.4:
        changes["container"] = {name: rng.choice(VALUES) for name in rng.sample(CONTAINER_FIELDS, rng.randrange(1, 4))}
        changes["ended"] = [rng.choice(("OOMKilled", "Error", *NAMES)), rng.choice(VALUES), rng.choice(VALUES)]
    if rng.random() < 0.4:
        changes["report"] = parsers.make_plugin_page(rng)
    if rng.random() < 0.4:
        changes["logs"] = [ours.make_log_line(rng) for _ in range(rng.randrange(4))]
    return changes


@cache
def _whole() -> tuple[str, ...]:
    return tuple(line for line in parsers.captures()[0].split("\n") if line and not line.startswith("#"))


def _lines(rng: Random) -> list[str]:
    """Lines of a working engine: a few neighbours, now and then half of all."""
    whole = _whole()
    if rng.random() < 0.05:
        return [line for line in whole if rng.random() < 0.5]
    found: list[str] = []
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(whole))
        found += whole[at : at + rng.randrange(1, 12)]
    return found


def _page(rng: Random, tick: int, lines: list[str]) -> str:
    """An endpoint of one engine that works, of one with absurd values, or of any lines."""
    kind = rng.random()
    if kind < 0.25:
        return str(parsers.make_page(rng)[0])
    if kind < 0.6:
        lines = [f"{line.rpartition(' ')[0]} {number(rng)}" if rng.random() < 0.3 else line for line in lines]
    else:
        lines = [re.sub(r" (\d+\.\d+)$", lambda m: f" {float(m[1]) * (tick + 1)}", line) for line in lines]
    name = rng.choice(NAMES).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return re.sub(r'model_name="[^"]*"', lambda _: f'model_name="{name}"', "\n".join(lines))


def check_node(changes: Mapping[str, Any]) -> None:
    """The other pods are shown as if nothing were wrong, and what is shown of this one is sound."""
    tick, ticks = iter(range(TICKS)), changes.get("ticks", TICKS)
    shown = Shown(lambda given: _changed(given, changes, next(tick)), ticks)
    assert_innocent(shown, undisturbed(ticks))
    assert shown.failures() == {}, "a reading within the ceilings made us fail"
    names = [line.rpartition(" ")[0] for line in shown.metrics if not line.startswith("#")]
    assert len(set(names)) == len(names), f"twice: {sorted(names)}"
    for line in shown.metrics:
        if not line.startswith("#") and line not in _sound_lines(ticks):
            assert_sound_line(line)
    metrics = "".join(shown.metrics)
    assert SECRET not in metrics + shown.html + shown.json
    assert not any(script in shown.html for script in ("<img", "onerror=alert(1)>", "' onload='"))
    for sign in "\x1b\u202e\x00":
        assert sign not in shown.html and sign not in metrics
    for found in _CONTROL_IN_JSON.finditer(shown.json):
        before = shown.json[: found.start()]
        assert (len(before) - len(before.rstrip("\\"))) % 2, "a control character, and no text that says one"


def assert_sound_line(line: str) -> None:
    found = _SERIES.fullmatch(line)
    assert found is not None, f"no series: {line!r}"
    assert found[2] not in ("NaN", "nan"), line
    float(found[2])


@cache
def _sound_lines(ticks: int) -> frozenset[str]:
    """Lines of metrics that are looked at once: the fuzzing draws others."""
    lines = frozenset(line for line in undisturbed(ticks).metrics if not line.startswith("#"))
    for line in lines:
        assert_sound_line(line)
    return lines


@cache
def undisturbed(ticks: int = TICKS) -> Shown:
    return Shown(ticks=ticks)


def _changed(given: Snapshot, changes: Mapping[str, Any], tick: int) -> Snapshot:
    """The snapshot with what is read of the one pod put in."""
    which = PODS.index(BAD)

    def one(items: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
        return (*items[:which], new, *items[which + 1 :])

    if "pages" in changes:
        of_pod = {"target": f"http://{BAD}/metrics", "namespace": "n", "pod": BAD, "container": "vllm"}
        page = parse_scrape(changes["pages"][tick], time=T + tick + 1, **of_pod)
        given = replace(given, pages=one(given.pages, page))
    if "gpu" in changes:
        gpu = replace(
            given.gpus[which], **changes["gpu"], processes=(GpuProcess(10, changes["gpu"].get("memory_used_bytes")),)
        )
        given = replace(given, gpus=one(given.gpus, gpu))
    if "container" in changes:
        reason, code, finished = changes["ended"]
        box = replace(
            given.containers[which], **changes["container"], last_termination=Termination(reason, code, finished)
        )
        given = replace(given, containers=one(given.containers, box))
    if "report" in changes:
        found = read_plugin_metrics(changes["report"].encode(errors="replace"), "n", BAD, given.time)
        first = found.steps[:1] if found else ()  # the engine that the plugin counts first
        given = replace(given, steps=(*given.steps[:which], *first, *given.steps[which + 1 :]))
    if "logs" in changes:
        given = replace(given, logs=tuple(log_line("n", BAD, "vllm", line) for line in changes["logs"]))
    entered = believed(Reading(gpus=given.gpus, containers=given.containers, allocator=given.allocator))
    return replace(
        given, gpus=entered.gpus or (), containers=entered.containers or (), allocator=entered.allocator or ()
    )


NODE: Final = Subject("node", make_node, check_node)
"""The whole path."""
