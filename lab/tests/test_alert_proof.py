"""The proof of the alerts (``make alert-proof``), as far as it takes seconds, and that its instruments tell
the truth.
"""

from __future__ import annotations

import pytest

from kvpressure.model.readings import GpuReading
from kvpressure.model.state import GpuState, State
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from lab.accuracy import data
from lab.alerts import cold, cost, fortnight, recorded, report, stored
from lab.alerts.engine import episodes, evaluate
from lab.alerts.series import Series

pytestmark = pytest.mark.live

GPU = GpuReading("GPU-1", 0, "nvidia")


def gpu(up: bool) -> State:
    reading = GPU if up else GpuReading("GPU-1", 0, "nvidia", error="lost")
    return State(0.0, gpus=(GpuState(reading),), ticks=1)


def states(*runs: tuple[State | None, int]) -> Series:
    series = Series()
    for state, scrapes in runs:
        for _ in range(scrapes):
            series.add(state)
    return series


def values(series: Series, first: int, end: int) -> dict[str, str]:
    return {name.split("{")[0]: found for name, found in series.between(first, end)}


def test_series_hold_runs_gaps_and_one_marker_where_they_end() -> None:
    series = states((State(0.0), 2), (gpu(True), 3), (gpu(False), 1), (State(0.0), 3), (None, 1))
    assert values(series, 0, 10)["kvpressure_gpus_seen"] == "_x2 1.0+0x2 0.0 stale _x3"
    assert values(series, 0, 10)["up"] == "1+0x8 0"
    assert values(series, 3, 6)["kvpressure_gpus_seen"] == "1.0+0x1 0.0"
    assert values(series, 7, 9)["kvpressure_gpus_seen"] == "_x2"


def test_an_alert_waits_fires_and_ends_as_in_prometheus() -> None:
    active = evaluate(states((gpu(True), 20), (gpu(False), 40), (gpu(True), 8)), evaluation_seconds=30)
    lost = [item for item in active if item.name == "GpuLost"]
    assert [(item.at, item.firing) for item in lost[2:5]] == [(360, False), (390, False), (420, True)]
    (episode,) = [item for item in episodes(active, 30) if item.name == "GpuLost"]
    assert (episode.start, episode.end, episode.pages, episode.pending_since) == (420, 990, False, 300)  # a spare GPU


def test_a_calm_node_has_no_active_alert_but_the_heartbeat() -> None:
    series = Series()
    for state in cost.states(100, cost.LOAD_SHARE):
        series.add(state)
    assert {item.name for item in evaluate(series)} == set()


@pytest.fixture(scope="module")
def played() -> list[recorded.Played]:
    return recorded.incidents(timed=6)


def test_harm_pages_and_little_else_does(played: list[recorded.Played]) -> None:
    found, wanted = recorded.recall(played)
    right, paged = recorded.precision(played)
    assert wanted >= 30
    assert found / wanted >= report.RECALL
    assert right / paged >= report.PRECISION


def test_pages_come_in_time(played: list[recorded.Played]) -> None:
    assert [item.incident.id for item in played for page in item.pages if not page.in_time] == []


def test_what_is_left_out_of_recall_cannot_be_seen_or_is_over_too_soon() -> None:
    by_id = {item.id: item for item in data.incidents()}
    for name, (_, wait) in recorded.TOO_SHORT.items():
        assert by_id[name].end - by_id[name].start < builtin()[wait]
    for name in recorded.NOT_VISIBLE:
        with Reader(data.RECORDINGS / by_id[name].name) as reader:
            names = {
                counter
                for snapshot in reader
                for page in snapshot.pages
                for engine in page.engines
                for counter in (*engine.counters, *engine.histograms)
            }
        assert names <= {"generation_tokens", "prompt_tokens", "preemptions"}


def test_a_server_without_pressure_pages_nobody() -> None:
    names = ("burstgpt/scale-100", "vllm-cpu/a_idle", "h100/llama-2-7b-013")
    for name, active in recorded.alerts(f"{name}.jsonl.gz" for name in names).items():
        assert [item for item in active if item.pages and item.firing] == [], name


def test_an_hour_of_production_traffic_pages_nobody() -> None:
    busiest = max(range(len(fortnight.rates("m-mid"))), key=fortnight.rates("m-mid").__getitem__)
    server, series = fortnight.Server(fortnight.START, seed=3), Series()
    for scrape in range(360):
        rate = fortnight.rates("m-mid")[busiest - 6 + scrape // 40] if scrape % 40 == 0 else None
        server.scrape(series, rate)
    assert sum(server.engine.books.finished.values()) > 4000
    active = evaluate(series)
    assert [item for item in active if item.pages] == []


def test_the_stored_fortnight_is_whole_and_silent() -> None:
    result = stored.load()
    assert len(result.days) == fortnight.DAYS
    assert 0.75 <= max(day.peak_share for day in result.days) <= 0.8
    assert all(day.pages == {} for day in result.days)


@pytest.mark.parametrize("case", cold.cases(), ids=lambda case: case.name)
def test_overload_without_a_baseline_pages_and_a_batch_does_not(case: cold.Case) -> None:
    outcome = cold.play(case)
    assert outcome.good, outcome.pages
    assert ("InferenceSlow" in {page.name for page in outcome.pages}) is case.pages
