"""What the arguments say about the queue: adapters, and KV blocks that come from other servers or go to them."""

from __future__ import annotations

import json

import pytest

from kvpressure.engines.vllm import limits
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.engines.vllm.command_line import read
from kvpressure.model import readings as r
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.readings import Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.scrape.scanner import parse_scrape

OF_PEERS = "--kv-transfer-config.kv_connector=P2pNcclConnector"


@pytest.mark.parametrize(
    ("argv", "lora", "role"),
    [
        (("--enable-lora",), True, None),
        (("--enable-lora=False",), False, None),
        (("--no-enable-lora",), False, None),
        ((), False, None),
        (("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'), False, "kv_consumer"),
        (("--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role" : "kv_both"}'), False, "kv_both"),
        ((OF_PEERS, "--kv-transfer-config.kv_role", "kv_producer"), False, "kv_producer"),
        ((OF_PEERS,), False, ""),
        (("--kv-transfer-config", "$(CONFIG)"), False, ""),
    ],
)
def test_adapters_and_kv_transfer_by_the_arguments(argv, lora, role):
    args = read(argv, {}).args
    assert (limits.takes_lora(args), limits.kv_role(args)) == (lora, role)
    beside = "LMCache" in "".join(argv) and role == "kv_both"
    assert limits.waits_for_blocks(args) is (role is not None and not beside)


def test_kv_transfer_by_the_logged_arguments():
    line = (
        "non-default args: {'model': 'm', 'enable_lora': True, 'kv_transfer_config':"
        " KVTransferConfig(kv_connector='NixlConnector', engine_id=None, kv_role='kv_producer', kv_rank=None)}"
    )
    args = from_log(line) or EngineArgs()
    assert (limits.takes_lora(args), limits.kv_role(args)) == (True, "kv_producer")


NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
TIER = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",'
    ' "kv_connector_extra_config": {"cpu_bytes_to_use": 9}}'
)


@pytest.mark.parametrize(
    ("inner", "role", "has_peer", "tier"),
    [
        (f"{TIER}, {NIXL}", "kv_consumer", True, 9.0),
        ('{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}, ' + TIER, "kv_both", False, 9.0),
        ("", "kv_both", None, None),
    ],
    ids=["a tier before the peer", "two tiers", "not visible"],
)
@pytest.mark.parametrize("form", ["JSON", "log"])
def test_of_several_connectors_the_one_with_a_peer_makes_the_role(inner, role, has_peer, tier, form):
    several = f'{{"connectors": [{inner}]}}'
    argv = f'{{"kv_connector_extra_config": {several}, "kv_connector": "MultiConnector", "kv_role": "kv_both"}}'
    printed = (
        "non-default args: {'model': 'm', 'kv_transfer_config': KVTransferConfig(kv_connector="
        f"'MultiConnector', kv_rank=None, kv_role='kv_both', kv_connector_extra_config={json.loads(several)})}}"
    )
    args = read(("--kv-transfer-config", argv), {}).args if form == "JSON" else from_log(printed) or EngineArgs()
    features = limits.features(args, None, ())
    assert (features.kv_role, features.has_peer, features.waits_for_blocks) == (role, has_peer, True)
    assert limits.tier(args, None).size == tier


# --- what only the page tells ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapters", "served"),
    [
        ("", False),
        ('vllm:lora_requests_info{max_lora="1",running_lora_adapters="a",waiting_lora_adapters=""} 17e8\n', True),
    ],
)
def test_a_page_tells_whether_adapters_are_served_where_arguments_are_not_visible(adapters: str, served: bool) -> None:
    """Of a queue behind adapters an old server does not say whether it waits for KV blocks."""
    text = (
        'vllm:num_requests_running{model_name="m",engine="0"} 8\n'
        'vllm:num_requests_waiting{model_name="m",engine="0"} 40\n' + adapters
    )
    pipeline = Pipeline()
    for second in range(10):
        page = parse_scrape(text, target="http://a:8000/metrics", time=1.0 + second, pod="p")
        assert page.cut == {}
        (engine,) = pipeline.observe(Snapshot(1.0 + second, pages=(page,))).engines
    assert engine.signals.load.lora is served
    assert engine.diagnosis.evidence["queue_for_capacity"].value is (None if served else True)


def test_adapters_that_come_and_go_are_no_collision() -> None:
    line = 'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{}",waiting_lora_adapters=""}} {}\n'
    running = 'vllm:num_requests_running{model_name="m",engine="0"} 8\n'
    page = parse_scrape(running + line.format("a", 5) + line.format("a,b", 9), target="", time=1.0)
    assert (page.cut, page.page) == ({}, {r.LORA_MOMENT: 9.0})
