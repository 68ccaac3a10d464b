"""A replay as OpenMetrics: strictly valid, and a real Prometheus answers queries on the blocks made of it."""

from __future__ import annotations

import gc
import json
import re
import tracemalloc
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvpressure.model.state import State
from kvpressure.publish.metrics import METRICS
from kvpressure.recording.openmetrics import OpenMetricsWriter
from kvpressure.recording.reader import Reader
from tests.helpers.prometheus import backfilled
from tests.recording.strategies import RECORDINGS, replayed

pytestmark = pytest.mark.live

L_DP2 = "vllm-cpu/l_dp2"
HST4 = "incidents/HST4"  # logs, restarts, containers, an engine that dies


def backfill(recording: str, out: Path) -> int:
    with OpenMetricsWriter(out) as writer:
        for state in replayed(recording):
            writer.add(state.time, state)
    return writer.samples


@pytest.mark.parametrize("recording", [L_DP2, HST4])
def test_the_file_is_valid_openmetrics(recording: str, tmp_path: Path) -> None:
    count = backfill(recording, tmp_path / "out")
    text = (tmp_path / "out").read_text()
    assert text.endswith("# EOF\n")
    grouped, plain = _grouped(text)
    families = list(text_string_to_metric_families(plain))  # refuses interleaved families, metrics and times going back
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) + len(grouped) == count
    assert {f"kvpressure_{metric.name}" for metric in METRICS} >= {sample.name for sample in samples}
    assert all(sample.timestamp is not None for sample in samples)


def _grouped(text: str) -> tuple[list[str], str]:
    """The samples of summaries, and the text without those families.

    ``prometheus_client`` loses all but the first sample of such a metric's second point; promtool reads them.
    """
    names = re.findall(r"^# TYPE (\S+) summary$", text, re.M)
    mine = re.compile(rf"(?:# (?:HELP|TYPE) )?(?:{'|'.join(names)})[ {{]")
    lines = text.splitlines(keepends=True)
    return (
        [line for line in lines if mine.match(line) and line[0] != "#"],
        "".join(line for line in lines if not mine.match(line)),
    )


def test_a_tick_that_is_not_later_is_left_out(tmp_path: Path) -> None:
    with OpenMetricsWriter(tmp_path / "out") as writer:
        for t in (10.0, 10.0004, 9.0, 10.001):
            writer.add(t, State(time=t, ticks=1))
    stamps = re.findall(r"^kvpressure_ticks_total \S+ (\S+)$", (tmp_path / "out").read_text(), re.M)
    assert stamps == ["10.000", "10.001"]


def test_nothing_is_left_behind_when_the_replay_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with OpenMetricsWriter(tmp_path / "out") as writer:
            writer.add(1.0, State(time=1.0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_ticks(tmp_path: Path) -> None:
    state = next(replayed(L_DP2))

    def peak(ticks: int) -> int:
        tracemalloc.start()
        try:
            with OpenMetricsWriter(tmp_path / "out") as writer:
                for t in range(ticks):
                    writer.add(float(t), state)
                    if t % 10 == 0:
                        gc.collect()  # seldom by itself under these tests
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(120) < 2 * peak(30), "kept ticks would take four times as much"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real Prometheus that has a replay."""
    history = tmp_path_factory.mktemp("prometheus") / "out"
    backfill(L_DP2, history)
    with backfilled(history) as url:
        yield url


def _query(base: str, query: str, t: float) -> list[dict]:
    with urllib.request.urlopen(f"{base}/api/v1/query?query={quote(query)}&time={t}", timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def test_a_real_prometheus_answers_on_the_backfilled_blocks(prometheus: str) -> None:
    with Reader(RECORDINGS / f"{L_DP2}.jsonl.gz") as reader:
        snapshots = list(reader)
    end = snapshots[-1].time
    running = {
        row["metric"]["engine"]: float(row["value"][1])
        for row in _query(prometheus, "kvpressure_requests_running", end)
    }
    assert running == {e.engine: e.gauges["running"] for e in snapshots[-1].pages[0].engines}
    highest = _query(prometheus, "max by (engine) (max_over_time(kvpressure_kv_cache_used_ratio[5m]))", end)
    assert {row["metric"]["engine"]: float(row["value"][1]) for row in highest} == {
        engine: max(e.gauges.get("kv_usage", 0.0) for s in snapshots for e in s.pages[0].engines if e.engine == engine)
        for engine in ("0", "1")
    }
    ended = _query(prometheus, "sum(increase(kvpressure_requests_finished_total[5m]))", end)
    assert float(ended[0]["value"][1]) > 0
    verdicts = _query(prometheus, "sum by (engine) (kvpressure_verdict)", end)
    assert [float(row["value"][1]) for row in verdicts] == [1.0, 1.0]
