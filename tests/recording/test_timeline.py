"""A replay as lines: the JSON contract and the timeline of changes."""

from __future__ import annotations

import json
import math

import pytest

from kvpressure.model.readings import EngineKey
from kvpressure.model.signals import KvSignals, Signals
from kvpressure.model.state import Diagnosis, EngineState
from kvpressure.recording.timeline import Timeline, json_line
from tests.recording.strategies import replayed

KEY = EngineKey("ns", "pod", "model", "0")
CONTRACT = {
    *("t", "namespace", "pod", "model_name", "engine", "verdict", "confidence", "grade", "row", "runner_up", "stage"),
    *("evidence", "conditions", "signals", "documented_signature"),
}


def idle(signals: Signals) -> EngineState:
    answer = Diagnosis("idle", 0.8, None, 0.0)
    return EngineState(KEY, "x", "c", (), True, None, None, None, None, {}, signals, answer)


def test_the_json_line_is_the_contract_on_a_real_recording() -> None:
    for state in replayed("vllm-cpu/l_dp2"):
        lines = [json.loads(json_line(state.time, item)) for item in state.engines]
        assert sorted(line["engine"] for line in lines) == ["0", "1"]
        for line in lines:
            assert set(line) == CONTRACT
            assert line["t"] == state.time
            for group in ("evidence", "conditions", "documented_signature"):
                assert all(value in (True, False, None) for value in line[group].values())
            assert all(value is None or isinstance(value, float) for value in line["signals"].values())


def test_what_is_no_number_in_json_is_null() -> None:
    state = idle(Signals(0.0, kv=KvSignals(kv_used_ratio=math.nan, kv_slope_per_second=math.inf)))
    line = json.loads(json_line(1.0, state), parse_constant=pytest.fail)
    assert line["signals"]["kv_used_ratio"] is None
    assert line["signals"]["kv_slope_per_second"] is None


def test_any_time_a_recording_claims_can_be_shown() -> None:
    assert list(Timeline().lines(1e300, (idle(Signals(0.0)),)))
