"""Reference documents generated from the tables that the code uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from kvpressure.diagnosis.findings import PUBLISHED, of
from kvpressure.model.log_events import EVENTS
from kvpressure.printable import Asked, capital
from kvpressure.publish.metrics import METRICS, Metric
from kvpressure.settings.groups import grouped
from kvpressure.settings.options import Option
from kvpressure.settings.settings import options

_SECTIONS = (
    ("Device", "gpu"),
    ("Engine", ""),
    ("The pod around the engine", "container_ log_events"),
    ("The exporter itself", "source_ target_ page_ ticks_ tick_ build_"),
)


ENGINE_SERIES: Final = 110  # about the most in one tick of tests/fixtures/recordings/vllm-cpu/d_kv_pressure
GPU_SERIES: Final = 9  # in tests/golden/gpu_h100.metrics


def render_metrics_reference() -> str:
    """``docs/reference/metrics.md``: metrics with labels, meaning and when absent; findings and log events."""
    lines = [
        "# Metrics",
        "",
        "Generated from `exporter/kvpressure/publish/metrics.py` and `model/signals.py`. Units are base units: bytes,",
        "seconds, tokens, watts; ratios run from 0 to 1. A series whose input is missing or stale is absent. A state",
        "set has one series per state, each 0 or 1. `/metrics` has the whole HELP text; here is its first sentence.",
        "",
        *(f"Labels {subject}: {names}." for subject, names in _SUBJECTS.items()),
        "",
        f"An engine has about {ENGINE_SERIES} series, a GPU {GPU_SERIES}; twice as many with profiling and partitions.",
    ]
    for title, _ in _SECTIONS:
        lines += ["", f"## {title}", "", "| metric | labels | meaning | absent when |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in METRICS if _section(metric) == title]
    lines += [
        "",
        "## Findings",
        "",
        "Values of the label `finding` of `kvpressure_finding`; ... replaces a number.",
        "",
        "| finding | is 1 when |",
        "|---|---|",
        *(f"| `{name}` | {of(name).title.format_map(Asked(lambda _: '...'))} |" for name in PUBLISHED),
        "",
        "## Log events",
        "",
        "Values of the label `event` of `kvpressure_log_events_total`.",
        "",
        "| event | means |",
        "|---|---|",
        *(f"| `{event}` | {meaning} |" for event, meaning in EVENTS.items()),
    ]
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    return re.split(r"\.(?= [A-Z`])", text, maxsplit=1)[0].removesuffix(".")


_SUBJECTS: Final = {"*engine*": "`namespace`, `pod`, `model_name`, `engine`", "*GPU*": "`uuid`, `gpu`, `vendor`"}


def _section(metric: Metric) -> str:
    for title, prefixes in _SECTIONS:
        if prefixes and metric.name.startswith(tuple(prefixes.split())):
            return title
    return "Engine"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    for subject, names in _SUBJECTS.items():
        labels = labels.replace(names, subject)
    cells = (f"`{metric.full_name}`", labels, first_sentence(metric.help), metric.absent)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render_settings_reference() -> str:
    """``docs/reference/settings.md``: every setting with flag, default and allowed values."""
    lines = [
        "# Settings",
        "",
        "Generated from `exporter/kvpressure/settings/settings.py`. Flags override the file of `--config FILE`.",
        "In the file a name may be dotted (`web.max-requests: 5`) or nested (`web: {max-requests: 5}`). To give a",
        "setting several values, repeat the flag, or write a list in the file.",
    ]
    for title, text, members in grouped(options().values()):
        lines += [
            "",
            f"## {capital(title)}",
            "",
            f"{capital(text)}.",
            "",
            *_settings(members),
        ]
    return "\n".join(lines) + "\n"


def _settings(members: Iterable[Option]) -> Iterator[str]:
    yield "| flag and key | default | meaning, allowed |\n|---|---|---|"
    for option in members:
        allowed = "" if option.kind.allowed == "true or false" else f" ({option.kind.allowed})"
        cells = (f"`--{option.name}`", option.default, f"{option.help}{allowed}")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
