"""The loop and its workers: sources that are slow, hang, fail, recover or are fatal; time is injected."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model.readings import MAX_REASONS, ContainerReading, GpuReading, LogLine, Scrape, Snapshot, SourceHealth
from kvpressure.model.state import State
from kvpressure.runtime.monitor import HANG_SECONDS, HEARTBEAT_SECONDS, PIPELINE, DeferredSource, Monitor, build_sources
from kvpressure.runtime.worker import PENDING_LOGS, Worker, next_due
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import NothingHere, Reading, Source, SourceError
from kvpressure.sources.catalog import CollectorSettings, SourceSpec
from tests.helpers.failing import raising
from tests.helpers.waiting import until

GPUS = Reading(gpus=(GpuReading("GPU-1", 0, "nvidia"),))
START = 1000.0
WALL = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A source whose reads are the given steps in order; the last one repeats."""

    def __init__(self, *steps: Callable[[], Reading], name: str = "fake") -> None:
        self.name = name
        self.steps = list(steps)
        self.closed = False

    def read(self) -> Reading:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step()

    def close(self) -> None:
        self.closed = True


class Hanging(Scripted):
    """A source whose next read, begun in a thread, hangs until ``let_go``. The reads before are ``steps``."""

    def __init__(self, *steps: Callable[[], Reading]) -> None:
        super().__init__(*steps, self._hang, lambda: GPUS)
        self._began, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread()

    def _hang(self) -> Reading:
        self._began.set()
        assert self._go.wait(10)
        return GPUS

    def begin(self, worker: Worker) -> None:
        self._thread = threading.Thread(target=worker.read_once)
        self._thread.start()
        assert self._began.wait(10)

    def let_go(self) -> None:
        self._go.set()
        self._thread.join(10)


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.snapshots: list[Snapshot] = []
        self.error = error

    def observe(self, snapshot: Snapshot) -> State:
        self.snapshots.append(snapshot)
        if self.error is not None:
            raise self.error
        return State(time=snapshot.time, ticks=-1)


def spec(name: str = "fake", **values: float) -> SourceSpec:
    return SourceSpec(name=name, help="", factory=lambda _: Scripted(lambda: GPUS), **values)


def worker(source: Source, clock: Clock, **values: float) -> Worker:
    return Worker(spec(**values), source, lambda _: None, clock=clock, wall=lambda: WALL)


def monitor(clock: Clock, *sources: tuple[SourceSpec, Source], pipeline: Recorder | None = None) -> Monitor:
    return Monitor(
        {one.name: (one, source) for one, source in sources}, pipeline or Recorder(), clock=clock, wall=lambda: WALL
    )


class TestSchedule:
    @given(st.floats(0, 1e6), st.floats(0.01, 3600), st.floats(0, 1e5))
    def test_the_next_point_lies_on_the_grid_after_now_and_at_most_one_interval_ahead(
        self, due: float, interval: float, late: float
    ) -> None:
        now = due + late
        following = next_due(due, interval, now)
        steps = (following - due) / interval
        assert steps == pytest.approx(round(steps), abs=1e-3)
        assert now - 1e-6 < following <= now + interval + 1e-6


class TestWorker:
    def test_a_slow_source_is_held_for_its_time_but_pages_and_logs_come_once(self) -> None:
        clock = Clock()
        reading = replace(GPUS, pages=(Scrape("t", WALL),), logs=(LogLine("n", "p", "c", "x"),))
        one = worker(Scripted(lambda: reading), clock, hold_seconds=3.0)
        one.read_once()
        assert one.take(clock.now) is reading
        for age, there in ((1.0, True), (3.0, True), (3.01, False)):
            clock.now = START + age
            held = one.take(clock.now)
            assert (held is not None) is there
            assert held is None or (held.gpus, held.pages, held.logs) == (GPUS.gpus, None, None)

    def test_it_is_behind_while_it_has_nothing_to_take_and_does_not_fail(self) -> None:
        clock = Clock()
        one = worker(Scripted(lambda: GPUS, lambda: GPUS, raising(SourceError("gone"))), clock, hold_seconds=3.0)
        assert not one.behind(clock.now), "it has never answered"
        one.read_once()
        assert not one.behind(clock.now + 10.0), "nobody has taken it"
        one.take(clock.now)
        assert not one.behind(clock.now + 3.0)
        assert one.behind(clock.now + 3.01)
        one.read_once()
        assert not one.behind(clock.now + 3.01)
        one.read_once()
        one.take(clock.now)
        assert not one.behind(clock.now + 10.0), "it fails"

    def test_two_reads_between_two_ticks_lose_no_page_and_no_line(self) -> None:
        clock = Clock()
        lines = [LogLine("n", "p", "c", str(number)) for number in range(3)]
        pages = [Scrape("t", WALL + number) for number in range(3)]
        steps = [
            lambda n=n: Reading(gpus=(GpuReading(f"GPU-{n}", 0, "nvidia"),), logs=(lines[n],), pages=(pages[n],))
            for n in range(3)
        ]
        one = worker(Scripted(*steps), clock)
        for _ in range(3):
            one.read_once()
        reading = one.take(clock.now)
        assert (reading.logs, reading.pages) == (tuple(lines), tuple(pages))
        assert reading.gpus == (GpuReading("GPU-2", 0, "nvidia"),)

    def test_what_nobody_takes_is_bounded(self) -> None:
        clock = Clock()
        many = tuple(LogLine("n", "p", "c", str(number)) for number in range(PENDING_LOGS // 2 + 1))
        one = worker(Scripted(lambda: Reading(logs=many)), clock)
        for _ in range(5):
            one.read_once()
        reading = one.take(clock.now)
        assert len(reading.logs) == PENDING_LOGS
        assert reading.logs[-1] == many[-1]

    @pytest.mark.fault(
        "sources",
        "a source fails",
        "its series are absent",
        "`source_up` 0, `source_errors_total{reason}`",
        "next reading",
    )
    def test_a_failure_is_absent_at_once_and_has_its_reason(self) -> None:
        clock = Clock()
        one = worker(
            Scripted(lambda: GPUS, raising(SourceError("no_driver", "detail")), lambda: GPUS), clock, hold_seconds=60.0
        )
        one.read_once()
        one.take(clock.now)
        one.read_once()
        assert one.take(clock.now) is None
        assert one.health(clock.now) == SourceHealth("fake", False, "no_driver", WALL, 0.0, {"no_driver": 1})
        one.read_once()
        assert one.take(clock.now) is GPUS
        assert one.health(clock.now) == SourceHealth("fake", True, None, WALL, 0.0, {"no_driver": 1})

    def test_an_unexpected_exception_is_internal_and_logged_once_for_each_kind(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock = Clock()
        one = worker(Scripted(raising(KeyError("x")), raising(KeyError("y")), raising(ValueError("z"))), clock)
        for _ in range(4):
            one.read_once()
        assert one.health(clock.now).errors == {"internal": 4}
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert [name for line in errors for name in ("KeyError", "ValueError") if name in line] == [
            "KeyError",
            "ValueError",
        ]

    def test_reasons_are_bounded(self) -> None:
        clock = Clock()
        one = worker(Scripted(*(raising(SourceError(f"r{number}")) for number in range(3 * MAX_REASONS))), clock)
        for _ in range(3 * MAX_REASONS):
            one.read_once()
        errors = one.health(clock.now).errors
        assert len(errors) == MAX_REASONS + 1
        assert errors["other"] == 2 * MAX_REASONS

    @pytest.mark.parametrize(("seconds", "used"), [(5.0, True), (5.1, True), (10.0, True), (10.1, False)])
    def test_a_late_reading_counts_as_a_timeout_and_is_used_unless_it_is_far_too_late(
        self, seconds: float, used: bool
    ) -> None:
        clock = Clock()

        def slow() -> Reading:
            clock.now += seconds
            return GPUS

        one = worker(Scripted(slow), clock, deadline_seconds=5.0)
        one.read_once()
        assert (one.take(clock.now) is GPUS) is used
        health = one.health(clock.now)
        assert health.errors == ({} if seconds <= 5.0 else {"timeout": 1})
        assert health.up is used
        assert health.duration_seconds == pytest.approx(seconds)

    @pytest.mark.fault(
        "sources",
        "a source hangs (driver, disk)",
        "its series are absent after its deadline; the loop goes on",
        '`source_errors_total{reason="timeout"}`',
        "when the call returns",
    )
    def test_a_hanging_read_is_down_after_its_deadline_and_picked_up_when_it_returns(self) -> None:
        clock, source = Clock(), Hanging(lambda: GPUS)
        one = worker(source, clock, deadline_seconds=5.0, hold_seconds=60.0)
        one.read_once()
        one.take(clock.now)
        source.begin(one)
        clock.now += 5.0
        assert one.take(clock.now) is not None  # within the deadline the last reading is held
        assert one.hanging_seconds(clock.now) == 0
        for extra in (0.1, 50.0, 700.0):
            clock.now = START + 5.0 + extra
            assert one.take(clock.now) is None
            assert one.health(clock.now) == SourceHealth("fake", False, "timeout", WALL, 0.0, {"timeout": 1})
            assert one.hanging_seconds(clock.now) == pytest.approx(extra)
        source.let_go()
        assert one.take(clock.now) is None  # 705 s old
        assert one.hanging_seconds(clock.now) == 0
        one.read_once()
        assert one.take(clock.now) is GPUS
        assert one.health(clock.now).up is True


class TestTick:
    def test_a_tick_gathers_what_is_there_and_publishes(self) -> None:
        clock, pipeline = Clock(), Recorder()
        good = Scripted(lambda: replace(GPUS, targets=("a",)))
        other = Scripted(lambda: Reading(gpus=(GpuReading("card0", 0, "amd"),), targets=("b",)), name="other")
        bad = Scripted(raising(SourceError("refused")), name="bad")
        one = monitor(clock, (spec(), good), (spec("other"), other), (spec("bad"), bad), pipeline=pipeline)
        for each in one.workers.values():
            each.read_once()
        state = one.tick(lag=0.25)
        (snapshot,) = pipeline.snapshots
        assert [gpu.uuid for gpu in snapshot.gpus] == ["GPU-1", "card0"]
        assert snapshot.targets == ("a", "b")
        assert snapshot.time == WALL
        assert {name: health.up for name, health in snapshot.health.items()} == {
            "fake": True,
            "other": True,
            "bad": False,
        }
        assert one.state is state
        assert (state.ticks, state.lag_seconds) == (1, 0.25)
        assert state.health[PIPELINE].up is True
        one.tick()
        assert (one.state.ticks, pipeline.snapshots[1].gpus, pipeline.snapshots[1].targets) == (2, (), None)

    @pytest.mark.fault("process", "ticks take too long", "data are later", "`tick_lag_seconds`", "by itself")
    def test_ticks_that_take_longer_than_the_interval_are_late(self) -> None:
        class Slow(Recorder):
            def observe(self, snapshot: Snapshot) -> State:
                time.sleep(0.04)
                return super().observe(snapshot)

        one = Monitor({}, Slow(), 0.01)
        lags: list[float] = []
        one.add_listener(lambda _, state: lags.append(state.lag_seconds))
        one.start()
        until(lambda: len(lags) >= 4)
        one.stop()
        assert min(lags[1:4]) >= 0.025, "0.04 s of work in 0.01 s"

    @pytest.mark.fault(
        "process",
        "the pipeline raises",
        "the last state is not republished as new",
        "`ticks_total` stands still, log",
        "next tick",
    )
    def test_a_pipeline_that_fails_does_not_stop_the_loop_and_publishes_nothing_stale(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock, pipeline = Clock(), Recorder()
        one = monitor(clock, (spec(), Scripted(lambda: GPUS)), pipeline=pipeline)
        one.tick()
        pipeline.error = RuntimeError("bug")
        for _ in range(3):
            one.tick()
        assert one.state.ticks == 4
        assert one.state.health[PIPELINE] == SourceHealth(PIPELINE, False, "internal", WALL, 0.0, {"internal": 3})
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
        pipeline.error = None
        assert one.tick().health[PIPELINE].up is True

    def test_a_reading_that_cannot_be_joined_costs_its_source_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        broken = Reading(containers=(ContainerReading([], "pod", "c"),))
        watched = Recorder()
        loop = monitor(
            Clock(), (spec("good"), Scripted(lambda: GPUS)), (spec("bad"), Scripted(lambda: broken)), pipeline=watched
        )
        for each in loop.workers.values():
            each.read_once()
        with caplog.at_level(logging.ERROR):
            loop.tick()
        assert watched.snapshots[-1].gpus == GPUS.gpus
        assert watched.snapshots[-1].containers == ()
        assert "joining the sources' readings failed" in caplog.text

    def test_listeners_get_both_and_cannot_stop_the_loop(self, caplog: pytest.LogCaptureFixture) -> None:
        clock = Clock()
        one = monitor(clock, (spec(), Scripted(lambda: GPUS)))
        heard: list[tuple[Snapshot, State]] = []

        def broken(snapshot: Snapshot, state: State) -> None:
            raise OSError(28, f"disk full at {snapshot.time} {state.ticks}")

        one.add_listener(broken)
        one.add_listener(lambda snapshot, state: heard.append((snapshot, state)))
        one.tick()
        one.tick()
        assert [state.ticks for _, state in heard] == [1, 2]
        assert heard[1][1] is one.state
        assert len(caplog.records) == 1

    @pytest.mark.fault("process", "the loop hangs", "`/-/healthy` 503", "liveness probe", "restart by the kubelet")
    def test_health_is_the_loop_and_a_hang_only_after_long(self) -> None:
        clock, source = Clock(), Hanging()
        one = monitor(clock, (spec(deadline_seconds=5.0), source))
        source.begin(one.workers["fake"])
        clock.now += HEARTBEAT_SECONDS
        assert one.why_unhealthy() is None
        clock.now += 1
        assert one.why_unhealthy() == "no tick for 31 s"
        one.tick()
        assert one.why_unhealthy() is None
        clock.now = START + 5.0 + HANG_SECONDS
        one.tick()
        assert one.why_unhealthy() is None
        clock.now += 1
        one.tick()
        assert one.why_unhealthy() == "source fake has been hanging for 601 s"
        source.let_go()
        assert one.why_unhealthy() is None

    def test_ready_when_every_source_has_answered_or_failed_and_a_tick_is_done(self) -> None:
        clock = Clock()
        one = monitor(clock, (spec(), Scripted(lambda: GPUS)), (spec("bad"), Scripted(raising(SourceError("x")))))
        assert one.why_not_ready() == "waiting for fake, bad"
        one.workers["fake"].read_once()
        one.tick()
        assert one.why_not_ready() == "waiting for bad"
        one.workers["bad"].read_once()
        assert one.why_not_ready() is None


class TestRunning:
    """With real threads and short intervals."""

    def run(self, *sources: tuple[SourceSpec, Source], interval: float = 0.02) -> Monitor:
        one = Monitor({each.name: (each, source) for each, source in sources}, Recorder(), interval)
        one.start()
        return one

    def test_stop_closes_the_sources_even_when_closing_hangs_or_fails(self) -> None:
        go = threading.Event()
        good, stubborn, failing = (Scripted(lambda: GPUS, name=name) for name in ("fake", "stubborn", "failing"))
        stubborn.close, failing.close = lambda: go.wait(20), raising(OSError("gone"))
        one = self.run((spec(), good), (spec("stubborn"), stubborn), (spec("failing"), failing))
        began = time.monotonic()
        one.stop()
        assert time.monotonic() - began < 3
        assert good.closed
        go.set()

    def test_the_first_tick_waits_for_the_sources_but_not_for_long(self) -> None:
        one = self.run((spec(), Scripted(lambda: (time.sleep(0.1), GPUS)[1])), interval=60.0)
        until(lambda: one.why_not_ready() is None)
        assert one.state.health["fake"].up is True
        one.stop()

    @pytest.mark.slow
    @pytest.mark.fault(
        "process",
        "process suspended or starved (SIGSTOP, machine asleep, no CPU)",
        "the next tick waits up to a second for the sources, so nothing is lost;"
        " old data are not believed; after five minutes, engines are absent until their next scrape",
        "`tick_lag_seconds`",
        "by itself",
    )
    def test_after_standing_still_a_tick_waits_for_the_sources_and_loses_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a suspend, or where others take the CPU: what is held is too old, and the next read is under way."""
        jump, asked = [0.0], threading.Event()

        def read() -> Reading:
            if jump[0]:
                asked.wait(10)
            return GPUS

        source = spec(interval_seconds=0.05, deadline_seconds=60.0, hold_seconds=3.0)
        pipeline = Recorder()
        one = Monitor({"fake": (source, Scripted(read))}, pipeline, 0.5, clock=lambda: time.monotonic() + jump[0])
        behind, unhealthy = one.workers["fake"].behind, []

        def noticed(now: float) -> bool:
            unhealthy.append(one.why_unhealthy())
            asked.set()
            return behind(now)

        monkeypatch.setattr(one.workers["fake"], "behind", noticed)
        one.start()
        until(lambda: len(pipeline.snapshots) >= 2)
        jump[0] = 10.0 + HEARTBEAT_SECONDS
        until(lambda: one.state.lag_seconds > 5.0)
        one.stop()
        assert all(snapshot.gpus for snapshot in pipeline.snapshots)
        assert unhealthy
        assert not any(unhealthy)


class TestBuilding:
    def test_a_missing_library_is_a_reason_and_is_not_looked_for_again(self) -> None:
        tries = []

        def build() -> Source:
            tries.append(1)
            raise ImportError("No module named 'amdsmi'")

        source = DeferredSource("amd", build)
        for _ in range(3):
            with pytest.raises(SourceError) as caught:
                source.read()
            assert caught.value.reason == "not_installed"
        assert len(tries) == 1
        source.close()

    def test_what_failed_to_build_is_built_by_a_later_read(self) -> None:
        built = Scripted(lambda: GPUS)
        outcomes: list[Callable[[], Source]] = [lambda: raising(SourceError("no_driver"))(), lambda: built]
        source = DeferredSource("nvidia", lambda: outcomes.pop(0)())
        with pytest.raises(SourceError):
            source.read()
        assert source.read() is GPUS
        assert source.read() is GPUS
        source.close()
        assert built.closed

    def test_only_sources_that_are_on_with_their_intervals_and_longer_holds(self) -> None:
        chosen = Settings()
        off = {name: replace(one, enabled=False) for name, one in chosen.collectors.items()}
        chosen = replace(chosen, collectors={**off, "nvidia": CollectorSettings(True, 10.0, 7.0)})
        ((one, source),) = build_sources(chosen).values()
        assert (one.name, one.interval_seconds, one.deadline_seconds, one.hold_seconds) == ("nvidia", 10.0, 7.0, 30.0)
        assert source.name == "nvidia"


def test_a_source_with_nothing_to_read_is_neither_up_nor_down() -> None:
    """A node without AMD GPUs is normal: no source_up, no error count, and the exporter is ready all the same."""
    clock = Clock()
    one = worker(Scripted(raising(NothingHere("no_devices"))), clock)
    assert one.read_once()
    health = one.health(clock.now)
    assert (health.up, health.reason, dict(health.errors)) == (None, "no_devices", {})
    assert one.answered
    assert one.take(clock.now) is None


def test_a_source_that_asks_by_itself_says_how_often_it_failed() -> None:
    """A read fails for as long as a watch is broken; counted is what was asked in vain meanwhile."""
    clock = Clock()
    new = ({"api_error": 3, "api_gone": 1}, {}, None)
    one = worker(Scripted(*(raising(SourceError("api_error", "", counts)) for counts in new)), clock)
    counted = []
    for _ in new:
        one.read_once()
        health = one.health(clock.now)
        assert (health.up, health.reason) == (False, "api_error")
        counted.append(dict(health.errors))
    once = {"api_error": 3, "api_gone": 1}
    assert counted == [once, once, {"api_error": 4, "api_gone": 1}]
