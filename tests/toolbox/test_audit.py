"""``kvpressure audit``: what is deployed against the prevention checklist."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.errors import InputError
from kvpressure.toolbox import manifests
from tests.helpers.command import Capsys, answer, refused, run

LIMITS = "--max-model-len 8192 --max-num-seqs 40 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.6"
GOOD = [*LIMITS.split(), "--override-generation-config", '{"max_new_tokens": 512}']


def deployment(args: list[str] | None = None, kind: str = "Deployment", **container: Any) -> dict[str, Any]:
    server = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.11.2",
        "command": ["vllm", "serve", "meta-llama/Llama-3.1-8B"],
        "args": args or [],
    }
    spec = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "containers": [server | container]}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "chat", "namespace": "inference"},
        "spec": {"template": {"metadata": {"labels": {"app": "vllm"}}, "spec": spec}},
    }


SCRAPED = {"annotations": {"prometheus.io/scrape": "true"}}


def audit(capsys: Capsys, tmp_path: Path, *documents: Any, more: str = "") -> tuple[int, dict[str, Any]]:
    """Exit status and the first server's items by name."""
    file = tmp_path / "deployed.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    status, document = answer(capsys, f"audit {more}", file)
    return status, {item["name"]: item for item in document["servers"][0]["items"]}


def items_of(capsys: Capsys, served: str, more: str = "") -> dict[str, Any]:
    """Items by name of a server that is started by this command line."""
    _, document = answer(capsys, f"audit {more}", f"--args={served}")
    return {item["name"]: item for item in document["servers"][0]["items"]}


def test_defaults_fail_with_the_values_found_and_to_set(capsys: Capsys, tmp_path: Path) -> None:
    status, items = audit(capsys, tmp_path, deployment(), more="--context 3000")
    assert status == 1
    assert items["max_num_seqs_explicit"]["result"] == "fail"
    assert items["max_num_seqs_explicit"]["found"].startswith("1024 (default")
    assert items["gpu_memory_utilization"]["found"].startswith("0.9 (default")
    assert items["gpu_memory_utilization"]["set"] == "--gpu-memory-utilization 0.7"
    assert items["input_limit"]["result"] == "fail"
    assert items["concurrency_from_memory"]["result"] == "fail"
    assert "preempted" in items["concurrency_from_memory"]["why"]
    assert all(item["why"] and item["found"] for item in items.values())


def test_a_well_kept_deployment_passes(capsys: Capsys, tmp_path: Path) -> None:
    document = deployment(GOOD)
    document["spec"]["template"]["metadata"] |= SCRAPED
    status, items = audit(capsys, tmp_path, document, more="--context 3000 --demanding")
    assert status == 0
    seen = {name for name, item in items.items() if item["result"] == "pass"}
    assert {
        *("input_limit", "output_limit", "bounded_streams", "max_num_seqs_explicit", "concurrency_from_memory"),
        *("max_num_batched_tokens_explicit", "gpu_memory_utilization"),
        *("gpu_memory_utilization_demanding", "observe_batch", "prompt_lengths", "memory_targets_documented"),
    } <= seen
    assert items["reviewed"]["result"] == "cannot see"


def test_the_values_it_says_to_set_pass(capsys: Capsys, tmp_path: Path) -> None:
    """Following the advice must lead to an audit without failures."""
    _, items = audit(capsys, tmp_path, deployment(), more="--context 3000")
    flags = [
        item["set"].split(" (")[0].split(";")[0]
        for name, item in items.items()
        if item["result"] == "fail" and item["set"].startswith("--")
    ]
    args = [word for flag in flags for word in flag.split()]
    status, items = audit(capsys, tmp_path, deployment(args), more="--context 3000")
    assert status == 0, {name: item for name, item in items.items() if item["result"] == "fail"}


@pytest.mark.parametrize(
    ("utilization", "demanding", "first", "second"),
    [
        ("0.7", False, "pass", "cannot see"),
        ("0.71", False, "info", "cannot see"),
        ("0.7", True, "pass", "info"),
        ("0.6", True, "pass", "pass"),
        ("0.6", False, "pass", "pass"),
        ("0.61", True, "pass", "info"),
    ],
)
def test_documented_boundaries_of_memory(
    capsys: Capsys, tmp_path: Path, utilization: str, demanding: bool, first: str, second: str
) -> None:
    _, items = audit(
        capsys, tmp_path, deployment(["--gpu-memory-utilization", utilization]), more="--demanding" * demanding
    )
    assert items["gpu_memory_utilization"]["result"] == first
    assert items["gpu_memory_utilization_demanding"]["result"] == second


def test_what_is_not_seen_is_not_judged(capsys: Capsys, tmp_path: Path) -> None:
    hidden = deployment(image="registry.example/vllm:latest", command=["/start.sh"], args=["/start.sh"])
    status, items = audit(capsys, tmp_path, hidden)
    assert status == 2, "nothing to judge is no pass"
    assert items["max_num_seqs_explicit"]["result"] == "cannot see"
    assert items["concurrency_limits_documented"]["found"] == "not visible: max_num_seqs, max_num_batched_tokens"
    assert items["gpu_memory_utilization"]["result"] == "cannot see"


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--max-num-batched-tokens"])
def test_a_value_that_vllm_refuses_is_no_limit(capsys: Capsys, tmp_path: Path, flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    _, items = audit(capsys, tmp_path, deployment([*(arg for arg in GOOD if not arg.startswith(flag)), f"{flag}=abc"]))
    item = items[f"{name}_explicit"]
    assert item["result"] == "fail"
    assert item["found"] == "set to 'abc', which vLLM does not accept"
    assert item["set"].startswith(flag)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("--max-nun-seqs", "--max-num-seqs"), ("--gpu-memory-utilisation", "--gpu-memory-utilization")],
)
def test_a_misspelt_option_is_named(capsys: Capsys, tmp_path: Path, written: str, meant: str) -> None:
    _, items = audit(capsys, tmp_path, deployment([*GOOD, f"{written}=40"]))
    assert items["options_known"]["result"] == "fail"
    assert f"(did you mean {meant}?)" in items["options_known"]["found"]
    said = refused(capsys, "audit", f"--args=vllm serve m {written} 40")
    assert f"is not an option of vLLM; did you mean {meant}?" in said


def test_a_short_option_and_one_without_its_value(capsys: Capsys, tmp_path: Path) -> None:
    _, items = audit(capsys, tmp_path, deployment(["--max-num-seq=40"]))  # a beginning that only one option has
    assert items["max_num_seqs_explicit"]["found"] == "40, set"
    assert "options_known" not in items
    _, items = audit(capsys, tmp_path, deployment(["--max-num-seqs"]))
    assert items["max_num_seqs_explicit"]["found"] == "set without a value"


def test_metrics_switched_off_fail(capsys: Capsys, tmp_path: Path) -> None:
    _, items = audit(capsys, tmp_path, deployment([*GOOD, "--disable-log-stats"]))
    assert {items[name]["result"] for name in ("observe_batch", "observe_latency", "prompt_lengths")} == {"fail"}


def template_of(document: dict[str, Any]) -> Any:
    return document["spec"]["template"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: {"kind": "List", "items": [d]},
        lambda d: {"kind": "DeploymentList", "items": [d, {"kind": "Service"}]},
        lambda d: d | {"kind": "StatefulSet"},
        lambda d: {"kind": "Pod", "spec": template_of(d)["spec"]},
        lambda d: {"kind": "LeaderWorkerSet", "spec": {"leaderWorkerTemplate": {"leaderTemplate": template_of(d)}}},
    ],
)
def test_every_shape_of_document(capsys: Capsys, tmp_path: Path, wrap: Any) -> None:
    status, items = audit(capsys, tmp_path, {"metadata": {"name": "x"}} | wrap(deployment(GOOD)))
    assert status == 0
    assert items["max_num_seqs_explicit"]["found"] == "40, set"


def test_standard_input_and_command_line(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(deployment(GOOD)).encode())))
    status, out, _ = run(capsys, "audit -")
    assert status == 0
    assert "deployment/inference/chat:vllm" in out
    served = "--args=vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64"
    status, out, _ = run(capsys, "audit --vllm-version 0.11.2 --gpu H100:80", served)
    assert status == 1
    shown = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert shown[1:] == ["FAIL"] * 5 + ["info"]
    assert "info gpu-memory-utilization is at most 0.7: 0.9" in out
    assert "but: on a real vLLM, a smaller KV pool meant more preemptions" in out
    counted = re.search(r"5 failed, 1 for information, (\d+) passed, (\d+) cannot be seen", out)
    assert counted
    _, out, _ = run(capsys, "audit --all --vllm-version 0.11.2 --gpu H100:80", served)
    marks = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "][1:]
    assert marks == ["FAIL"] * 5 + ["info"] + ["pass"] * int(counted[1]) + ["?"] * int(counted[2])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"kind: Deployment\n---\nkind: Service\nspec:\n  a: b: c\n", ":5: not valid YAML"),
        (b"a: !!python/object/apply:os.system [id]\n", ":1: not valid YAML"),
        (b"kind: Deployment\nmetadata: 3\nspec: {template: {spec: {containers: 7}}}\n", "no container runs vLLM"),
        (b"[" * 100_000, "not valid YAML"),
    ],
)
def test_documents_that_cannot_be_used(capsys: Capsys, tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    line = refused(capsys, "audit", file)
    assert "bad.yaml" in line
    assert said in line


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats()
_KEYS = st.sampled_from(
    [
        *("kind", "metadata", "spec", "template", "containers", "name", "image", "args", "command", "items"),
        *("env", "nodeSelector"),
        *("model", "annotations", "rules", "nvidia.com/gpu.product"),
    ]
)
_TREES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5), max_leaves=25
)


@pytest.mark.parametrize(
    ("item", "found", "allowed"),
    [
        ("64", "64", 'it in quotes, "64"'),
        ("0.9", "0.9", 'it in quotes, "0.9"'),
        ("true", "true", 'it in quotes, "true"'),
        ("2026-01-02", "2026-01-02", 'it in quotes, "2026-01-02"'),
        ("null", "null", "text"),
        ("[1, 2]", "list", "text"),
        ("{1: 2}", "dict", "text"),
    ],
)
def test_a_word_that_is_no_string_is_named(capsys: Capsys, tmp_path: Path, item: str, found: str, allowed: str) -> None:
    file = tmp_path / "deployed.yaml"
    file.write_text(yaml.safe_dump(deployment(["--max-num-seqs", "HERE"])).replace("HERE", item))
    assert refused(capsys, "audit", file) == (
        f"kvpressure audit: {file}: Deployment chat: spec/template/spec/containers/0/args/1 is {found}, not a "
        f"string; Kubernetes takes strings only; allowed: {allowed}\n"
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree=_TREES, image=_LEAVES)
def test_any_document_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tree: Any, image: Any) -> None:
    document = deployment(image=image) | {"spec": tree}
    mixed = deployment()
    mixed["spec"]["template"]["spec"]["containers"].append(tree)
    mixed["metadata"] = tree
    file = tmp_path_factory.getbasetemp() / "fuzz.json"
    file.write_text(json.dumps({"kind": "List", "items": [document, mixed, tree]}))
    try:
        found = manifests.read_all([str(file)])
    except InputError as error:
        said = str(error)
        assert "\n" not in said
    else:
        assert found


def item_of(capsys: Capsys, name: str, arguments: str, more: str = "") -> dict[str, Any]:
    asked = f"--vllm-version 0.30.0 --gpu L40S:48 {more}"
    return items_of(capsys, f"vllm serve llama-3-8b {arguments}", asked)[name]


@pytest.mark.parametrize(("tokens", "result"), [("4", "fail"), ("8", "pass")])
def test_a_token_budget_below_max_num_seqs_fails(capsys: Capsys, tokens: str, result: str) -> None:
    found = item_of(capsys, "max_num_batched_tokens_explicit", f"--max-num-seqs 8 --max-num-batched-tokens {tokens}")
    assert found["result"] == result
    assert ("vLLM does not start" in found["found"]) is (result == "fail")


def test_a_usual_request_beyond_the_context_is_counted_as_it_can_be(capsys: Capsys) -> None:
    found = item_of(capsys, "concurrency_from_memory", "--max-num-seqs 1 --max-model-len 8000", "--context 99999")
    assert "of 8000 tokens (--context 99999 is above max_model_len)" in found["found"]


@pytest.mark.parametrize("more", ["", "--context 100"])
def test_a_gpu_that_holds_no_request_fails(capsys: Capsys, more: str) -> None:
    found = item_of(capsys, "concurrency_from_memory", "--max-num-seqs 1", f"--gpu X:1 {more}")
    assert found["result"] == "fail"
    assert "vLLM does not start unless one fits" in found["found"]
    assert found["set"].startswith("a smaller --max-model-len, a larger GPU")


def test_a_share_that_would_leave_nothing_is_not_the_advice(capsys: Capsys) -> None:
    """At the documented share the weights alone are more than a GPU of 24 GiB gives."""
    found = item_of(capsys, "max_num_seqs_explicit", "--max-model-len 4096", "--gpu L4:22 --context 900")
    assert "in the KV cache as it is" in found["set"]


def test_weights_that_the_arguments_change_are_not_judged_by_the_estimate(capsys: Capsys) -> None:
    found = item_of(capsys, "concurrency_from_memory", "--max-num-seqs 1 --quantization fp8", "--gpu T4:16")
    assert found["result"] == "cannot see"


# --- weights of quantized checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpu", "fits"),
    [
        ("Qwen/Qwen3-32B-FP8 --max-model-len 32768", "L40S:48", True),
        ("nvidia/Qwen3-32B-NVFP4 --max-model-len 32768", "L40S:48", True),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ --max-model-len 32768", "H100:80", True),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16 --max-model-len 8192", "T4:16", True),
        ("zai-org/GLM-5-FP8 --tensor-parallel-size 8", "H200:141", True),
        ("someone/Qwen3-14B-GPTQ --max-model-len 16384", "A4000:16", True),
        ("Qwen/Qwen3-14B-Instruct-of-our-own-in-4-bits --max-model-len 16384", "A4000:16", True),
        ("Qwen/Qwen3-32B-FP8 --max-model-len 32768", "L4:24", False),
    ],
)
def test_a_quantized_model_is_said_not_to_start_only_where_it_does_not_fit(
    capsys: Capsys, model: str, gpu: str, fits: bool
) -> None:
    items = items_of(capsys, f"vllm serve {model} --max-num-seqs 8", f"--vllm-version 0.20.0 --gpu {gpu}")
    assert (items["concurrency_from_memory"]["result"] != "fail") is fits
    assert ("does not start" in str(items)) is not fits


# --- SGLang -----------------------------------------------------------------------------------------------


def sglang(capsys: Capsys, arguments: str, more: str = "") -> dict[str, Any]:
    return items_of(capsys, f"python3 -m sglang.launch_server {arguments}", more)


def test_a_share_that_sglang_refuses_fails(capsys: Capsys, tmp_path: Path) -> None:
    command = ["python3", "-m", "sglang.launch_server", "--model-path=m", "--mem-fraction-static=1.5"]
    _, items = audit(capsys, tmp_path, deployment(command=command, image="lmsysorg/sglang:v0.5.9"))
    assert items["gpu_memory_utilization"]["result"] == "fail"
    assert items["gpu_memory_utilization"]["found"].startswith("set to '1.5', which SGLang does not accept")
    assert items["memory_targets_documented"]["found"].startswith("SGLang does not accept its value: ")


@pytest.mark.parametrize(
    ("more", "chunk"),
    [
        ("", "N;"),
        ("--gpu H100:80", "8192"),
        ("--gpu H100:80 --sglang-version 0.5.19", "8192"),
        ("--gpu L4:24 --sglang-version 0.5.19", "2048"),
        ("--gpu H100:80 --sglang-version 0.5.3", "N;"),
    ],
)
@pytest.mark.parametrize("ranks", ["", " --dp-size 8 --tp-size 8 --enable-dp-attention"])
def test_the_advised_chunk_is_not_worse_than_sglang_s_own(capsys: Capsys, more: str, chunk: str, ranks: str) -> None:
    items = sglang(capsys, f"--model-path m{ranks}", more)
    assert items["max_num_batched_tokens_explicit"]["set"].split()[:2] == ["--chunked-prefill-size", chunk]


def test_sglang_starts_where_vllm_does_not(capsys: Capsys) -> None:
    items = sglang(capsys, "--model-path m --max-running-requests 64 --chunked-prefill-size 32")
    assert items["max_num_batched_tokens_explicit"]["result"] == "pass"
    served = "--model-path llama-3-8b --max-running-requests 4 --context-length 8192 --mem-fraction-static 0.7"
    found = sglang(capsys, served, "--gpu L4:22")["concurrency_from_memory"]["found"]
    assert found.endswith("SGLang rejects longer ones than fit")


def test_sglang_publishes_metrics_only_where_they_are_switched_on(capsys: Capsys, tmp_path: Path) -> None:
    items = sglang(capsys, "--model-path m")
    assert (items["observe_batch"]["result"], items["observe_batch"]["set"]) == ("fail", "add --enable-metrics")
    assert sglang(capsys, "--model-path m --enable-metrics")["observe_batch"]["result"] == "cannot see"
    assert sglang(capsys, "--model-path m --allow-auto-truncate")["rejected_not_truncated"]["result"] == "fail"
    container = {"image": "lmsysorg/sglang:v0.5.19", "command": ["python3", "-m", "sglang.launch_server"]}
    document = deployment(["--model-path", "m", "--enable-metrics"], **container)
    document["spec"]["template"]["metadata"] |= SCRAPED
    _, found = audit(capsys, tmp_path, document)
    assert found["prompt_lengths"]["found"] == "prometheus.io/scrape annotation"


@pytest.mark.parametrize(
    ("served", "more", "result", "found"),
    [
        ("--kv-offloading-size 1", "--context 32000", "fail", "1.0 GiB for requests of 32000 tokens, 3.9 GiB each"),
        ("--kv-offloading-size 8", "--context 32000", "pass", "8.0 GiB for requests of 32000 tokens, 3.9 GiB each"),
        ("--kv-offloading-size 1", "", "cannot see", "1.0 GiB for requests of 131072 tokens, 16.0 GiB each"),
        (
            """--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config":"""
            """ {"cpu_bytes_to_use": 8589934592}}' --tensor-parallel-size 2""",
            "--context 32000",
            "pass",
            "8.0 GiB for requests of 32000 tokens, 3.9 GiB each",
        ),
        ("--kv-offloading-size 8 --kv-offloading-backend lmcache", "--context 9000", "cannot see", "size or model"),
        ("--kv-offloading-backend native", "", "fail", "--kv-offloading-backend without --kv-offloading-size: no tier"),
    ],
)
def test_a_kv_tier_holds_a_request_or_is_said_not_to(
    capsys: Capsys, served: str, more: str, result: str, found: str
) -> None:
    item = items_of(capsys, f"vllm serve meta-llama/Llama-3.1-8B {served}", more)["kv_tier"]
    assert (item["result"], item["found"][: len(found)]) == (result, found)
    assert result == "pass" or "lmcache" in served or "native" in served or "--kv-offloading-size" in item["set"]


def test_hicache_options_without_their_switch_are_no_tier(capsys: Capsys) -> None:
    served = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B"
    assert "kv_tier" not in items_of(capsys, served)
    assert items_of(capsys, f"{served} --hicache-ratio 4")["kv_tier"]["result"] == "fail"
    assert items_of(capsys, f"{served} --hicache-ratio 4 --enable-hierarchical-cache")["kv_tier"]["result"] != "fail"
