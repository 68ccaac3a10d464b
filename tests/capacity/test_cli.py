"""``kvpressure capacity`` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpressure.capacity.models import CONFIGS
from kvpressure.cli import main

RECORDINGS = Path(__file__).parent.parent / "fixtures" / "recordings"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["capacity", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    got, out, err = run(capsys, *arguments, "--format", "json")
    assert (got, err) == (status, "")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_help_shows_examples() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpressure", "capacity", "--help"], capture_output=True, text=True, check=True
    )
    assert "kvpressure capacity llama-3.1-70b --tp 4" in done.stdout
    assert "--worksheet" in done.stdout
    assert all(name in done.stdout for name in CONFIGS)


def test_bytes_per_token_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "llama-3.1-70b", "--tp", 4)
    assert status == 0
    assert "KV bytes per token on each GPU: 81 920" in out
    assert "640.00 MiB" in out
    found = as_json(capsys, "llama-3.1-70b", "--tp", 4)
    assert found["kv_bytes_per_token_per_gpu"] == 81_920
    assert {"tokens": 8192, "blocks": 512, "bytes_per_gpu": 671_088_640} in found["requests"]
    assert "fits" not in found


def test_every_option_that_changes_the_layout_counts(capsys: pytest.CaptureFixture[str]) -> None:
    def per_token(*arguments: object) -> float:
        value: float = as_json(capsys, *arguments)["kv_bytes_per_token_per_gpu"]
        return value

    assert per_token("deepseek-v3", "--draft-layers", 1) == 71_424
    assert per_token("deepseek-v3.2", "--tp", 8, "--kv-cache-dtype", "fp8_ds_mla") == 48_068
    assert per_token("deepseek-v3", "--tp", 8, "--dcp", 8) == 8_784
    assert per_token("llama-2-70b", "--tp", 2, "--pp", 4) == 40_960
    assert per_token("gemma-3-27b", "--disable-hybrid-kv-cache-manager") == 507_904
    assert as_json(capsys, "llama-3-8b", "--block-size", 32)["block_bytes_per_gpu"] == 32 * 131_072


def test_a_hybrid_model_says_that_it_is_not_linear(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "gemma-3-27b", "--context", 8192)
    assert "not linear" in out
    assert "1.10 GiB" in out
    assert as_json(capsys, "gemma-3-27b")["linear"] is False


def test_each_number_of_requests_says_for_which_utilization(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--prompt", "p50=1000,p95=4000,p100=9000", "--output", 500, "--concurrency", 40)
    _, out, _ = run(capsys, "llama-3.1-8b", "--gpu-memory", "80GB", *load)
    assert "capacity at gpu_memory_utilization 0.92: 162 concurrent requests of this load; required: 40" in out
    assert "requests of this load that fit 99 % of the time at gpu_memory_utilization 0.6" in out


def test_without_a_load_nothing_is_said_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "llama-3.1-8b", "--gpu-memory", "80GB")
    assert out.splitlines()[-1] == "the server can start"


def test_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys,
        "llama-3.1-8b",
        "--gpu-memory",
        "80GiB",
        "--max-model-len",
        8192,
        "--prompt",
        1500,
        "--output",
        500,
        "--concurrency",
        100,
    )
    assert found["fits"] is True
    assert found["problems"] == []
    assert found["capacity"]["requests"] >= 100
    assert found["recommended"]["gpu_memory_utilization"]["value"] == 0.7
    memory = found["memory"]
    assert (
        memory["total_bytes"]
        == sum(
            memory[name]["bytes"]
            for name in ("weights", "activations", "graphs", "non_torch", "pool", "context", "allocator")
        )
        + memory["outside_bytes"]
    )
    status, out, _ = run(
        capsys, "llama-3.1-8b", "--gpu-memory", "80GiB", "--prompt", "p50=1000,p95=4000", "--output", 500
    )
    assert status == 0
    assert "--gpu-memory-utilization" in out
    assert "\nfits\n" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("llama-3.1-70b", "--gpu-memory", "80GiB"), "no memory is left"),
        (("llama-3.1-8b", "--gpu-memory", "24GiB"), "one request of max_model_len 131072 does not fit"),
        (
            (
                "llama-3.1-8b",
                "--gpu-memory",
                "24GiB",
                "--max-model-len",
                "8192",
                "--context",
                "8192",
                "--concurrency",
                "50",
            ),
            "50 requests of 8192 tokens do not fit at once; 5 do",
        ),
        (
            (
                "llama-3.1-8b",
                "--gpu-memory",
                "24GiB",
                "--max-model-len",
                "8192",
                "--prompt",
                "4000",
                "--output",
                "1000",
                "--concurrency",
                "50",
            ),
            "50 requests of this load do not fit at once",
        ),
    ],
)
def test_it_does_not_fit(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str) -> None:
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert f"does not fit: {problem}" in out
    assert as_json(capsys, *arguments, status=1)["fits"] is False


def test_what_is_short_has_the_unit_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "llama-3.1-8b", "--gpu-memory", "16GiB", "--prompt", 100, "--output", 100)
    assert re.search(r"KV pool +-2\.\d+ GiB", out)
    assert re.search(r"no memory is left for the KV cache: 2\.\d GiB short", out)
    assert not re.search(r"\bGB\b", out)


def test_a_worksheet_that_fits_nothing_has_no_negative_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--gpu-memory", "80GB", "--context", "8192", "--concurrency", "10")
    status, out, _ = run(capsys, "llama_70b", "--worksheet", *sizes)
    assert status == 1
    assert re.search(r"GB on one GPU:\n(?:.*\n)*  most concurrent requests +0\n", out)
    assert "no memory is left for KV." in out


def test_no_plan_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "llama-3.1-70b", "--gpu-memory", "80GiB", "--prompt", 100, "--output", 100)
    assert status == 1
    assert "more GPUs" in out
    assert (
        as_json(capsys, "llama-3.1-70b", "--gpu-memory", "80GiB", "--prompt", 100, "--output", 100, status=1)[
            "recommended"
        ]
        is None
    )


def test_measured_parts_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys,
        "llama-3.1-8b",
        "--gpu-memory",
        "80GB",
        "--max-model-len",
        8192,
        "--gpu-memory-utilization",
        0.5,
        "--weights",
        "10GB",
        "--activations",
        "1GB",
        "--cuda-graphs",
        "2GB",
        "--non-torch",
        "3GB",
        "--cuda-context",
        "4GB",
        "--allocator-overhead",
        "5GB",
    )
    assert found["memory"]["pool"]["bytes"] == 24_000_000_000
    assert found["memory"]["outside_bytes"] == 31_000_000_000
    assert found["memory"]["weights"]["origin"] == "given"
    eager = as_json(capsys, "llama-3.1-8b", "--gpu-memory", "80GB", "--max-model-len", 8192, "--enforce-eager")
    assert eager["memory"]["graphs"]["bytes"] == 0
    assert (
        as_json(capsys, "llama-3.1-8b", "--gpu-memory", "80GB", "--max-model-len", 8192, "--kv-cache-memory", "2GiB")[
            "memory"
        ]["pool"]["bytes"]
        == 2**31
    )


def test_too_little_beside_the_request_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "llama-3.1-8b", "--gpu-memory", "24GiB", "--max-model-len", 8192)
    assert found["fits"] is True
    assert "CUDA context and allocator overhead" in found["warnings"][0]
    assert as_json(capsys, "llama-3.1-8b", "--gpu-memory", "80GiB", "--max-model-len", 8192)["warnings"] == []


def test_a_models_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS["llama-3-8b"])))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 4096)
    found = as_json(capsys, tmp_path, "--gpu-memory", "80GiB", "--draft-layers", 1)
    assert found["model"] == tmp_path.name
    assert found["memory"]["weights"] == {"bytes": 4096, "origin": "measured"}
    assert found["kv_bytes_per_token_per_gpu"] == 33 * 4096


def test_without_the_longest_request_no_context_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("llama-3.1-8b", "--gpu-memory", "80GB", "--prompt", "p50=400,p95=960", "--output", "200")
    assert as_json(capsys, *load)["recommended"]["max_model_len"]["value"] is None
    _, out, _ = run(capsys, *load)
    assert re.search(r"--max-model-len +unknown +lengths are known up to p95 only", out)


def test_traffic_from_a_recording_and_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = as_json(
        capsys, "llama-3.1-8b", "--gpu-memory", "80GiB", "--traffic", RECORDINGS / "vllm-cpu" / "c_steady.jsonl.gz"
    )
    assert found["needed_concurrency"] > 0
    assert found["recommended"]["max_num_seqs"]["value"] >= found["needed_concurrency"]
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,input_tokens,output_tokens\n0,1000,100\n1,3000,300\n")
    found = as_json(capsys, "llama-3.1-8b", "--gpu-memory", "80GiB", "--traffic", trace)
    assert found["needed_concurrency"] is None
    assert found["recommended"]["max_model_len"]["value"] == 5120


def test_the_worksheet_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "llama_70b", "--worksheet", "--gpu-memory", "80GB", "--tp", 4, "--context", 1024)
    assert found["memory_audit"]["available_for_kv_cache"] == 41.5
    assert found["worksheet"]["available_per_gpu"] == 41.0
    status, out, _ = run(
        capsys, "llama_70b", "--worksheet", "--gpu-memory", "80GB", "--tp", 4, "--context", 8192, "--concurrency", 10
    )
    assert status == 1
    assert "51.20" in out
    assert "-10.20" in out
    assert "41.5 GB are left for KV" in out
    assert as_json(capsys, "llama-2-70b", "--worksheet", "--gpu-memory", "80GB", "--tp", 4, "--context", 1024) == found
    _, out, _ = run(capsys, "mine", "--worksheet", "--gpu-memory", "80GB")
    assert "not in the guide" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "'nonsense' is neither a file nor a known model; allowed:"),
        ((), "MODEL"),
        (
            ("llama-3-8b", "--tp", "0"),
            "-size: '0' is not allowed; allowed: a whole number from 1 to 1000000000",
        ),
        (("llama-3-8b", "--tp", "x"), "allowed: a whole number"),
        (("llama-3-8b", "--dcp", "2"), "decode-context parallel 2 is not allowed; allowed: a divisor"),
        (("llama-3-8b", "--pp", "64"), "pipeline parallel 64 is not allowed; allowed: up to the 32 layers"),
        (("llama-3-8b", "--kv-cache-dtype", "int2"), "cache dtype 'int2' is not allowed; allowed: auto"),
        (
            ("llama-3-8b", "--gpu-memory", "80 bananas"),
            "--gpu-memory: '80 bananas' is not allowed; allowed: a size with its unit, e.g. 80GiB",
        ),
        (
            ("llama-3-8b", "--gpu-memory", "80"),
            "'80' is not allowed; allowed: a size with its unit, e.g. 80GiB or 80GB",
        ),
        (("llama-3-8b", "--gpu-memory", "0"), "allowed: a size"),
        (
            ("llama-3-8b", "--gpu-memory", "80GB", "--concurrency", "5"),
            "--concurrency also needs the lengths of the requests; give --traffic",
        ),
        (("llama-3-8b", "--gpu-memory-utilization", "1.5"), "allowed: above 0 and up to 1"),
        (("llama-3-8b", "--concurrency", "5"), "--concurrency: needs --gpu-memory"),
        (("llama-3-8b", "--prompt", "5"), "--prompt and --output: only one was given"),
        (
            ("llama-3-8b", "--prompt", "5", "--output", "x", "--gpu-memory", "80GB"),
            "--output: 'x' is not allowed; allowed",
        ),
        (("llama-3-8b", "--prompt", "5", "--output", "5"), "--prompt: needs --gpu-memory"),
        (("llama-3-8b", "--prompt", "5", "--output", "5", "--traffic", "x"), "--traffic cannot be combined with"),
        (("llama-3-8b", "--traffic", "/nonexistent", "--gpu-memory", "80GB"), "/nonexistent: No such file"),
        (("llama_70b", "--worksheet"), "--worksheet: needs --gpu-memory"),
        (
            ("llama-3-8b", "--thresholds", "/nonexistent", "--gpu-memory", "80GB", "--prompt", "5", "--output", "5"),
            "/nonexistent",
        ),
        (("llama-3-8b", "--bogus"), "--bogus"),
        (("llama_7b", "--worksheet", "--gpu-memory", "80GB", "--prompt", "5"), "--prompt: not with --worksheet"),
        (
            ("llama_7b", "--worksheet", "--gpu-memory", "80GB", "--context", "5", "--context", "6"),
            "--context: not with --worksheet",
        ),
        (
            ("llama_7b", "--worksheet", "--gpu-memory", "80GB", "--enforce-eager"),
            "--enforce-eager: not with --worksheet",
        ),
        (
            ("llama-3-8b", "--gpu-memory", "80GB", "--prompt", "0", "--output", "0"),
            "--prompt and --output: no tokens in it",
        ),
        (("llama-3-8b", "--draft-layers", "1000000000"), "draft layers 1000000000 is not allowed; allowed: up to 2048"),
        (("llama-3-8b", "--weights", "5GB"), "--weights: needs --gpu-memory"),
        (("llama-3-8b", "--cuda-graphs", "0"), "--cuda-graphs: needs --gpu-memory"),
        (("llama-3-8b", "--max-num-seqs", "5"), "--max-num-seqs: needs --gpu-memory"),
        (("llama-3-8b", "--enforce-eager"), "--enforce-eager: needs --gpu-memory"),
        (
            ("llama-3-8b", "--gpu-memory", "80GB", "--max-num-seqs", "200", "--max-num-batched-tokens", "100"),
            "200 is above max_num_batched_tokens 100",
        ),
        (("llama-3-8b", "--thresholds", "/nonexistent"), "/nonexistent"),
        (("llama_70b", "--worksheet", "--gpu-memory", "80GB", "--thresholds", "/nonexistent"), "/nonexistent"),
        (("llama-3-8b", "--tp", "3"), "tensor parallel 3: llama-3-8b has 32 attention heads; allowed: a divisor of 32"),
        (("llama-3-8b", "--tp", "64"), "tensor parallel 64: llama-3-8b has 32 attention heads"),
        (
            ("qwen2.5-7b", "--tp", "7"),
            "tensor parallel 7: qwen2.5-7b has 4 KV heads; allowed: a divisor or a multiple of 4",
        ),
        (("deepseek-v3", "--tp", "3"), "tensor parallel 3: deepseek-v3 has 128 attention heads"),
        (
            ("llama-3-8b", "--tp", "8", "--dcp", "2"),
            "decode-context parallel 2: llama-3-8b has 8 KV heads, of which tensor parallel 8 keeps copies: 1",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvpressure capacity: ")
    assert message in err


def test_a_config_without_a_size_of_weights_asks_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}))
    status, _, err = run(capsys, config, "--gpu-memory", "80GiB")
    assert status == 2
    assert "give --weights" in err
    assert run(capsys, config, "--gpu-memory", "80GiB", "--weights", "1GiB")[0] == 0


def test_parts_of_memory_may_be_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", "--cuda-graphs", "0", "--allocator-overhead", "0GiB")
    assert found["memory"]["graphs"] == found["memory"]["allocator"] == {"bytes": 0, "origin": "given"}


def test_a_smaller_token_budget_bounds_the_default_of_max_num_seqs(capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM does it where nobody set max_num_seqs."""
    found = as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", "--max-num-batched-tokens", "100")
    assert (found["limits"]["max_num_seqs"], found["limits"]["max_num_batched_tokens"]) == (100, 100)


def test_a_pool_larger_than_the_gpu_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", "--kv-cache-memory", "100GB", status=1)
    assert "the GPU does not have enough memory" in found["problems"][0]
    assert found["warnings"] == []


@pytest.mark.parametrize("more", [("--context", "100000"), ("--prompt", "100000", "--output", "5")])
def test_requests_beyond_the_context_are_told(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    warnings = as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", *more)["warnings"]
    assert any("are longer than max_model_len 8192" in warning for warning in warnings)


def test_a_context_above_the_models_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", "--max-model-len", "100000")["warnings"]
    assert any("above the 8192 of the model's configuration" in warning for warning in warnings)
    assert as_json(capsys, "llama-3-8b", "--gpu-memory", "80GB", "--max-model-len", "8192")["warnings"] == []


def test_a_quantized_model_is_given_its_own_weights_or_asked_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu-memory", "48GiB", "--max-model-len", "32768"]
    assert main(["capacity", "Qwen/Qwen3-32B-FP8", *asked]) == 0
    said = capsys.readouterr().out
    assert re.search(r"weights +31\.\d\d GiB  estimate", said)
    assert "the server can start" in said
    assert main(["capacity", "Qwen/Qwen3-32B", *asked]) == 1
    capsys.readouterr()
    assert main(["capacity", "someone/Qwen3-32B-GPTQ", *asked]) == 2
    assert "the size of the weights is unknown; give --weights" in capsys.readouterr().err
