"""The exporter's side: reports in files, of pods that may write anything."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, GpuOwner, Scrape, Snapshot, StepStats
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin
from kvpressure.signals.plugin_steps import MAX_ENTRIES, StepWindow
from kvpressure.sources import plugin_reports as source_module
from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.plugin_reports import FRESH_SECONDS, Malformed, PluginSource, parse
from kvpressure_vllm.report import ReportFile

GB = 10**9


@dataclass
class Settings:
    plugin_directory: Path | None
    shared: SharedDiscovery = field(default_factory=SharedDiscovery)


def body(
    kind: str = "worker", pod: str = "p", age: float = 0.0, started: float | None = None, **values: Any
) -> dict[str, Any]:
    now = time.time()
    return {
        "kvpressure": 1,
        "kind": kind,
        "pid": 7,
        "started": now - 100 if started is None else started,
        "written": now - age,
        "namespace": "ns",
        "pod": pod,
    } | values


def worker(**values: Any) -> dict[str, Any]:
    return body(**{"rank": 0, "allocated_bytes": 10, "reserved_bytes": 30, **values})


def engine(batch: dict[str, int], running: dict[str, int] | None = None, **values: Any) -> dict[str, Any]:
    return {
        "steps": sum((running or batch).values()),
        "decoded": sum(int(s) * n for s, n in batch.items()),
        "tokens": 1,
        "preemptions": 0,
        "kv_max": 0.5,
        "batch": batch,
        "running": running or batch,
        **values,
    }


def frontend(engines: dict[str, Any], **values: Any) -> dict[str, Any]:
    return body("frontend", engines=engines, **values)


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["worker", "frontend"]),
    st.lists(st.integers(), max_size=2),
)


def put(directory: Path, content: object, name: str = "worker-7.json") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def read(root: Path, pods: tuple[Pod, ...] = ()):
    settings = Settings(root)
    settings.shared.pods = pods
    return PluginSource(settings).read()


class TestWhere:
    def test_files_of_one_directory_say_themselves_whose_they_are(self, tmp_path: Path) -> None:
        put(tmp_path, worker(pod="a"))
        put(tmp_path, worker(pod="b"), "worker-8.json")
        assert [
            (x.namespace, x.pod, x.allocated_bytes, x.reserved_bytes, x.ooms) for x in read(tmp_path).allocator
        ] == [("ns", "a", 10, 30, None), ("ns", "b", 10, 30, None)]

    def test_the_name_of_a_directory_overrules_what_a_pod_says(self, tmp_path: Path) -> None:
        put(tmp_path / "team-a_vllm-0", worker(namespace="team-b", pod="victim"))
        [reading] = read(tmp_path).allocator
        assert (reading.namespace, reading.pod) == ("team-a", "vllm-0")

    def test_empty_dirs_below_the_kubelets_directory(self, tmp_path: Path) -> None:
        pods = tuple(Pod("ns", name, uid, "Running") for name, uid in (("a", "uid-a"), ("b", "uid-b")))
        put(tmp_path / "uid-a/volumes/kubernetes.io~empty-dir/kvpressure", worker(pod="x"))
        put(tmp_path / "uid-c/volumes/kubernetes.io~empty-dir/kvpressure", worker(pod="x"))
        assert [x.pod for x in read(tmp_path, pods).allocator] == ["a"]

    def test_no_directory_is_a_failure_with_a_reason(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="no_directory"):
            read(tmp_path / "missing")

    def test_an_empty_directory_is_none(self, tmp_path: Path) -> None:
        reading = read(tmp_path)
        assert (reading.allocator, reading.steps, reading.errors) == ((), (), {})

    def test_what_the_plugin_writes_is_what_is_read(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("POD_NAMESPACE", "ns")
        monkeypatch.setenv("POD_NAME", "p")
        ReportFile("worker", str(tmp_path)).write({"rank": 2, "allocated_bytes": 1, "reserved_bytes": 5, "ooms": 3})
        [reading] = read(tmp_path).allocator
        assert (reading.pod, reading.rank, reading.allocated_bytes, reading.reserved_bytes, reading.ooms) == (
            "p",
            2,
            1,
            5,
            3,
        )


class TestEarlierRuns:
    @pytest.mark.parametrize(
        ("age", "there"), [(FRESH_SECONDS - 1, 1), (FRESH_SECONDS + 1, 0), (-FRESH_SECONDS - 5, 0)]
    )
    def test_only_what_was_written_lately(self, tmp_path: Path, age: float, there: int) -> None:
        put(tmp_path, worker(age=age))
        assert len(read(tmp_path).allocator) == there

    def test_a_process_that_was_replaced_is_not_counted_beside_its_successor(self, tmp_path: Path) -> None:
        now = time.time()
        put(tmp_path, worker(age=4.0, started=now - 500), "worker-7.json")
        put(tmp_path, worker(age=0.0, started=now - 3, allocated_bytes=1), "worker-8.json")
        put(tmp_path, frontend({"0": engine({"9": 900})}, age=4.0, started=now - 500), "frontend-9.json")
        put(tmp_path, frontend({"0": engine({"2": 1})}, started=now - 3), "frontend-10.json")
        reading = read(tmp_path)
        assert [x.allocated_bytes for x in reading.allocator] == [1]
        assert [(x.exact, x.sizes) for x in reading.steps] == [(True, {2: 1})]

    def test_workers_of_other_pods_do_not_count_as_successors(self, tmp_path: Path) -> None:
        put(tmp_path, worker(pod="a", age=4.0))
        put(tmp_path, worker(pod="b", started=time.time() - 1), "worker-8.json")
        assert len(read(tmp_path).allocator) == 2


class TestSteps:
    def test_one_api_server_is_exact(self, tmp_path: Path) -> None:
        put(tmp_path, frontend({"0": engine({"4": 10, "8": 30}, {"5": 40}, kv_max=0.9)}), "frontend-1.json")
        [stats] = read(tmp_path).steps
        assert (stats.exact, stats.sizes, stats.steps, stats.decoded, stats.kv_max) == (
            True,
            {4: 10, 8: 30},
            40,
            280,
            0.9,
        )

    def test_several_add_up_to_the_engine(self, tmp_path: Path) -> None:
        put(tmp_path, frontend({"0": engine({"3": 50}, {"8": 20}), "1": engine({"1": 1})}), "frontend-1.json")
        put(tmp_path, frontend({"0": engine({"5": 50}, {"8": 25, "7": 5}, kv_max=0.7)}), "frontend-2.json")
        stats = {s.engine: s for s in read(tmp_path).steps}
        assert (stats["0"].exact, stats["0"].sizes, stats["0"].steps, stats["0"].decoded) == (
            False,
            {8: 45, 7: 5},
            50,
            400,
        )
        assert stats["0"].kv_max == 0.7
        assert stats["1"].exact


class TestHostile:
    @pytest.mark.attack(
        "plugin files that are no JSON, of other types, or with a number of 400 digits", "the file costs itself"
    )
    @pytest.mark.parametrize("number", range(20))
    def test_a_bad_file_costs_itself(self, tmp_path: Path, number: int) -> None:
        # Written now: a report made when the tests were collected would be left out for its age, not for its content.
        bad: list[Any] = [
            "",
            "{",
            "[]",
            "null",
            "[" * 100_000,
            {"kvpressure": 0},
            body(written="now"),
            body(started=float("nan")),
            body(started=10**400),
            worker(rank=-1),
            worker(reserved_bytes=1e400),
            worker(reserved_bytes=10**400),
            worker(allocated_bytes="9"),
            worker(rank=True),
            body(kind="x"),
            frontend([]),
            frontend({"0": []}),
            frontend({"0": engine({"1": 1}) | {"batch": {"x": 1}}}),
            frontend({"0": engine({"1": 1}, kv_max=2.0)}),
            frontend({str(i): engine({"1": 1}) for i in range(100)}),
        ]
        put(tmp_path / "ns_bad", bad[number])
        put(tmp_path / "ns_good", worker())
        reading = read(tmp_path)
        assert [x.pod for x in reading.allocator] == ["good"]
        assert (reading.steps, reading.errors) == ((), {"malformed": 1})

    def test_a_report_of_a_newer_plugin_says_so(self, tmp_path: Path) -> None:
        put(tmp_path, worker() | {"kvpressure": 2})
        assert read(tmp_path).errors == {"newer_format": 1}

    def test_fields_that_came_later_are_passed_over(self, tmp_path: Path) -> None:
        put(tmp_path, worker(later={"a": [1]}))
        put(tmp_path, frontend({"0": engine({"4": 10}, later=1)}, later=[]), "frontend-1.json")
        reading = read(tmp_path)
        assert ([a.allocated_bytes for a in reading.allocator], [s.sizes for s in reading.steps]) == ([10], [{4: 10}])
        assert reading.errors == {}

    @given(
        st.binary(max_size=200)
        | st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5),
            lambda inner: st.dictionaries(
                st.sampled_from(["kvpressure", "kind", "written", "engines"]) | st.text(max_size=3), inner, max_size=4
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode())
    )
    def test_what_is_read_names_a_pod_and_has_finite_times_and_all_else_is_refused(self, data: bytes) -> None:
        try:
            report = parse(data)
        except Malformed:
            return
        assert report.kind in ("worker", "frontend")
        assert isinstance(report.namespace, str)
        assert isinstance(report.pod, str)
        assert math.isfinite(report.started)
        assert math.isfinite(report.written)

    @given(st.dictionaries(st.sampled_from(sorted(worker())), ODD_VALUES))
    def test_a_worker_with_odd_values_is_read_within_bounds_or_counted(self, odd: dict[str, Any]) -> None:
        try:
            report = parse(json.dumps(worker() | odd).encode())
        except Malformed:
            return
        allocator, steps = source_module.readings([report])
        assert (len(allocator), steps) == (int(report.written >= report.started), ())
        for reading in allocator:
            values = (reading.rank, reading.allocated_bytes, reading.reserved_bytes, reading.ooms)
            assert all(value is None or (type(value) is int and 0 <= value < 2**63) for value in values)

    def test_a_file_that_says_not_whose_it_is_needs_a_directory_that_does(self) -> None:
        data = json.dumps(worker(namespace=3)).encode()
        assert parse(data, ("ns", "p")).namespace == "ns"
        with pytest.raises(Malformed):
            parse(data)

    @pytest.mark.attack("links, pipes, directories and giant files in place of plugin files", "not read, counted")
    def test_links_pipes_and_giants(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        put(secret, worker())
        (tmp_path / "worker-1.json").symlink_to(secret / "worker-7.json")
        os.mkfifo(tmp_path / "worker-2.json")
        put(tmp_path, json.dumps(worker()) + " " * source_module.MAX_FILE_BYTES, "worker-3.json")
        (tmp_path / "ns_link").symlink_to(secret)
        (tmp_path / "worker-4.json").mkdir()
        reading = read(tmp_path)
        assert reading.allocator == ()
        assert reading.errors == {"malformed": 3, "too_large": 1}

    @pytest.mark.attack(
        "a link in place of a directory around the plugin's reports", "nobody gets another pod's values"
    )
    def test_a_link_in_the_middle_of_a_path_is_not_followed(self, tmp_path: Path) -> None:
        """Where pods share the root, each can make the directories of the kubelet's layout."""
        settings = Settings(tmp_path)
        settings.shared.pods = (Pod("ns", "victim", "uid-1", "Running"), Pod("ns", "evil", "uid-2", "Running"))
        put(tmp_path / "uid-1" / source_module.EMPTY_DIR, worker())
        (tmp_path / "uid-2").mkdir()
        (tmp_path / "uid-2" / "volumes").symlink_to(tmp_path / "uid-1" / "volumes")
        reading = PluginSource(settings).read()
        assert [one.pod for one in reading.allocator or ()] == ["victim"]
        assert reading.errors == {"malformed": 1}

    @pytest.mark.attack(
        "3 000 directories or files in the root of the plugin's reports", "pods with a GPU or engine are read first"
    )
    @pytest.mark.parametrize("volume", ["emptyDir", "hostPath"])
    @pytest.mark.parametrize("strangers", ["directories", "files", "large directories", "pods"])
    def test_strangers_in_the_root_blind_no_pod_that_is_wanted(
        self, tmp_path: Path, strangers: str, volume: str
    ) -> None:
        settings = Settings(tmp_path)
        others = [f"a{number:04}" for number in range(3 * source_module.MAX_LISTED)]
        match strangers:
            case "files":
                for name in others:
                    put(tmp_path, "{", f"worker-{int(name[1:])}.json")
            case "large directories":
                for name in others[: source_module.MAX_DIRECTORIES]:
                    put(tmp_path / f"ns_{name}", worker(padding="x" * 20_000))
            case _:
                for name in others:
                    (tmp_path / f"ns_{name}").mkdir()
        settings.shared.pods = tuple(Pod("ns", name, f"u-{name}", "Running") for name in others if strangers == "pods")
        for kind in ("gpu", "engine"):
            pod = f"vllm-{kind}"
            settings.shared.pods = (*settings.shared.pods, Pod("ns", pod, f"uid-{kind}", "Running"))
            place = tmp_path / (f"uid-{kind}/{source_module.EMPTY_DIR}" if volume == "emptyDir" else f"ns_{pod}")
            put(place, worker(padding="x" * 50_000))
            put(place, frontend({"0": engine({str(size): 1 for size in range(1, 1000)})}), "frontend-1.json")
        settings.shared.observe(
            Snapshot(
                1.0, owners=(GpuOwner("GPU-0", "ns", "vllm-gpu", "c"),), pages=(Scrape("t", 1.0, "ns", "vllm-engine"),)
            ),
            None,
        )
        reading = PluginSource(settings).read()
        for readings in (reading.allocator, reading.steps):
            assert {"vllm-gpu", "vllm-engine"} <= {one.pod for one in readings}
        assert reading.errors["too_large"] >= 1

    def test_thousands_of_files(self, tmp_path: Path) -> None:
        for number in range(source_module.MAX_FILES + 20):
            put(tmp_path, worker(), f"worker-{number}.json")
        reading = read(tmp_path)
        assert len(reading.allocator) == source_module.MAX_FILES
        assert reading.errors == {"too_large": 1}


def told(
    t: float, sizes: dict[int, int], started: float = 0.0, exact: bool = True, kv_max: float | None = None
) -> StepStats:
    return StepStats(
        "ns",
        "p",
        "0",
        started,
        t,
        sum(sizes.values()),
        sum(s * n for s, n in sizes.items()),
        exact,
        kv_max=kv_max,
        sizes=dict(sizes),
    )


class TestWindow:
    @pytest.mark.slow
    @given(st.lists(st.dictionaries(st.integers(1, 50), st.integers(0, 20), max_size=4), min_size=1, max_size=90))
    def test_quantiles_are_those_of_a_list_of_the_last_minutes_steps(self, seconds) -> None:
        window, counts = StepWindow(builtin()), Counter({1: 5})
        window.observe(told(0.0, counts))
        for t, more in enumerate(seconds, 1):
            counts.update(more)
            window.observe(told(float(t), counts))
        now = float(len(seconds))
        steps = sorted(size for more in seconds[-60:] for size, n in more.items() for _ in range(n))
        lately = [size for more in seconds[-30:] for size, n in more.items() for _ in range(n)]
        if not steps:
            assert window.quantiles(now, 0.5) is None
            return
        assert window.quantiles(now, 0.5, 0.95, 1.0) == [
            steps[max(0, -(-len(steps) // 2) - 1)],
            steps[-(-95 * len(steps) // 100) - 1],
            steps[-1],
        ]
        assert window.mean(now, 30.0) == (pytest.approx(sum(lately) / len(lately)) if lately else None)

    @pytest.mark.parametrize(
        "after",
        [told(3.0, {4: 20}, started=2.5), told(3.0, {4: 5}), told(3.0, {4: 20}, exact=False)],
        ids=["new process", "counts went back", "another API server"],
    )
    def test_a_restart_begins_anew(self, after: StepStats) -> None:
        window = StepWindow(builtin())
        for stats in (told(1.0, {4: 5}), told(2.0, {4: 10}), after):
            window.observe(stats)
        assert window.quantiles(3.0, 0.5) is None

    def test_a_silent_plugin_is_not_believed(self) -> None:
        window = StepWindow(builtin())
        window.observe(told(1.0, {4: 5}))
        window.observe(told(2.0, {4: 10}, kv_max=0.9))
        assert (window.quantiles(2.0 + builtin()["plugin_silent_seconds"], 0.5), window.kv_max(9.0, 10.0)) == (
            [4.0],
            0.9,
        )
        assert window.quantiles(2.1 + builtin()["plugin_silent_seconds"], 0.5) is None

    def test_the_same_report_again_changes_nothing(self) -> None:
        window = StepWindow(builtin())
        for stats in (told(1.0, {4: 5}), told(2.0, {4: 10}), told(2.0, {4: 10}), told(3.0, {4: 10, 8: 5})):
            window.observe(stats)
        assert (window.quantiles(3.0, 0.5, 0.95), window.mean(3.0, 30.0)) == ([4.0, 8.0], 6.0)


def states(snapshots: list[Snapshot]):
    pipeline = Pipeline()
    return [pipeline.observe(snapshot) for snapshot in snapshots]


def snapshot(t: float, running: float = 8.0, **kinds: Any) -> Snapshot:
    reading = EngineReading(
        "m",
        "0",
        gauges={r.RUNNING: running, r.WAITING: 0.0, r.KV_USAGE: 0.3},
        counters={r.GENERATION_TOKENS: 100.0 * t},
        histograms={},
    )
    return Snapshot(t, pages=(Scrape("t", t, "ns", "p", engines=(reading,)),), **kinds)


class TestThroughThePipeline:
    def test_batch_and_kv_maximum_are_those_of_the_steps(self) -> None:
        sizes = Counter({7: 1})
        told_by_second = []
        for t in range(1, 41):
            sizes.update({3: 90, 12: 10})
            told_by_second.append(told(float(t), sizes, kv_max=0.99))
        *_, last = states([snapshot(stats.written, steps=(stats,)) for stats in told_by_second])
        signals = last.engines[0].signals
        assert (signals.batch.batch_p50, signals.batch.batch_p95, signals.batch.batch_p99) == (3.0, 12.0, 12.0)
        assert signals.batch.batch_mean == pytest.approx(3.9)
        assert (signals.kv.kv_used_ratio, signals.kv.kv_used_ratio_max) == (0.3, 0.99)

    def test_without_the_plugin_they_are_those_of_the_pages(self) -> None:
        *_, last = states([snapshot(float(t)) for t in range(1, 41)])
        signals = last.engines[0].signals
        assert (signals.batch.batch_p95, signals.kv.kv_used_ratio_max) == (8.0, 0.3)

    def test_steps_of_another_engine_or_pod_are_not_taken(self) -> None:
        def other(t: float) -> tuple[StepStats, ...]:
            known = told(t, {99: int(t)})
            return (
                StepStats("ns", "q", "0", 0, t, 1, 1, True, sizes=known.sizes),
                StepStats("ns", "p", "1", 0, t, 1, 1, True, sizes=known.sizes),
            )

        *_, last = states([snapshot(float(t), steps=other(t)) for t in range(1, 41)])
        assert last.engines[0].signals.batch.batch_p95 == 8.0

    @pytest.mark.parametrize(
        ("reserved", "split", "fragmented"),
        [
            (2 * GB, 2 * GB, True),
            (2 * GB - 1, 2 * GB - 1, False),
            (8 * GB, 2 * GB, True),
            (8 * GB, 2 * GB - 1, False),
            (8 * GB, 0, False),
            (8 * GB, None, True),
        ],
        ids=["2 GB", "below 2 GB", "a quarter is split", "less is split", "cached activations", "split not known"],
    )
    def test_fragmentation_from_a_report(
        self, tmp_path: Path, reserved: int, split: int | None, fragmented: bool
    ) -> None:
        put(tmp_path, worker(allocated_bytes=10 * GB, reserved_bytes=10 * GB + reserved, inactive_split_bytes=split))
        [state] = states([snapshot(time.time(), allocator=read(tmp_path).allocator)])
        memory = state.engines[0].signals.memory
        assert (memory.allocator_reserved_bytes, memory.allocator_allocated_bytes) == (10 * GB + reserved, 10 * GB)
        assert state.engines[0].diagnosis.conditions["allocator_fragmentation"] is fragmented

    def test_fragmentation_is_not_known_without_one(self) -> None:
        [state] = states([snapshot(1.0)])
        assert state.engines[0].signals.memory.allocator_reserved_bytes is None
        assert state.engines[0].diagnosis.conditions["allocator_fragmentation"] is None


@pytest.mark.attack("new batch sizes on every report of the plugin", "a bounded window")
def test_a_step_window_of_new_sizes_every_second_is_bounded() -> None:
    """32 000 batch sizes a report, 256 reports kept: 101 MiB for 27 pages."""
    window = StepWindow(builtin())
    for second in range(120):
        sizes = dict.fromkeys(range(1, 4001), 1 + second)
        window.observe(StepStats("ns", "p", "0", 1.0, 1000.0 + second, 4000 * second, 1, True, 0, None, sizes))
    assert sum(len(increase.sizes) for increase in window._increases) <= MAX_ENTRIES
    assert window.quantiles(1119.0, 0.5) is not None


def test_increases_older_than_a_minute_are_dropped() -> None:
    window = StepWindow(builtin())
    for second in range(200):
        window.observe(StepStats("ns", "p", "0", 1.0, 1000.0 + second, second, second, True, 0, None, {8: second}))
    assert len(window._increases) <= 61
    assert window.quantiles(1199.0, 0.5) == [8.0]


class TestCrowds:
    @pytest.mark.attack("3 000 files in the plugin directory", "not listed to the end; the rest counts as too large")
    def test_a_directory_of_very_many_files_is_not_listed_to_its_end(self, tmp_path: Path, monkeypatch: Any) -> None:
        listed = 0
        scandir = os.scandir

        class Counted:
            def __init__(self, path: Any) -> None:
                self.entries = scandir(path)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                self.entries.close()

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                nonlocal listed
                listed += 1
                return next(self.entries)

        for number in range(3000):
            (tmp_path / f"worker-{number}.json").touch()
        put(tmp_path / "ns_p", worker())
        monkeypatch.setattr(source_module.os, "scandir", Counted)
        reading = read(tmp_path)
        assert listed < 2 * (source_module.MAX_LISTED + 2) + 10
        assert reading.errors["too_large"] >= 1

    @pytest.mark.slow
    @pytest.mark.fault(
        "sources",
        "plugin report malformed or too large",
        "that report is left out",
        '`source_errors_total{source="plugin"}`',
        "next good report",
    )
    @pytest.mark.writer(
        "anyone who may write in the plugin directory",
        "report files of any number, size and content",
        "values of their own pod; the path decides which pod that is",
        "the directory listing, files, bytes and counts are capped; pods with a GPU or engine, then small reports, are"
        " read first; links are not followed",
    )
    def test_small_honest_reports_are_read_whatever_others_write(self, tmp_path: Path) -> None:
        engines = {str(n): engine({str(size): 1 for size in range(1000)}) for n in range(8)}
        full = json.dumps(frontend(engines))
        for pod in range(40):
            for number in range(8):
                put(tmp_path / f"bad_p{pod}", full, f"frontend-{number}.json")
        put(tmp_path / "good_zz", frontend({"0": engine({"4": 9})}), "frontend-1.json")
        put(tmp_path / "good_zz", worker(), "worker-1.json")
        reading = read(tmp_path)
        assert [x.pod for x in reading.allocator] == ["zz"]
        assert ("good", "zz") in {(x.namespace, x.pod) for x in reading.steps}
        assert sum(len(x.sizes) for x in reading.steps) <= source_module.MAX_ENTRIES
        assert reading.errors["too_large"] > 0

    @pytest.mark.writer(
        "anyone who may write in the plugin directory, where pods share one directory",
        "a report in another pod's name",
        "values of a pod that has no directory of its own",
        "a pod's own directory always wins",
    )
    def test_a_file_in_the_shared_directory_speaks_for_no_pod_with_its_own(self, tmp_path: Path) -> None:
        put(tmp_path / "ns_victim", worker(allocated_bytes=1))
        put(tmp_path, worker(namespace="ns", pod="victim", allocated_bytes=9, started=time.time() + 5))
        assert [x.allocated_bytes for x in read(tmp_path).allocator] == [1]
