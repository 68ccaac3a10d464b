"""Files of the first release candidate still read, or stop with one line that names what has moved."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvpressure.bundle import values
from kvpressure.bundle.rules import Options, load_groups
from kvpressure.cli import main
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.renames import renamed
from kvpressure.settings import thresholds
from kvpressure.settings.options import SettingsError
from kvpressure.settings.settings import Settings, add_arguments, from_args, options

OLD = Path(__file__).parents[1] / "fixtures/old-release"


def settings(name: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_args(parser.parse_args(["--config", str(OLD / name)]), {})


def test_a_recording_is_read_whole_and_judged() -> None:
    problems: list[str] = []
    pipeline = Pipeline()
    with Reader(OLD / "recording.jsonl.gz", on_problem=lambda problem: problems.append(str(problem))) as reader:
        states = [pipeline.observe(snapshot) for snapshot in reader]
    assert (len(states), problems) == (20, [])
    last = states[-1]
    assert (len(last.engines), len(last.containers), len(last.gpus), len(last.owners)) == (4, 3, 3, 3)
    assert {engine.key.pod: engine.diagnosis.verdict for engine in last.engines}["vllm-0"] == "kv_pressure"
    assert all(gpu.reading.memory_total_bytes for gpu in last.gpus)


def test_threshold_overrides_are_read() -> None:
    read = thresholds.load(OLD / "thresholds.yaml")
    assert (read["kv_full_ratio"], read["kv_near_full_ratio"], read["preemptions_min"]) == (0.95, 0.85, 3)


def test_a_configuration_file_is_read() -> None:
    found = settings("config.yaml")
    assert (found.interval_seconds, found.node_name, found.max_requests) == (2.0, "gpu-node-7", 20)
    assert not found.collectors["logs"].enabled


def test_a_configuration_file_with_old_names_says_the_new_ones() -> None:
    path = OLD / "config-renamed.yaml"
    with pytest.raises(SettingsError) as refused:
        settings("config-renamed.yaml")
    assert str(refused.value) == f"{path}:2: unknown key 'vllm'; its settings are below engine now"


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("vllm.target: [x]", "engine.target"),
        ("collector.vllm: false", "collector.engines"),
        ("collector.vllm.interval: 2s", "collector.engines.interval"),
    ],
)
def test_each_old_setting_names_its_new_one(tmp_path: Path, line: str, now: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(line + "\n")
    with pytest.raises(SettingsError) as refused:
        settings(str(path))
    assert str(refused.value) == f"{path}:1: unknown key {line.split(':')[0]!r}; it is called {now} now"


def test_old_flags_name_their_new_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for given, old, now in ((["--vllm.target=x"], "--vllm.target", "--engine.target"),):
        assert main(["serve", *given]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.endswith(f"; {old} was renamed to {now}")


def test_a_values_file_is_read() -> None:
    found = values.load(OLD / "values.yaml")
    groups = load_groups(Options(thresholds.builtin().override(found.thresholds, "values"), found))
    assert {group.family for group in groups if group.alerts} >= {"failure", "harm"}
    assert not any(group.alerts for group in groups if group.family == "hardware")


def test_a_values_file_with_an_old_alert_says_its_new_name() -> None:
    with pytest.raises(values.ValuesError) as refused:
        load_groups(Options(thresholds.builtin(), values.load(OLD / "values-renamed.yaml")))
    assert str(refused.value) == (
        "values: durations: no alert is called 'VllmKVCachePressure'; it is called InferenceKVCachePressure now"
    )


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("InferenceQueueTimeHigh", "InferenceSlow"),
        ("InferenceEngineStalled", "InferenceStalled"),
        ("VllmTimeToFirstTokenHigh", "InferenceSlow"),
    ],
)
def test_an_alert_that_was_merged_leads_to_the_one_in_its_place(old: str, now: str) -> None:
    alerts = {alert.name for group in load_groups(Options(thresholds.builtin())) for alert in group.alerts}
    assert renamed(old, alerts) == now


@pytest.mark.parametrize("name", ["nonsense", "vllm.nonsense", "VllmNonsense"])
def test_what_was_never_a_name_is_not_renamed(name: str) -> None:
    assert renamed(name, options()) is None


def test_every_setting_that_was_renamed_leads_to_one_that_exists() -> None:
    gone = [
        *(f"collector.{source}{more}" for source in ("vllm",) for more in ("", ".interval", ".deadline")),
        *(f"vllm.{name}" for name in ("max-targets", "pace", "target", "timeout")),
    ]
    assert [name for name in gone if renamed(name, options()) is None or name in options()] == []
