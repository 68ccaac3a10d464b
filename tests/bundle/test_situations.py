"""Situations that no single alert's generated tests play: gaps, first starts, last pods, unmapped engines, several clusters.

What must be silent has a neighbour that must not be, so that silence proves something.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.live

RULES = Path(__file__).parents[2] / "alerts" / "kvpressure-rules.yaml"
ENGINE = 'namespace="inf",pod="chat-0",model_name="m",engine="0"'
AT = 'instance="a",job="kvpressure",node="a"'
ELSEWHERE = 'instance="b",job="kvpressure",node="b"'
GPU = 'uuid="GPU-1",gpu="0",vendor="nvidia"'


OTHER_NODE = (
    f"kvpressure_build_info{{{ELSEWHERE}}}"  # always there: the exporters as a whole are not what is asked about
)


def firing(tmp_path: Path, series: dict[str, str], minute: int, interval: str = "1m", since: int = 1) -> list[str]:
    """Names and severities of what fires at that minute or fired in the ``since`` minutes before, the watchdog left out; promtool
    says so by failing.
    """
    alerts = 'ALERTS{alertstate="firing",alertname!="KvpressureWatchdog"}'
    asked = f"count by (alertname, severity) ({alerts if since == 1 else f'max_over_time({alerts}[{since}m])'})"
    series = {OTHER_NODE: "1+0x600", **series}
    case = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": asked, "eval_time": f"{minute}m", "exp_samples": [{"labels": "nothing", "value": 0}]}
        ],
    }
    output = judge(tmp_path, case)
    return sorted(
        part.split('"')[1] + " " + part.split('"')[3]
        for part in output.split("got:")[1].splitlines()[0].split("{")
        if part.startswith("alertname")
    )


def judge(tmp_path: Path, case: dict[str, Any]) -> str:
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [case]}))
    result = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "got:" in result.stdout + result.stderr, result.stdout + result.stderr
    return result.stdout + result.stderr


XID = f'kvpressure_gpu_xid_errors_total{{{GPU},xid="79",{AT}}}'
OOM = f'kvpressure_log_events_total{{namespace="inf",pod="chat-0",container="vllm",event="cuda_oom",{AT}}}'


class TestOldEventsAfterAGap:
    @pytest.mark.parametrize("gap", ["stale", "stale _x19", "stale _x79", "stale _x119"])
    def test_what_happened_before_it_is_no_news(self, tmp_path: Path, gap: str) -> None:
        """The exporter was not scraped for a while (its node was unreachable), other nodes were all the time."""
        values = f"1+0x119 {gap} 1+0x260"
        series = {XID: values, OOM: values, f"kvpressure_build_info{{{AT}}}": values}
        assert firing(tmp_path, series, 80, "15s", since=60) == []

    def test_what_happens_after_it_is(self, tmp_path: Path) -> None:
        series = {
            XID: "1+0x119 stale _x79 1+0x99 2+0x160",
            f"kvpressure_build_info{{{AT}}}": "1+0x119 stale _x79 1+0x260",
        }
        assert firing(tmp_path, series, 77, "15s") == ["GpuXidError critical"]

    @pytest.mark.parametrize(("ticks", "expected"), [(30, ["GpuXidError critical"]), (40000, [])])
    def test_the_first_of_an_exporter_that_has_just_started_is(
        self, tmp_path: Path, ticks: int, expected: list[str]
    ) -> None:
        """A node that joins, or an exporter under a new address; not one that ran before and was only not scraped."""
        series = {
            XID: "_x33 1+0x30",
            f"kvpressure_build_info{{{AT}}}": "_x30 1+0x40",
            f"kvpressure_ticks_total{{{AT}}}": f"_x30 {ticks}+60x40",
        }
        assert firing(tmp_path, series, 40) == expected

    def test_the_first_of_all_is(self, tmp_path: Path) -> None:
        series = {XID: "_x119 1+0x60", f"kvpressure_build_info{{{AT}}}": "1+0x180"}
        assert firing(tmp_path, series, 33, "15s") == ["GpuXidError critical"]


class TestModelDown:
    UP = f"kvpressure_engine_up{{{ENGINE},{AT}}}"

    def test_a_first_start_may_take_its_time(self, tmp_path: Path) -> None:
        assert firing(tmp_path, {self.UP: "0+0x60"}, 13) == []
        assert firing(tmp_path, {self.UP: "0+0x60"}, 30) == ["InferenceEngineDown warning"]

    def test_one_after_a_night_without_replicas_too(self, tmp_path: Path) -> None:
        assert firing(tmp_path, {self.UP: "1+0x10 stale _x120 0+0x30"}, 144) == []

    def test_what_served_and_does_not_pages_for_as_long_as_it_lasts(self, tmp_path: Path) -> None:
        for minute in (20, 60, 200):
            assert "InferenceModelDown critical" in firing(tmp_path, {self.UP: "1+0x10 0+0x240"}, minute), minute
        assert firing(tmp_path, {self.UP: "1+0x10 0+0x100 1+0x20"}, 116) == []

    def test_also_when_the_pod_is_replaced_meanwhile(self, tmp_path: Path) -> None:
        """Down for an hour and a half, then evicted; its successor comes after eight minutes and does not answer either."""
        series = {self.UP: "1+0x30 0+0x89 stale", self.UP.replace("chat-0", "chat-1"): "_x128 0+0x120"}
        assert "InferenceModelDown critical" in firing(tmp_path, series, 170)


class TestLastPodGone:
    PENDING = 'kube_pod_status_unschedulable{namespace="inf",pod="chat-1"}'
    UP = f"kvpressure_engine_up{{{ENGINE},{AT}}}"

    def test_it_pages_when_its_successor_finds_no_node(self, tmp_path: Path) -> None:
        series = {self.UP: "1+0x10 stale", self.PENDING: "_x11 1+0x60"}
        assert firing(tmp_path, series, 30) == ["InferencePodUnschedulable critical"]

    def test_it_is_a_ticket_while_another_engine_serves(self, tmp_path: Path) -> None:
        assert firing(tmp_path, {self.UP: "1+0x70", self.PENDING: "_x11 1+0x60"}, 40) == [
            "InferencePodUnschedulable warning"
        ]

    def test_a_namespace_that_never_served_is_nobodys_business(self, tmp_path: Path) -> None:
        assert firing(tmp_path, {self.PENDING: "1+0x60"}, 50) == []


class TestGpuMemoryHigh:
    USED = f"kvpressure_gpu_memory_used_ratio{{{GPU},{AT}}}"

    def test_an_engine_that_nobody_could_map_to_its_gpu_explains_a_full_one(self, tmp_path: Path) -> None:
        """A server of vLLM reserves most of its card: without the mapping nobody knows how much of that it needs."""
        assert firing(tmp_path, {self.USED: "0.93+0x30", f"kvpressure_engine_up{{{ENGINE},{AT}}}": "1+0x30"}, 20) == []

    def test_not_one_that_belongs_to_another_pod(self, tmp_path: Path) -> None:
        owner = f'kvpressure_gpu_pod_info{{{GPU},namespace="train",pod="t",container="c",shared="false",{AT}}}'
        series = {self.USED: "0.97+0x30", owner: "1+0x30", f"kvpressure_engine_up{{{ENGINE},{AT}}}": "1+0x30"}
        assert firing(tmp_path, series, 20) == ["GpuMemoryHigh critical", "GpuMemoryHigh warning"]

    def test_a_full_gpu_of_a_node_without_engines_is_full(self, tmp_path: Path) -> None:
        series = {self.USED: "0.93+0x30", f"kvpressure_engine_up{{{ENGINE},{ELSEWHERE}}}": "1+0x30"}
        assert firing(tmp_path, series, 20) == ["GpuMemoryHigh critical", "GpuMemoryHigh warning"]


def test_the_page_of_a_cluster_carries_its_own_figures_and_links_to_it(tmp_path: Path) -> None:
    series = {}
    for cluster, limit in (("a", 12), ("b", 256)):
        own = f'cluster="{cluster}",{ENGINE}'
        series[f'kvpressure_limit_recommended{{{own},limit="max_num_seqs"}}'] = f"{limit}+0x30"
    series[f'kvpressure_pressure_stage{{cluster="a",{ENGINE},stage="thrashing"}}'] = "1+0x30"
    series[f'kvpressure_verdict_confidence{{cluster="a",{ENGINE}}}'] = "0.9+0x30"
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": "20m", "alertname": "InferenceKVCachePressure", "exp_alerts": []}],
    }
    output = judge(tmp_path, case)
    assert "Set max_num_seqs to 12." in output
    assert "256" not in output
    assert "&var-cluster=a" in output
