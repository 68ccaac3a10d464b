"""Generated reference documents name everything that exists, and only that."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from kvpressure.cli import Parser, serve
from kvpressure.diagnosis.conditions import NAMES
from kvpressure.model.log_events import EVENTS
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.metrics import METRICS
from kvpressure.publish.reference import ENGINE_SERIES, GPU_SERIES, render_metrics_reference, render_settings_reference
from kvpressure.recording.reader import Reader
from kvpressure.settings.groups import GROUPS, PACE, group_of
from kvpressure.settings.settings import options
from kvpressure.settings.thresholds import builtin

TESTS = Path(__file__).parents[1]
RECORDINGS, GOLDEN = TESTS / "fixtures/recordings", TESTS / "golden"


def test_every_condition_and_log_event_has_one_row() -> None:
    cells = [line.split("`")[1] for line in render_metrics_reference().splitlines() if line.startswith("| `")]
    for name in (*NAMES, *EVENTS):
        assert cells.count(name) == 1, name


def test_every_metric_has_one_row() -> None:
    rows = [line for line in render_metrics_reference().splitlines() if line.startswith("| `kvpressure_")]
    assert rows != []
    assert sorted(row.split("`")[1] for row in rows) == sorted(metric.full_name for metric in METRICS)
    for row in rows:
        assert len(re.split(r"(?<!\\)\|", row)) == 7, row


def test_every_declared_text_ends_as_a_sentence() -> None:
    """A text of several string literals is easily cut short."""
    texts = {metric.name: metric.help for metric in METRICS}
    texts |= {name: option.help for name, option in options().items()}
    texts |= {entry.name: entry.reason for entry in builtin().entries()}
    assert [name for name, text in texts.items() if not text.endswith(".")] == []


def test_the_series_of_an_engine_and_a_gpu_are_stated_as_they_are() -> None:
    pipeline, most = Pipeline(), 0
    with Reader(RECORDINGS / "vllm-cpu/d_kv_pressure.jsonl.gz") as recording:
        for snapshot in recording:
            state = pipeline.observe(snapshot)
            shown = [sample for family in families(state).collect() for sample in family.samples]
            most = max(most, sum(1 for sample in shown if "engine" in sample.labels))
    assert most == ENGINE_SERIES
    gpu = (GOLDEN / "gpu_h100.metrics").read_text().splitlines()
    assert sum(1 for line in gpu if line.startswith("kvpressure_gpu_")) == GPU_SERIES
    assert f"about {ENGINE_SERIES} series" in render_metrics_reference()


def test_every_setting_has_one_row() -> None:
    rows = [line for line in render_settings_reference().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1].removeprefix("--") for row in rows) == sorted(options())
    for row in rows:
        assert len(re.split(r"(?<!\\)\|", row)) == 6, row


def serve_help(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "10000")  # one line a flag
    parser = Parser("kvpressure serve", "")
    serve.add_arguments(parser)
    return parser.format_help()


def test_help_and_reference_say_the_same_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group, flag by flag: default, what is allowed, meaning."""
    text, reference = serve_help(monkeypatch), render_settings_reference()
    for place, group in enumerate(GROUPS):
        section = text.split(f"\n{group.title}:\n")[1].split("\n\nexamples:")[0]
        section = section.split(f"\n{GROUPS[place + 1].title}:\n")[0] if place + 1 < len(GROUPS) else section
        rows = reference.split(f"## {group.title[0].upper()}{group.title[1:]}\n")[1].split("\n## ")[0]
        names = re.findall(r"^\| `--(\S+)`", rows, re.M)
        assert names
        if group is PACE:
            continue
        assert [name for name in re.findall(r"^  --(\S+?)[ ,]", section, re.M) if name != "config"] == names
        for name in names:
            option = options()[name]
            (line,) = re.findall(rf"^  --{re.escape(name)}[ ,].*(?:\n {{10}}.*)?", section, re.M)
            assert option.help in line
            assert (option.default or "no default") in line
            assert option.kind.metavar == "BOOL" or option.kind.allowed in line


def test_help_says_each_source_its_pace_without_a_flag_each(monkeypatch: pytest.MonkeyPatch) -> None:
    text = serve_help(monkeypatch)
    for name, option in options().items():
        if group_of(name) is PACE:
            assert f"--{name}" not in text
            assert re.search(rf"^ +{name.split('.')[1]} .*\b{option.default}\b", text, re.M)
    assert "--collector.NAME.interval SECONDS" in text
    assert len(text.splitlines()) < 160


def test_the_common_settings_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = serve_help(monkeypatch)
    places = [text.index(f"\n{group.title}:\n") for group in GROUPS]
    assert all(one < two for one, two in pairwise(places))
    assert GROUPS[0].title == "common"
    assert text.splitlines()[0] == "usage: kvpressure serve [setting ...]"
