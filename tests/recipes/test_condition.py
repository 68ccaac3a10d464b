"""Recipe: a condition beside the verdict is one declaration, found through its entry point. The package
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpressure.advice.condition_text import standings
from kvpressure.diagnosis import conditions
from kvpressure.errors import InputError
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape, Snapshot
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.links import Links
from kvpressure.publish.reference import render_metrics_reference
from kvpressure.settings.thresholds import builtin
from tests.recipes.installed import run, written_files

HERE = Path(__file__).parent / "condition"
RECORDING = Path(__file__).parents[1] / "fixtures/recordings/incidents-fresh/FKV07.jsonl.gz"
NAME = "toy_all_waiting"


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy as if its package were installed, taken up by name."""
    monkeypatch.syspath_prepend(str(HERE))
    assert conditions.adopt(NAME)
    yield
    conditions.forget(NAME)


def concluded(gauges: dict[str, float]) -> State:
    scrape = Scrape("t", 1.0, "n", "p", "c", engines=(EngineReading("m", "0", gauges=gauges),))
    return Pipeline().observe(Snapshot(1.0, pages=(scrape,)))


def published(state: State) -> dict[str, float]:
    return {
        sample.labels["condition"]: sample.value
        for family in families(state).collect()
        for sample in family.samples
        if sample.name == "kvpressure_condition"
    }


def test_one_file_is_all_that_is_written() -> None:
    assert written_files("condition") == ["toycondition.py"]


@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize(
    ("gauges", "value", "text"),
    [
        ({r.RUNNING: 0.0, r.WAITING: 4.0}, True, "all 4 requests in flight are waiting"),
        ({r.RUNNING: 3.0, r.WAITING: 4.0}, False, "not all of the 7 requests in flight are waiting"),
        ({r.RUNNING: 3.0}, None, "whether all requests are waiting: unknown (no metrics of the queue)"),
    ],
)
def test_each_value_is_published_and_has_its_sentence(gauges: dict[str, float], value: bool | None, text: str) -> None:
    state = concluded(gauges)
    assert published(state).get(NAME) == (None if value is None else float(value))
    (engine,) = diagnosis_document(state, "node")["engines"]
    assert engine["conditions"][NAME] is value
    assert text in [one.text for one in standings(state.engines[0], builtin()) if one.name == NAME]
    assert [link.title for link in Links().runbooks_for("healthy", [NAME])] == ["InferenceQueueTimeHigh"]


@pytest.mark.usefixtures("_toy")
def test_it_is_in_the_reference() -> None:
    row = next(line for line in render_metrics_reference().splitlines() if NAME in line)
    assert "all ... in flight are waiting" in row
    assert "(runbooks/InferenceQueueTimeHigh.md)" in row


def test_without_being_asked_for_it_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    assert NAME not in published(concluded({r.RUNNING: 0.0, r.WAITING: 4.0}))
    assert NAME not in render_metrics_reference()


@pytest.mark.live
def test_the_command_line_takes_it_up_by_name() -> None:
    replay = ("replay", str(RECORDING), "--format", "json")
    asked = run("condition", *replay, extensions=NAME)
    assert asked.returncode == 0, asked.stderr
    assert f'"{NAME}":' in asked.stdout
    assert NAME not in run("condition", *replay).stdout


def test_one_of_a_name_that_exists_is_refused() -> None:
    with pytest.raises(ValueError, match="crash_loop"):
        conditions.register(conditions.of("crash_loop"))


def test_one_that_is_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info/entry_points.txt").write_text("[kvpressure.conditions]\nbroken = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"condition .broken. .+ is no Declared of that name"):
        conditions.adopt("broken")
