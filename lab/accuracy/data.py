"""The labelled recordings under ``tests/fixtures/recordings``: what may be tuned on, what is scored only, and what was
labelled first and led to mended rules afterwards.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RECORDINGS: Final = ROOT / "tests" / "fixtures" / "recordings"

NEAR_FULL: Final = "kv_near_full_no_preemption"
NOT_RECORDED: Final = "kv_usage_not_recorded"
BAIT: Final = "no_kv_pressure_memory_high_compute_low"
PRESSURE: Final = "kv_pressure"

_SCORED_ONLY_BURSTGPT: Final = ("burstgpt/scale-500.jsonl.gz", "burstgpt/scale-1500.jsonl.gz")
SCORED_ONLY_PRESSURE: Final = tuple(f"h100/llama-2-7b-{run}.jsonl.gz" for run in ("085", "124", "173"))


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A recording of ``h100/``, ``burstgpt/`` or ``v1/`` with its label."""

    name: str
    label: str
    scored_only: bool

    @property
    def part(self) -> str:
        """The folder."""
        return self.name.split("/")[0]


@dataclass(frozen=True, slots=True)
class Incident:
    """A line of a ``labels.csv`` of incidents; sets may be empty. Times are seconds from the first tick.

    ``strict`` is the one best answer, a verdict and ``+condition`` for each condition that has to be true as well;
    ``*`` = any verdict of ``expected``, empty = no strict label.
    """

    name: str
    id: str
    kind: str
    expected: frozenset[str]
    expected_conditions: frozenset[str]
    forbidden: frozenset[str]
    forbidden_conditions: frozenset[str]
    page: str
    grade: str
    start: float
    end: float
    scored_only: bool
    strict: str = ""

    @property
    def part(self) -> str:
        """The folder."""
        return self.name.split("/")[0]

    @property
    def group(self) -> str:
        """Which figures it belongs to: ``TUNED``, ``SCORED_ONLY`` or ``MENDED``."""
        if self.part in (FRESH, ONCE):
            return MENDED
        return SCORED_ONLY if self.scored_only else TUNED


@dataclass(frozen=True, slots=True)
class Capture:
    """A stretch of a capture of a live server: ``most`` = the verdicts of which one must be the most frequent.

    ``engine`` is the engine label, behind ``POD/`` where a recording has several servers. ``strict`` = the best answers
    among ``most``; empty = no strict label.
    """

    name: str
    engine: str
    what: str
    start: float
    end: float
    most: frozenset[str]
    never: frozenset[str] = frozenset()
    confidently: bool = False  # ``never`` is about confident answers alone
    strict: frozenset[str] = frozenset()
    expected_conditions: frozenset[str] = frozenset()
    forbidden_conditions: frozenset[str] = frozenset()

    @property
    def part(self) -> str:
        """The folder."""
        return self.name.split("/")[0]


def telemetry() -> list[Telemetry]:
    """Every recording of real telemetry, in the order of its table."""
    return [
        Telemetry(row["recording"], row["label"], _scored_only(row["recording"]))
        for row in _rows(RECORDINGS / "labels.csv")
    ]


def _scored_only(name: str) -> bool:
    return name.startswith("h100/opt-1.3b") or name in (*_SCORED_ONLY_BURSTGPT, *SCORED_ONLY_PRESSURE)


TUNED: Final = "tuned on"
SCORED_ONLY: Final = "scored only"
MENDED: Final = "labelled before, mended after"  # labelled first; then looked at, and rules were mended for it

INCIDENTS: Final = "incidents"
FRESH: Final = "incidents-fresh"
ONCE: Final = "incidents-untouched"  # scored once, and a rule was mended for them since: no blind score any more
UNTOUCHED: Final = "incidents-later"  # scored once, when the rules were done: lab/accuracy/untouched.json


def incidents(parts: Sequence[str] = (INCIDENTS, FRESH)) -> list[Incident]:
    """Every reconstructed incident of these parts, without the untouched ones unless they are asked for, sorted by
    name; each third old one is scored only, and so are the untouched ones.
    """
    return [
        Incident(
            name=f"{part}/{row['recording']}",
            id=row["recording"].removesuffix(".jsonl.gz"),
            kind=row["class"],
            expected=_set(row["expected_verdict"]),
            expected_conditions=_set(row["expected_conditions"]),
            forbidden=_set(row["forbidden_verdicts"]),
            forbidden_conditions=_set(row["forbidden_conditions"]),
            page=row["page"],
            grade=row["grade"],
            start=float(row["from_seconds"]),
            end=float(row["to_seconds"]),
            scored_only=part == UNTOUCHED or (part == INCIDENTS and place % 3 == 2),
            strict=row.get("strict_verdict") or "",
        )
        for part in parts
        for place, row in enumerate(sorted(_rows(RECORDINGS / part / "labels.csv"), key=lambda row: row["recording"]))
    ]


_PRESSURE: Final = frozenset({"kv_pressure"})
_NO_PRESSURE: Final = frozenset({"kv_pressure"})
_END: Final = float("inf")


def captures() -> list[Capture]:
    """What ``vllm-cpu/labels.csv`` expects, as stretches; the burst and frozen times are read off the pages."""

    def whole(name: str, most: str, never: frozenset[str] = frozenset(), engine: str = "0") -> Capture:
        return Capture(f"vllm-cpu/{name}.jsonl.gz", engine, "whole capture", 0.0, _END, frozenset({most}), never)

    burst, frozen = "vllm-cpu/e_burst.jsonl.gz", "vllm-cpu/m_v0270_pressure.jsonl.gz"
    return [
        whole("a_idle", "idle", _NO_PRESSURE),
        whole("b_light", "healthy", _NO_PRESSURE),
        whole("c_steady", "healthy", _NO_PRESSURE),
        whole("d_kv_pressure", "kv_pressure"),
        Capture("vllm-cpu/d_kv_pressure.jsonl.gz", "0", "counter still 0", 3.0, 19.0, _PRESSURE),
        Capture(burst, "0", "first burst, cache full or queue", 2.0, 7.0, _PRESSURE),
        Capture(burst, "0", "between the bursts", 11.0, 20.0, frozenset({"idle"})),
        Capture(burst, "0", "second burst, cache full or queue", 22.0, 27.0, _PRESSURE),
        Capture(burst, "0", "after the bursts", 31.0, _END, frozenset({"idle"})),
        whole("f_recovery", "healthy", _NO_PRESSURE),
        whole("k_api_server_count2", "kv_pressure"),
        whole("l_dp2", "kv_pressure", engine="0"),
        whole("l_dp2", "kv_pressure", engine="1"),
        Capture(
            frozen,
            "0",
            "gauges frozen at 0",
            0.0,
            16.0,
            frozenset({"unknown", "idle"}),
            frozenset({"healthy", "kv_pressure"}),
        ),
        Capture(frozen, "0", "cache full", 22.0, _END, _PRESSURE),
        *_loads(),
        *_stretches(),
    ]


SCHEDULER: Final = "vllm-cpu-2026"
EDGES: Final = "vllm-cpu-edges"
LOADS: Final = ("vllm-cpu-loads", SCHEDULER, EDGES)


def _loads() -> list[Capture]:
    """Stretches of load shapes on a real vLLM, as their tables label them."""
    return [
        Capture(
            f"{part}/{row['recording']}",
            "0",
            row["note"],
            float(row["from_seconds"]),
            float(row["to_seconds"]),
            _set(row["expected_verdict"]),
            _set(row["forbidden_verdicts"]),
            confidently=True,
            strict=_set(row.get("strict_verdict") or ""),
        )
        for part in LOADS
        for row in _rows(RECORDINGS / part / "labels.csv")
    ]


STRETCHES: Final = "vllm-cpu-fresh"


def _stretches() -> list[Capture]:
    """Stretches of a real vLLM, labelled before any verdict was looked at, as their table labels them."""
    rows = _rows(RECORDINGS / STRETCHES / "labels.csv")
    servers = {(row["recording"], row["pod"]) for row in rows}
    several = {name for name, count in Counter(name for name, _ in servers).items() if count > 1}
    return [
        Capture(
            f"{STRETCHES}/{row['recording']}",
            f"{row['pod']}/0" if row["recording"] in several else "0",
            row["phase"],
            float(row["from_seconds"]),
            float(row["to_seconds"]),
            _set(row["lenient_verdicts"]),
            _set(row["forbidden_verdicts"]),
            confidently=True,
            strict=_set(row["strict_verdict"]),
            expected_conditions=_set(row["expected_conditions"]),
            forbidden_conditions=_set(row["forbidden_conditions"]),
        )
        for row in rows
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split("|")) if text else frozenset()


MISSED: Final = {
    "FCPU12": "2.3 tokens/s each from the first scrape on: slow for its users, but as ever for itself",
    "FHNG12": "the answer names the cause, deferred requests that fill the limit; four requests still get tokens",
    "FKV08": "KV usage is not on the page, and pressure is not claimed without it",
    "FKV10": "the cause is not settled; the answer is a guess",
    "FKV11": "the cause is not settled; the answer is doubtful",
    "FKV12": "the cause is not settled; the answer is doubtful",
    "FPRE2": "vLLM counts a prompt when its prefill ends, and KV usage does not rise: prefill is not visible",
    "FPRE3": "vLLM counts a prompt when its prefill ends, and KV usage is not on the page: prefill is not visible",
    "FPRE5": "silence no longer than prefill usually takes: said so, without a verdict",
    "FTEL1": "nothing is known of clients and GPU: left-over gauges and a hang look alike",
}
"""Why a fresh incident does not get the one best answer."""
FIRST_FRESH: Final = (
    ("first, `incidents-fresh` (7f00867)", "48 of 53", "43 of 53", "0"),
    ("first, `incidents-untouched` (7f00867)", "24 of 26", "22 of 26", "1"),
    ("both, after mending (b59a167)", "74 of 79", "65 of 79", "0"),
)
FIRST_STRETCHES: Final = (
    ("first (7f00867)", "58 of 64", "55 of 64", "5", "8, in 2 stretches"),
    ("after mending (5c7e474)", "64 of 64", "61 of 64", "0", "0"),
)
"""Scores as docs/reports/accuracy.md stated them at the commits named: history, so not computed."""
