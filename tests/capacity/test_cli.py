"""``kvpressure capacity`` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpressure.capacity.models import CONFIGS
from tests.helpers.command import Capsys, answer, refused, run

RECORDINGS = Path(__file__).parent.parent / "fixtures" / "recordings"


def as_json(capsys: Capsys, typed: str, *more: object, status: int = 0) -> dict[str, Any]:
    got, document = answer(capsys, f"capacity {typed}", *more)
    assert got == status
    return document


def test_bytes_per_token_of_a_known_model(capsys: Capsys) -> None:
    status, out, _ = run(capsys, "capacity llama-3.1-70b --tp 4")
    assert status == 0
    assert "KV bytes per token on each GPU: 81 920" in out
    found = as_json(capsys, "llama-3.1-70b --tp 4")
    assert found["kv_bytes_per_token_per_gpu"] == 81_920
    assert {"tokens": 8192, "blocks": 512, "bytes_per_gpu": 671_088_640} in found["requests"]
    assert "fits" not in found


@pytest.mark.parametrize(
    ("typed", "size"),
    [
        ("deepseek-v3.2 --tp 8 --kv-cache-dtype fp8_ds_mla", 48_068),
        ("deepseek-v3 --tp 8 --dcp 8", 8_784),
        ("llama-2-70b --tp 2 --pp 4", 40_960),
        ("gemma-3-27b --disable-hybrid-kv-cache-manager", 507_904),
    ],
)
def test_every_option_that_changes_the_layout_counts(capsys: Capsys, typed: str, size: float) -> None:
    assert as_json(capsys, typed)["kv_bytes_per_token_per_gpu"] == size
    assert as_json(capsys, "llama-3-8b --block-size 32")["block_bytes_per_gpu"] == 32 * 131_072


def test_a_hybrid_model_says_that_it_is_not_linear(capsys: Capsys) -> None:
    _, out, _ = run(capsys, "capacity gemma-3-27b --context 8192")
    assert "not linear" in out
    assert "1.10 GiB" in out
    assert as_json(capsys, "gemma-3-27b")["linear"] is False


def test_a_tier_keeps_requests_and_says_what_loading_one_saves(capsys: Capsys) -> None:
    typed = "capacity llama-3.1-70b --tp 4 --context 8192 --tier 64GiB --tier-speed 20GB --prefill-speed 8000"
    (row,) = as_json(capsys, typed.removeprefix("capacity "))["requests"]
    size = 4 * 671_088_640
    assert (row["in_tier"], row["load_seconds"], row["prefill_seconds"]) == (64 * 2**30 // size, size / 20e9, 1.024)
    _, out, _ = run(capsys, typed)
    assert re.search(r"8 192 +640.00 MiB +25 +134 ms +1 s\n\n.*no more of them run at once", out)
    refused(capsys, "capacity llama-3.1-70b --prefill-speed 8000", "--prefill-speed: needs --tier")


def test_it_fits(capsys: Capsys) -> None:
    load = "--prompt 1500 --output 500 --concurrency 100"
    found = as_json(capsys, f"llama-3.1-8b --gpu-memory 80GiB --max-model-len 8192 {load}")
    assert (found["fits"], found["problems"]) == (True, [])
    assert found["capacity"]["requests"] >= 100
    assert found["recommended"]["gpu_memory_utilization"]["value"] == 0.7
    memory = found["memory"]
    parts = ("weights", "activations", "graphs", "non_torch", "pool", "context", "allocator")
    assert memory["total_bytes"] == sum(memory[name]["bytes"] for name in parts) + memory["outside_bytes"]
    status, out, _ = run(capsys, "capacity llama-3.1-8b --gpu-memory 80GiB --prompt p50=1000,p95=4000 --output 500")
    assert status == 0
    assert "--gpu-memory-utilization" in out
    assert "\nfits\n" in out


SMALL = "llama-3.1-8b --gpu-memory 24GiB"


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("llama-3.1-70b --gpu-memory 80GiB", "no memory is left"),
        (SMALL, "one request of max_model_len 131072 does not fit"),
        (f"{SMALL} --max-model-len 8192 --context 8192 --concurrency 50", "50 requests of 8192 tokens do not fit at"),
        (f"{SMALL} --max-model-len 8192 --prompt 4000 --output 1000 --concurrency 50", "50 requests of this load do"),
    ],
)
def test_it_does_not_fit(capsys: Capsys, typed: str, problem: str) -> None:
    status, out, _ = run(capsys, f"capacity {typed}")
    assert status == 1
    assert f"does not fit: {problem}" in out
    assert as_json(capsys, typed, status=1)["fits"] is False


def test_a_worksheet_that_fits_nothing_has_no_negative_requests(capsys: Capsys) -> None:
    status, out, _ = run(capsys, "capacity llama_70b --worksheet --gpu-memory 80GB --context 8192 --concurrency 10")
    assert status == 1
    assert re.search(r"GB on one GPU:\n(?:.*\n)*  most concurrent requests +0\n", out)
    assert "no memory is left for KV." in out


def test_no_plan_says_what_would_help(capsys: Capsys) -> None:
    asked = "llama-3.1-70b --gpu-memory 80GiB --prompt 100 --output 100"
    assert "more GPUs" in run(capsys, f"capacity {asked}")[1]
    assert as_json(capsys, asked, status=1)["recommended"] is None


def test_measured_parts_are_used(capsys: Capsys) -> None:
    gpu = "llama-3.1-8b --gpu-memory 80GB --max-model-len 8192"
    memory = as_json(capsys, f"{gpu} --weights 10GB")["memory"]
    assert memory["weights"] == {"bytes": 10_000_000_000, "origin": "given"}
    assert as_json(capsys, f"{gpu} --enforce-eager")["memory"]["graphs"]["bytes"] == 0
    assert as_json(capsys, f"{gpu} --kv-cache-memory 2GiB")["memory"]["pool"]["bytes"] == 2**31


def test_too_little_beside_the_request_is_a_warning(capsys: Capsys) -> None:
    found = as_json(capsys, "llama-3.1-8b --gpu-memory 24GiB --max-model-len 8192")
    assert found["fits"] is True
    assert "CUDA context and allocator overhead" in found["warnings"][0]
    assert as_json(capsys, "llama-3.1-8b --gpu-memory 80GiB --max-model-len 8192")["warnings"] == []


def test_a_models_directory(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS["llama-3-8b"])))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 4096)
    found = as_json(capsys, "--gpu-memory 80GiB", tmp_path)
    assert found["model"] == tmp_path.name
    assert found["memory"]["weights"] == {"bytes": 4096, "origin": "measured"}
    assert found["kv_bytes_per_token_per_gpu"] == 32 * 4096


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nonsense", "'nonsense' is neither a file nor a known model; allowed:"),
        ("llama-3-8b --tp 0", "-size: '0' is not allowed; allowed: a whole number from 1 to 1000000000"),
        ("llama-3-8b --dcp 2", "decode-context parallel 2 is not allowed; allowed: a divisor"),
        ("llama-3-8b --pp 64", "pipeline parallel 64 is not allowed; allowed: up to the 32 layers"),
        ("llama-3-8b --gpu-memory '80 bananas'", "'80 bananas' is not allowed; allowed: a size with its unit"),
        ("llama-3-8b --gpu-memory 80GB --concurrency 5", "also needs the lengths of the requests; give --context"),
        ("llama-3-8b --gpu-memory-utilization 1.5", "allowed: above 0 and up to 1"),
        ("llama-3-8b --prompt 5", "--prompt and --output: only one was given"),
        ("llama-3-8b --prompt 5 --output x --gpu-memory 80GB", "--output: 'x' is not allowed; allowed"),
        ("llama_70b --worksheet", "--worksheet: needs --gpu-memory"),
        ("llama-3-8b --thresholds /nonexistent --gpu-memory 80GB --prompt 5 --output 5", "/nonexistent"),
        ("llama_7b --worksheet --gpu-memory 80GB --prompt 5", "--prompt: not with --worksheet"),
        ("llama_7b --worksheet --gpu-memory 80GB --enforce-eager", "--enforce-eager: not with --worksheet"),
        ("llama-3-8b --gpu-memory 80GB --prompt 0 --output 0", "--prompt and --output: no tokens in it"),
        (
            "llama-3-8b --gpu-memory 80GB --max-num-seqs 200 --max-num-batched-tokens 100",
            "200 is above max_num_batched_tokens 100",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys: Capsys, typed: str, said: str) -> None:
    assert said in refused(capsys, f"capacity {typed}")


def test_a_config_without_a_size_of_weights_asks_for_it(capsys: Capsys, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}))
    assert "give --weights" in refused(capsys, "capacity --gpu-memory 80GiB", config)
    assert run(capsys, "capacity --gpu-memory 80GiB --weights 1GiB", config)[0] == 0


def test_a_smaller_token_budget_bounds_the_default_of_max_num_seqs(capsys: Capsys) -> None:
    """As vLLM does it where nobody set max_num_seqs."""
    limits = as_json(capsys, "llama-3-8b --gpu-memory 80GB --max-num-batched-tokens 100")["limits"]
    assert (limits["max_num_seqs"], limits["max_num_batched_tokens"]) == (100, 100)


def test_a_pool_larger_than_the_gpu_does_not_fit(capsys: Capsys) -> None:
    found = as_json(capsys, "llama-3-8b --gpu-memory 80GB --kv-cache-memory 100GB", status=1)
    assert "the GPU does not have enough memory" in found["problems"][0]
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("more", "warning"),
    [
        ("--context 100000", "are longer than max_model_len 8192"),
        ("--prompt 100000 --output 5", "are longer than max_model_len 8192"),
        ("--max-model-len 100000", "above the 8192 of the model's configuration"),
    ],
)
def test_what_is_beyond_the_context_is_told(capsys: Capsys, more: str, warning: str) -> None:
    warnings = as_json(capsys, f"llama-3-8b --gpu-memory 80GB {more}")["warnings"]
    assert any(warning in one for one in warnings)


def test_a_quantized_model_is_given_its_own_weights_or_asked_for_them(capsys: Capsys) -> None:
    asked = "--gpu-memory 48GiB --max-model-len 32768"
    status, out, _ = run(capsys, f"capacity Qwen/Qwen3-32B-FP8 {asked}")
    assert status == 0
    assert re.search(r"weights +31\.\d\d GiB  estimate", out)
    assert "the server can start" in out
    assert run(capsys, f"capacity Qwen/Qwen3-32B {asked}")[0] == 1
    said = refused(capsys, f"capacity someone/Qwen3-32B-GPTQ {asked}")
    assert "the size of the weights is unknown; give --weights" in said
