"""Recipe: a signal with its metric is one file, found through its entry point. The package stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvpressure.errors import InputError
from kvpressure.model import readings as r
from kvpressure.model.metrics import gauge, published
from kvpressure.model.readings import EngineReading, Scrape, Snapshot
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.reference import render_metrics_reference
from kvpressure.signals import registry
from kvpressure.signals.registry import ExtraSignal
from tests.recipes.installed import run, written_files

HERE = Path(__file__).parent / "signal"
RECORDING = Path(__file__).parents[1] / "fixtures/recordings/incidents-fresh/FKV07.jsonl.gz"
NAME = "toy_evenness"
METRIC = "kvpressure_toy_running_evenness_ratio"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExtraSignal]:
    """The toy as if its package were installed, taken up by name."""
    monkeypatch.syspath_prepend(str(HERE))
    assert registry.adopt(NAME)
    yield next(one for one in registry.extra_signals() if one.name == NAME)
    registry.forget(NAME)


def concluded(*running: float) -> State:
    pipeline = Pipeline()
    for t, value in enumerate(running):
        reading = EngineReading("m", "0", gauges={r.RUNNING: value, r.WAITING: 0.0})
        scrape = Scrape("t", float(t), "n", "p", "c", engines=(reading,))
        state = pipeline.observe(Snapshot(float(t), pages=(scrape,)))
    return state


def samples(state: State) -> dict[str, float]:
    return {sample.name: sample.value for family in families(state).collect() for sample in family.samples}


def test_one_file_is_all_that_is_written() -> None:
    assert written_files("signal") == ["toysignal.py"]


@pytest.mark.usefixtures("toy")
def test_it_is_in_metrics_in_the_json_and_in_the_reference() -> None:
    state = concluded(2.0, 4.0)
    assert samples(state)[METRIC] == 0.75
    (engine,) = diagnosis_document(state, "node")["engines"]
    assert engine["signals"]["running_evenness_ratio"] == 0.75
    row = next(line for line in render_metrics_reference().splitlines() if METRIC in line)
    assert "divided by its maximum" in row
    assert "nothing ran in the last minute" in row


@pytest.mark.usefixtures("toy")
def test_what_it_does_not_know_is_absent() -> None:
    assert METRIC not in samples(concluded(0.0, 0.0))


def test_without_being_asked_for_it_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    assert METRIC not in samples(concluded(2.0, 4.0))
    assert METRIC not in render_metrics_reference()


@pytest.mark.live
def test_the_command_line_takes_it_up_by_name_and_refuses_what_nobody_offers() -> None:
    replay = ("replay", str(RECORDING), "--format", "json")
    asked = run("signal", *replay, extensions=NAME)
    assert asked.returncode == 0, asked.stderr
    assert '"running_evenness_ratio":' in asked.stdout
    assert "running_evenness_ratio" not in run("signal", *replay).stdout
    refused = run("signal", *replay, extensions="toy_nothing")
    assert refused.returncode == 2
    assert "no installed package offers" in refused.stderr


def test_one_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info/entry_points.txt").write_text("[kvpressure.signals]\nbroken = broken:SIGNAL\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"signal .broken. .+ cannot be loaded"):
        registry.adopt("broken")


def test_one_that_fails_costs_itself_and_is_counted(toy: ExtraSignal) -> None:
    def fails(*_: Any) -> object:
        raise ZeroDivisionError

    whole = samples(concluded(2.0, 4.0))
    registry.register(replace(toy, compute=fails))
    state = concluded(2.0, 4.0)
    assert {key for key in whole if key not in samples(state)} == {METRIC}
    assert [(failure.stage, failure.reason) for failure in state.failures] == [("signals", "arithmetic")]


def test_a_metric_that_exists_already_is_refused() -> None:
    @dataclass(frozen=True)
    class Clash:
        again: float | None = published(gauge("requests_running", "The same again."))

    with pytest.raises(ValueError, match="requests_running"):
        registry.register(ExtraSignal("clash", Clash, lambda *_: Clash()))
