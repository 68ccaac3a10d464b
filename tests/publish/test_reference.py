"""Generated reference documents name everything that exists, and only that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpressure.cli import Parser, serve
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.reference import ENGINE_SERIES, GPU_SERIES, render_metrics_reference, render_settings_reference
from kvpressure.recording.reader import Reader
from kvpressure.settings.groups import GROUPS, PACE, group_of
from kvpressure.settings.settings import options

TESTS = Path(__file__).parents[1]
RECORDINGS, GOLDEN = TESTS / "fixtures/recordings", TESTS / "golden"


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
