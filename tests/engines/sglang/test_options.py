"""Each option of SGLang's server that a limit, the KV pool or the meaning of a reading depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.engines.base import Known, Pool
from kvpressure.engines.sglang import arguments
from kvpressure.engines.sglang.dialect import SGLANG
from kvpressure.model import readings as r
from kvpressure.model.arguments import GIB, EngineArgs
from kvpressure.model.readings import EngineReading, GpuReading, Scrape, Snapshot
from kvpressure.model.state import EngineState, Limit
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.scrape.scanner import parse_scrape


def started(*words: str) -> EngineArgs:
    return arguments.read(["python3", "-m", "sglang.launch_server", "--model-path", "m", *words]).args


def limits(*words: str, **more: object) -> dict[str, Limit]:
    return dict(SGLANG.limits(replace(Known(started(*words)), **more)))  # type: ignore[arg-type]  # fields of Known


def page(**gauges: float) -> EngineReading:
    return EngineReading("m", "0", gauges=gauges, dialect="sglang")


def gpu(gib: float) -> GpuReading:
    return GpuReading("GPU-0", 0, "nvidia", "H100", memory_total_bytes=int(gib * GIB))


def seen(text: str, *words: str) -> EngineState:
    argv = ("python3", "-m", "sglang.launch_server", *words)
    scrape: Scrape = parse_scrape(text, target="http://a:30000/metrics", time=1.0, pod="p", args=argv, dialect="sglang")
    return Pipeline().observe(Snapshot(1.0, pages=(scrape,))).engines[0]


# --- limits --------------------------------------------------------------------------------------------------------


def test_without_chunks_there_is_no_budget_and_prompts_are_whole() -> None:
    assert "max_num_batched_tokens" not in limits("--chunked-prefill-size", "-1", version="0.5.9", gpu=gpu(80))
    assert SGLANG.features(started("--chunked-prefill-size", "-1"), None, ()).whole_prompts
    assert not SGLANG.features(started("--chunked-prefill-size", "4096"), None, ()).whole_prompts


def test_max_running_requests_is_the_limit_of_the_batch_unless_the_log_of_the_start_says_another() -> None:
    assert limits("--max-running-requests", "48")["max_num_seqs"] == Limit("max_num_seqs", 48.0, True, "args")
    found = limits("--max-running-requests", "4096", facts={"max_num_seqs": 33.0})
    assert found["max_num_seqs"] == Limit("max_num_seqs", 33.0, True, "log")


def test_mem_fraction_static_is_read_and_bounds_no_device_memory() -> None:
    args = started("--mem-fraction-static", "0.85")
    assert args.gpu_memory_utilization == 0.85
    assert "gpu_memory_utilization" not in SGLANG.limits(Known(args))
    assert SGLANG.flag("gpu_memory_utilization") == "--mem-fraction-static"


# --- parallel sizes ------------------------------------------------------------------------------------------------


def test_ranks_of_data_parallel_attention_share_the_limits_and_others_have_their_own() -> None:
    words = ("--dp-size", "4", "--max-running-requests", "128", "--chunked-prefill-size", "8192")
    shared = limits(*words, "--enable-dp-attention")
    assert (shared["max_num_seqs"].value, shared["max_num_batched_tokens"].value) == (32.0, 2048.0)
    assert limits(*words)["max_num_seqs"].value == 128.0


# --- defaults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "gib", "tokens"),
    [
        ("0.4.9", 24, 2048.0),
        ("0.4.9", 80, 8192.0),
        ("0.5.9", 24, 2048.0),
        ("0.5.9", 48, 4096.0),
        ("0.5.9", 80, 8192.0),
        ("0.5.9", 192, 16384.0),
        ("0.5.2", 80, None),
        (None, 80, None),
    ],
)
def test_the_default_budget_depends_on_release_and_memory(
    version: str | None, gib: float, tokens: float | None
) -> None:
    found = limits(version=version, gpu=gpu(gib)).get("max_num_batched_tokens")
    assert found == (None if tokens is None else Limit("max_num_batched_tokens", tokens, False, "default"))


@pytest.mark.parametrize(
    ("words", "gauges", "seqs"),
    [
        ((), {r.KV_CAPACITY: 3000.0}, 1500.0),  # half the tokens
        ((), {r.KV_CAPACITY: 1e6}, None),  # the slots depend on the context limit
        ((), {r.KV_CAPACITY: 1e6, "context_length": 131072.0}, 3906.0),  # 512 for each request of full length
        ((), {r.KV_CAPACITY: 1e6, "context_length": 1e6}, 2048.0),
        (("--context-length", "8192"), {r.KV_CAPACITY: 1e6}, 4096.0),
        (("--max-total-tokens", "2000"), {}, 1000.0),
        (("--speculative-algorithm", "EAGLE"), {}, 48.0),
        ((), {}, None),
    ],
)
def test_the_default_batch_follows_from_the_pool(
    words: tuple[str, ...], gauges: dict[str, float], seqs: float | None
) -> None:
    found = limits(*words, reading=page(**gauges)).get("max_num_seqs")
    assert found == (None if seqs is None else Limit("max_num_seqs", seqs, False, "default"))


# --- the pool ------------------------------------------------------------------------------------------------------


def test_max_total_tokens_is_the_pool_where_the_page_does_not_count_it() -> None:
    args = started("--max-total-tokens", "100003", "--page-size", "64", "--kv-cache-dtype", "fp8_e5m2")
    assert SGLANG.pool(args, page(), 1) == Pool(blocks=99968, block_size=1, dtype="fp8_e5m2")
    assert SGLANG.pool(args, page(**{r.KV_CAPACITY: 5000.0}), 1) == Pool(blocks=5000, block_size=1, dtype="fp8_e5m2")
    assert SGLANG.pool(started(), page(), 1) == Pool()


def test_the_pool_of_a_known_model_has_bytes_without_a_start_up_log() -> None:
    text = 'sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="0"} 1\n'
    model = ("--model-path", "meta-llama/Llama-3.1-8B-Instruct")
    signals = seen(text, *model, "--max-total-tokens", "100000", "--tp", "2").signals
    assert signals.kv.kv_capacity_tokens == 100_000.0
    assert signals.memory.kv_pool_bytes == 100_000 * 131_072 / 2  # 32 layers, 8 heads of 128, 16 bits, two GPUs
    unknown = seen(text, *model).signals
    assert (unknown.kv.kv_capacity_tokens, unknown.memory.kv_pool_bytes) == (None, None)


# --- what of it is switched on -------------------------------------------------------------------------------------


def test_lora_and_halves_of_a_pair_are_features() -> None:
    assert SGLANG.features(started("--lora-paths", "a=/a", "b=/b"), None, ()).lora
    prefill = SGLANG.features(started("--disaggregation-mode", "prefill"), None, ())
    assert (prefill.kv_role, prefill.waits_for_blocks) == ("kv_producer", True)
    assert SGLANG.features(started(), "decode", ()).kv_role == "kv_consumer"


def test_there_are_metrics_only_on_demand_or_where_a_file_or_a_variable_may_ask_for_them() -> None:
    assert not SGLANG.endpoints(started()).metrics
    for words in ("--enable-metrics", "--enable-metrics-for-all-schedulers", "--config server.yaml", "$(MORE)"):
        assert SGLANG.endpoints(started(*words.split())).metrics, words
