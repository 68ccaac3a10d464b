"""A recording played through the protocol of every other source."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import ContainerReading, GpuReading, Snapshot, Termination
from kvpressure.recording.format import Header, tick_to_json
from kvpressure.recording.source import RecordingSource
from kvpressure.sources.base import SourceError
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.recording.strategies import real_pages


def tick(t: float) -> Snapshot:
    page = parse_scrape(real_pages()[0], target="x", time=t, keep_text=True)
    ended = Termination("OOMKilled", 137, t - 60)
    return Snapshot(
        t,
        gpus=(GpuReading(f"at {t}", 0, "nvidia"),),
        pages=(page,),
        logs=(log_line("n", "p", "c", f"Available KV cache memory: {t} GiB"),),
        containers=(ContainerReading("n", "p", "c", last_termination=ended),),
    )


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join([Header(5.0).to_json(), *(tick_to_json(tick(1000.0 + 5 * i)) for i in range(3))]) + "\n")
    return path


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


def source(path: Path | None, clock: Clock) -> RecordingSource:
    return RecordingSource(SimpleNamespace(recording_file=path, keep_exposition=False), clock)


def test_ticks_come_when_their_time_has_come_and_moments_are_moved(recording: Path) -> None:
    clock = Clock()
    player = source(recording, clock)
    first = player.read()
    assert first.pages is not None
    assert [page.time for page in first.pages] == [5000.0]
    assert first.containers is not None
    assert first.containers[0].last_termination == Termination("OOMKilled", 137, 4940.0)
    clock.now = 5002.0
    between = player.read()
    assert (between.pages, between.logs, between.gpus) == ((), (), first.gpus)
    clock.now = 5011.0
    late = player.read()
    assert late.pages is not None
    assert [page.time for page in late.pages] == [5005.0, 5010.0]
    assert late.logs is not None
    assert [line.line for line in late.logs] == [f"Available KV cache memory: {t} GiB" for t in (1005.0, 1010.0)]
    assert late.gpus is not None
    assert late.gpus[0].uuid == "at 1010.0"
    with pytest.raises(SourceError, match="ended"):
        player.read()
    player.close()


def test_a_gap_in_the_recording_is_no_data_rather_than_old_data(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join([Header(5.0).to_json(), tick_to_json(tick(0.0)), tick_to_json(tick(100.0))]))
    clock = Clock()
    player = source(path, clock)
    player.read()
    clock.now += 50
    assert player.read().gpus is None


def test_nothing_to_play_is_a_failed_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no_file"):
        source(None, Clock())
    (tmp_path / "r").write_text("nonsense")
    with pytest.raises(SourceError, match="bad_file"):
        source(tmp_path / "r", Clock())
