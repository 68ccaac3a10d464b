"""What the arguments say about the queue: adapters, and KV blocks that come from other servers or go to them."""

from __future__ import annotations

import pytest

from kvpressure.engines.vllm import limits
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.engines.vllm.command_line import parse
from kvpressure.model.arguments import EngineArgs


@pytest.mark.parametrize(
    ("argv", "lora", "role"),
    [
        (("--enable-lora",), True, None),
        (("--enable-lora=False",), False, None),
        (("--no-enable-lora",), False, None),
        ((), False, None),
        (("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'), False, "kv_consumer"),
        (("--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role" : "kv_both"}'), False, "kv_both"),
        (
            ("--kv-transfer-config.kv_role", "kv_producer", "--kv-transfer-config.kv_connector=P2pNcclConnector"),
            False,
            "kv_producer",
        ),
        (("--kv-transfer-config.kv_connector=P2pNcclConnector",), False, ""),
        (("--kv-transfer-config", "$(CONFIG)"), False, ""),
    ],
)
def test_adapters_and_kv_transfer_by_the_arguments(argv, lora, role):
    args = parse(argv, {})
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
