"""KV events through the real process: who holds the cache, and what it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from lab import kv_events

from kvpressure.kvevents.holders import TOP
from kvpressure.model.readings import KV_AGAIN, CacheReading, Snapshot
from kvpressure.model.signals import CacheSignals
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.format import tick_from_json, tick_to_json
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.e2e.test_golden_pages import scenario
from tests.e2e.test_process import exporter, in_order, scrape
from tests.helpers.kv_publisher import Publisher
from tests.helpers.serve_process import LISTEN, QUIET, Process
from tests.helpers.waiting import until

pytestmark = pytest.mark.live
HELD = re.compile(r'kvpressure_kv_held_ratio\{.*by="(\w+)",engine="0",holder="([^"]+)".*\} (\S+)')


def stored(first: int, count: int, adapter: str | None, salt: str | None) -> dict[str, object]:
    keys = [[key for key in (adapter, salt) if key], *[None] * (count - 1)]
    return {
        "type": "BlockStored",
        "block_hashes": [block * 0x9E3779B97F4A7C15 % 2**64 for block in range(first, first + count)],
        "parent_block_hash": None,
        "token_ids": [424242] * 16 * count,
        "block_size": 16,
        "medium": "GPU",
        "lora_name": adapter,
        "extra_keys": keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_who_holds_the_cache_is_published_shown_and_never_who_it_is() -> None:
    with in_order(scenario("kv_pressure")[-4:]) as (url, _), Publisher() as publisher:
        publisher.send(stored(1, 600, "legal", "tenant-a"), stored(601, 400, None, "tenant-b"))
        events = f"kv-events=tcp://127.0.0.1:{publisher.port},tcp://127.0.0.1:{publisher.replay_port}"
        with exporter(f"inference/vllm-0={url};{events}") as address:
            held = until(lambda: {(by, who): float(share) for by, who, share in HELD.findall(scrape(address))})
            assert held["adapter", "legal"] == pytest.approx(0.6)
            assert held["adapter", "(none)"] == pytest.approx(0.4)
            assert sorted(share for (by, _), share in held.items() if by == "salt") == pytest.approx([0.4, 0.6])
            assert 'reason=""} 1.0' in scrape(address)
            page = urllib.request.urlopen(address + "/", timeout=5).read().decode()
            document = urllib.request.urlopen(address + "/api/v1/diagnosis", timeout=5).read().decode()
    (engine,) = json.loads(document)["engines"]
    assert engine["signals"]["held_by_adapter:legal"] == pytest.approx(0.6)
    assert "Adapter legal holds 60 % of the prefix cache; (none) 40 %." in page
    for secret in ("tenant-a", "424242", str(0x9E3779B97F4A7C15)):
        assert secret not in page + document


@pytest.mark.slow
def test_a_busy_engine_takes_little_memory() -> None:
    with in_order(scenario("kv_pressure")[-4:]) as (url, _), Publisher() as publisher:
        target = f"inference/vllm-0={url};kv-events=tcp://127.0.0.1:{publisher.port}"
        process = Process(*LISTEN, *QUIET, "--node-name", "n", "--engine.target", target)
        try:
            publisher.wait()
            before = process.memory_mib()
            for payload in kv_events.batches(10_000, 20.0, time.time() - 20.0, tenants=10_000):
                publisher.send_raw(payload, kept=False)
                time.sleep(0.001)
            held = until(lambda: {(by, who): float(share) for by, who, share in HELD.findall(process.scrape())})
            assert len(held) <= TOP + 2
            assert process.memory_mib("VmHWM") - before < 12
        finally:
            process.stop()


def test_what_events_added_up_to_is_recorded_so_that_an_incident_is_judged_again() -> None:
    pages, live, again = scenario("kv_pressure"), Pipeline(), Pipeline()
    for second, text in enumerate(pages[-4:]):
        now = 1000.0 + second
        page = parse_scrape(text, target="t", time=now, namespace="inference", pod="vllm-0", keep_text=True)
        cache = CacheReading("t", "0", now, "", {"legal": 0.7, "(none)": 0.3}, {}, 16_000, {KV_AGAIN: 160.0 * second})
        other = CacheReading("t", "7", now, "late")
        snapshot = Snapshot(now, pages=(page,), caches=(cache, other))
        state = live.observe(snapshot)
        replayed = again.observe(tick_from_json(tick_to_json(snapshot).encode(), parse_scrape))
    (engine,) = state.engines
    assert engine.signals.cache == CacheSignals({"legal": 0.7, "(none)": 0.3}, {}, {"": 1})
    assert engine.reading.counters[KV_AGAIN] == 480.0
    assert [engine.signals.flat(), engine.diagnosis.verdict] == [
        replayed.engines[0].signals.flat(),
        replayed.engines[0].diagnosis.verdict,
    ]
    (engine,) = live.observe(Snapshot(1060.0, pages=(replace(page, time=1060.0),))).engines
    assert engine.signals.cache == CacheSignals()  # never stale


def test_without_an_endpoint_nothing_is_imported_and_with_one_a_missing_library_is_named() -> None:
    code = (
        "from tests.sources.scrape.test_source import *;"
        "given = USUAL | {'engine_targets': (parse_target(sys.argv[1]),), 'collectors': EVERY_SECOND};"
        "source = EngineSource(Settings(**given));"
        "readings = [source.read() for _ in range(2)]; print([one.reason for one in readings[-1].caches]);"
        "print(*({'msgspec', 'kvpressure.sources.kvevents.subscription'} & {*sys.modules}))"
    )
    with in_order(scenario("kv_pressure")[-4:]) as (url, _):
        for hidden, more, expected in (
            ("", "", ["[]", ""]),
            ("sys.modules['msgspec'] = None;", ";kv-events=tcp://127.0.0.1:5557", ["['not_installed']", "msgspec"]),
        ):
            command = [sys.executable, "-c", f"import sys; {hidden}{code}", f"inference/vllm-0={url}{more}"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert result.stdout.splitlines() == expected
