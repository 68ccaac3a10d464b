"""Conditions beside the verdict: each names its number and its threshold, on the page and in the JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from html import escape

from kvpressure.diagnosis.conditions import NAMES
from kvpressure.diagnosis.finding import FROZEN_ROWS, Recent, View
from kvpressure.diagnosis.findings import Gathered, Values
from kvpressure.diagnosis.logic import Answer, Grade
from kvpressure.model.signals import (
    HostSignals,
    KvSignals,
    LoadSignals,
    MemorySignals,
    ProgressSignals,
    Signals,
    ThroughputSignals,
    TierSignals,
    TransferSignals,
)
from kvpressure.model.state import Found, State
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import OWN_LINE, ViewContext
from kvpressure.settings.thresholds import Thresholds, builtin
from tests.publish.states import NOW, full_engine

T = builtin()
SIGNALS = Signals(  # make every condition true
    time=NOW,
    gpu_faults=2,
    events={"cuda_oom": 3},
    events_known=True,
    memory=MemorySignals(
        device_used_ratio=0.99,
        own_used_ratio=0.99,
        allocator_reserved_bytes=9.5e9,
        allocator_allocated_bytes=7e9,
        allocator_inactive_split_bytes=1.5e9,
        idle_growth_bytes_per_hour=3 * 2**30,
    ),
    kv=KvSignals(kv_used_ratio=0.4, kv_seconds_to_full=41.0, prefix_hit_ratio_recent=0.1, prefix_hit_ratio_usual=0.8),
    load=LoadSignals(in_flight=0.0, has_peer=True, kv_role="kv_consumer"),
    progress=ProgressSignals(seconds_still=75.0),
    transfers=TransferSignals(
        loads_stuck_seconds=40.0,
        transfer_slowdown=3.0,
        transfers_failed_ratio=0.2,
        leases_expired_ratio=0.1,
        read_after_expiry=8.0,
        prompts_computed_ratio=0.9,
    ),
    throughput=ThroughputSignals(speculates=True, step_output_tokens=1.4, drafts_accepted_usual=2.1),
    host=HostSignals(
        memory_used_ratio=0.95, restarts_recent=4.0, last_termination_reason="OOMKilled", last_exit_code=137.0
    ),
)

TIERS = (  # each for conditions that exclude one another
    TierSignals(tier_refused=9.0, load_seconds_per_token=2e-4, tier_gpus=1.0, prefill_seconds_per_token=1e-4),
    TierSignals(tier_reloaded_ratio=0.1, tier_turnover_seconds=9.0, tier_refused=0.0),
    TierSignals(tier_served=False, tier_stored_ratio=3.0),
)


def beside(s: Signals, held: bool | None = None, ahead: bool | None = None, t: Thresholds = T) -> Mapping[str, Found]:
    """The conditions of an engine whose metrics are fresh."""
    view = View(s, Recent(()), t, 9, 0.9)
    view.held, view.ahead, view.answer = held, ahead, Answer("unknown", Grade.GUESS, FROZEN_ROWS[0])
    values = Values(view)
    values["page_fresh"] = True
    return Gathered(values, NAMES)


def test_page_and_json_show_each_with_its_numbers() -> None:
    shown = [beside(replace(SIGNALS, tier=tier), True, True) for tier in TIERS]
    holding = {
        name: next((one[name] for one in shown if one[name].value), one)
        for name, one in shown[0].items()
        if name != OWN_LINE
    }
    assert {name for name, one in holding.items() if one.value is not True} == set(), "SIGNALS makes each true"
    answer = replace(full_engine().diagnosis, conditions=dict.fromkeys(holding, True), beside=holding)
    state = State(time=NOW, engines=(replace(full_engine(), diagnosis=answer),))
    html, document = render_page(state, "node-1", ViewContext()), diagnosis_document(state, "node-1")
    assert document["engines"][0]["condition_texts"] == {name: one.text for name, one in holding.items()}
    for name, one in holding.items():
        assert re.search(r"\d", one.text), name
        assert "unknown" not in one.text
        assert html.count(escape(one.text)) == 1, "among what is also true, and not again among the others"
