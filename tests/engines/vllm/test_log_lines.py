"""What log lines are recognised, on real logs, on the texts of all versions, and on hostile lines."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.engines.vllm import log_lines as logevents
from kvpressure.engines.vllm.log_lines import match, strip
from kvpressure.model.log_events import ALLOCATION_EVENTS, EVENTS, FACT_EVENTS, MAX_LINE

LOGS = Path(__file__).parents[2] / "fixtures" / "vllm-logs"
GIB = 2.0**30
MIB = 2.0**20


def events_of(name: str) -> Counter[str]:
    found = Counter[str]()
    for line in (LOGS / name).read_text(encoding="utf-8", errors="replace").splitlines():
        event = match(line)
        if event is not None:
            found[event.event] += 1
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("server-full-0.27.0.log", {"args": 1, "max_model_len": 1, "engine_config": 1, "capacity": 2, "stats": 10}),
        ("server-b_light.log", {"stats": 3}),
        ("server-d_kv_pressure.log", {"stats": 10}),
        ("server-k_api_server_count2.log", {}),
        (
            "server-engine-core-killed.log",
            {"args": 1, "max_model_len": 1, "engine_config": 1, "capacity": 1, "engine_dead": 1},
        ),
        (
            "server-startfail-too-few-blocks.log",
            {"args": 1, "max_model_len": 1, "engine_config": 1, "start_failed": 2, "context_too_long": 2},
        ),
    ],
)
def test_real_logs_give_exactly_these_events(name: str, expected: dict[str, int]) -> None:
    assert events_of(name) == Counter(expected)


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 "
    "GiB of which 21.75 MiB is free. Including non-PyTorch memory, this process has 23.53 GiB memory in use. Of the "
    "allocated memory 22.88 GiB is allocated by PyTorch, and 275.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
V0_PREEMPTION = (
    "Sequence group 200 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache "
    "space. This can affect the end-to-end performance. Increase gpu_memory_utilization or "
    "tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption=51"
)
CONTEXT_V1 = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (9.31 GiB). Based on the available memory, the "
    "estimated maximum model length is 76256. Try increasing `gpu_memory_utilization`"
)
BREAKDOWN = (
    "Free memory on device (78.6/79.11 GiB) on startup. Desired GPU memory utilization is (0.92, 72.78 GiB). "
    "Actual usage is 15.41 GiB for consumed memory (weights + non-torch), 1.3 GiB for peak activation, and 0.55 "
    "GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` to fit. "
    "Current kv cache memory in use is 55.52 GiB."
)

TEXTS: list[tuple[str, str, dict[str, object]]] = [
    (
        OOM,
        "cuda_oom",
        {
            "runtime": "CUDA",
            "requested_bytes": 50 * MIB,
            "total_bytes": 23.56 * GIB,
            "free_bytes": 21.75 * MIB,
            "allocated_bytes": 22.88 * GIB,
            "reserved_unallocated_bytes": 275 * MIB,
        },
    ),
    (
        (
            "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 1.16 GiB. Of the allocated memory 20.0"
            " GiB is allocated by PyTorch, with 1.5 GiB allocated in private pools (e.g., CUDA Graphs), and 512 bytes"
            " is reserved by PyTorch but unallocated."
        ),
        "cuda_oom",
        {
            "runtime": "HIP",
            "requested_bytes": 1.16 * GIB,
            "allocated_bytes": 20 * GIB,
            "private_pool_bytes": 1.5 * GIB,
            "reserved_unallocated_bytes": 512.0,
        },
    ),
    # torch 2.1: a misprint; 2.0 and older, XPU and NPU: other words, and reserved memory in total
    (
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacty"
            " of 23.69 GiB of which 4.94 MiB is free. Process 9 has 23.68 GiB memory in use. Of the allocated memory"
            " 20.08 GiB is allocated by PyTorch, and 3.21 GiB is reserved by PyTorch but unallocated. If reserved but"
            " unallocated memory is large try setting max_split_size_mb to avoid fragmentation."
        ),
        "cuda_oom",
        {
            "runtime": "CUDA",
            "requested_bytes": 896 * MIB,
            "total_bytes": 23.69 * GIB,
            "free_bytes": 4.94 * MIB,
            "allocated_bytes": 20.08 * GIB,
            "reserved_unallocated_bytes": 3.21 * GIB,
        },
    ),
    (
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.75 GiB total"
            " capacity; 9.50 GiB already allocated; 12.50 MiB free; 9.75 GiB reserved in total by PyTorch) If reserved"
            " memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
        ),
        "cuda_oom",
        {
            "runtime": "CUDA",
            "requested_bytes": 20 * MIB,
            "total_bytes": 10.75 * GIB,
            "free_bytes": 12.5 * MIB,
            "allocated_bytes": 9.5 * GIB,
            "reserved_unallocated_bytes": 0.25 * GIB,
        },
    ),
    (
        (
            "XPU out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.5 GiB total capacity; 14.5 GiB already allocated;"
            " 14.0 GiB reserved in total by PyTorch)"
        ),
        "cuda_oom",
        {
            "runtime": "XPU",
            "requested_bytes": 2 * GIB,
            "total_bytes": 15.5 * GIB,
            "allocated_bytes": 14.5 * GIB,
            "reserved_unallocated_bytes": 0.0,
        },
    ),
    (
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of"
            " 191.98 GiB of which 0 bytes is free. Of the allocated memory 180.50 GiB is allocated by PyTorch, and"
            " 10.25 GiB is reserved by PyTorch but unallocated."
        ),
        "cuda_oom",
        {
            "runtime": "HIP",
            "requested_bytes": GIB,
            "total_bytes": 191.98 * GIB,
            "free_bytes": 0.0,
            "allocated_bytes": 180.5 * GIB,
            "reserved_unallocated_bytes": 10.25 * GIB,
        },
    ),
    ("RuntimeError: NPU out of memory.", "cuda_oom", {"runtime": "NPU"}),
    ("RuntimeError: CUDA error: out of memory", "cuda_oom", {"runtime": "CUDA"}),
    (
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try"
            " lowering"
        ),
        "warmup_oom",
        {"stage": "sampler", "dummy_requests": 256.0},
    ),
    ("CUDA out of memory occurred when warming up pooler (hint)", "warmup_oom", {"stage": "pooler"}),
    (
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory",
        "load_oom",
        {},
    ),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
        "no_kv_blocks",
        {},
    ),
    (
        CONTEXT_V1,
        "context_too_long",
        {
            "max_model_len": 131072.0,
            "needed_bytes": 16 * GIB,
            "available_bytes": 9.31 * GIB,
            "estimated_max_model_len": 76256.0,
        },
    ),
    (
        (
            "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache"
            " (28000). Try increasing `gpu_memory_utilization`"
        ),
        "context_too_long",
        {"max_model_len": 32768.0, "capacity_tokens": 28000.0},
    ),
    (
        (
            "ValueError: Free memory on device cuda:0 (3.1/79.11 GiB) on startup is less than desired GPU memory"
            " utilization (0.92, 72.78 GiB). Decrease GPU memory utilization"
        ),
        "memory_profiling_failed",
        {"free_bytes": 3.1 * GIB, "total_bytes": 79.11 * GIB, "utilization": 0.92, "desired_bytes": 72.78 * GIB},
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 1, current free memory 2.",
        "memory_profiling_failed",
        {},
    ),
    (
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. Memory on the"
            " node was"
        ),
        "host_oom",
        {},
    ),
    (V0_PREEMPTION, "preemption", {"mode": "recompute", "cumulative": 51.0}),
    (
        "(EngineCore pid=201) ERROR 11-14 22:18:23 [core.py:1101] EngineCore encountered a fatal error.",
        "engine_dead",
        {},
    ),
    ("vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.", "engine_dead", {}),
    ("(EngineCore pid=1) ERROR 11-21 05:08:12 [core.py:1510] EngineCore failed to start.", "start_failed", {}),
    (
        "INFO 11-14 22:19:20 [shm_broadcast.py:406] No available block found in 60 second. ",
        "broadcast_wait",
        {"seconds": 60.0},
    ),
    (
        "No available shared memory broadcast block found in 60 seconds. This typically happens",
        "broadcast_wait",
        {"seconds": 60.0},
    ),
    (
        (
            "Iteration(17): 2 context requests, 812 context tokens, 30 generation requests, 30 generation tokens,"
            " iteration elapsed time: 41.20 ms, GPU KV cache usage: 97.5%"
        ),
        "iteration",
        {
            "index": 17.0,
            "context_requests": 2.0,
            "context_tokens": 812.0,
            "generation_requests": 30.0,
            "generation_tokens": 30.0,
            "elapsed_seconds": 0.0412,
            "kv_usage": 0.975,
        },
    ),
    ("# GPU blocks: 2048, # CPU blocks: 512", "capacity", {"device_blocks": 2048.0, "cpu_blocks": 512.0}),
    ("# CUDA blocks: 2048", "capacity", {"device_blocks": 2048.0}),
    ("GPU KV cache size: 153,200 tokens", "capacity", {"tokens": 153200.0}),
    (
        "Maximum concurrency for 131,072 tokens per request: 1.17x",
        "capacity",
        {"max_model_len": 131072.0, "max_concurrency": 1.17},
    ),
    (
        "GPU + host KV cache size: 2,048 tokens, Maximum concurrency for 1,024 tokens per request: 2.00x",
        "capacity",
        {"tokens": 2048.0, "max_model_len": 1024.0, "max_concurrency": 2.0},
    ),
    ("Available KV cache memory: 55.5 GiB", "pool_bytes", {"bytes": 55.5 * GIB}),
    ("Available KV cache memory: -1.25 GiB", "pool_bytes", {"shortfall_bytes": 1.25 * GIB}),
    ("Loading model weights took 14.9888 GB", "weights_bytes", {"bytes": 14.9888 * GIB}),
    ("Model loading took 14.9889 GiB and 3.2 seconds", "weights_bytes", {"bytes": 14.9889 * GIB, "seconds": 3.2}),
    ("Model loading took 15.1 GiB memory and 12.8 seconds", "weights_bytes", {"bytes": 15.1 * GIB, "seconds": 12.8}),
    ("Graph capturing finished in 21 secs, took 0.58 GiB", "graphs_bytes", {"seconds": 21.0, "bytes": 0.58 * GIB}),
    ("Graph capturing finished in 21 secs.", "graphs_bytes", {"seconds": 21.0}),
    (
        "CUDA graph pool memory: 0.6 GiB (actual), 0.7 GiB (estimated), difference: 0.1 GiB",
        "graphs_bytes",
        {"bytes": 0.6 * GIB},
    ),
    (
        BREAKDOWN,
        "breakdown",
        {
            "consumed_bytes": 15.41 * GIB,
            "activation_bytes": 1.3 * GIB,
            "graphs_bytes": 0.55 * GIB,
            "kv_bytes": 55.52 * GIB,
        },
    ),
    (
        (
            "Actual usage is 14.99 GiB for weight, 1.22 GiB for peak activation, 0.14 GiB for non-torch memory, and 0.5"
            " GiB for CUDAGraph memory. Current kv cache memory in use is 55.5 GiB."
        ),
        "breakdown",
        {
            "weights_bytes": 14.99 * GIB,
            "activation_bytes": 1.22 * GIB,
            "non_torch_bytes": 0.14 * GIB,
            "graphs_bytes": 0.5 * GIB,
            "kv_bytes": 55.5 * GIB,
        },
    ),
    (
        (
            "model weights take 15.08GiB; non_torch_memory takes 0.14GiB; PyTorch activation peak memory takes 1.34GiB;"
            " the rest of the memory reserved for KV Cache is 54.62GiB."
        ),
        "breakdown",
        {
            "weights_bytes": 15.08 * GIB,
            "non_torch_bytes": 0.14 * GIB,
            "activation_bytes": 1.34 * GIB,
            "kv_bytes": 54.62 * GIB,
        },
    ),
    ("Chunked prefill is enabled with max_num_batched_tokens=8192.", "max_num_batched_tokens", {"tokens": 8192.0}),
    ("Using max model len 2048", "max_model_len", {"tokens": 2048.0}),
    (
        "non-default args: {'model': 'm', 'max_num_seqs': 64, 'served_model_name': ['a', 'b'], 'enforce_eager': True}",
        "args",
        {"form": "non_default", "model": "m", "max_num_seqs": 64.0, "served_model_name": "a", "enforce_eager": "True"},
    ),
    (
        (
            "INFO 05-09 00:49:33 api_server.py:528] args: Namespace(host=None, port=8000, allowed_origins=['*'], "
            "model='facebook/opt', max_num_seqs=256, max_model_len=None, dispatch_function=<function serve at 0x7f>)"
        ),
        "args",
        {
            "form": "all",
            "port": 8000.0,
            "allowed_origins": "*",
            "model": "facebook/opt",
            "max_num_seqs": 256.0,
            "dispatch_function": "<function serve at 0x7f>",
        },
    ),
    (
        "Sleep mode freed 60.12 GiB memory, 1.5 GiB memory is still in use.",
        "sleep",
        {"freed_bytes": 60.12 * GIB, "used_bytes": 1.5 * GIB},
    ),
    ("It took 2.5 seconds to fall asleep.", "sleep", {"seconds": 2.5}),
    ("Add 8 padding layers, may waste at most 15.38% KV cache memory", "kv_padding", {"waste_ratio": 0.1538}),
    (
        (
            "Initializing an LLM engine (v0.5.5) with config: model='facebook/opt-125m', max_seq_len=2048, "
            "tensor_parallel_size=2, kv_cache_dtype=auto, served_model_name=opt, "
        ),
        "engine_config",
        {
            "version": "0.5.5",
            "model": "facebook/opt-125m",
            "max_model_len": 2048.0,
            "tensor_parallel_size": 2.0,
            "kv_cache_dtype": "auto",
            "served_model_name": "opt",
        },
    ),
]


@pytest.mark.parametrize(("line", "event", "values"), TEXTS, ids=[f"{i}-{t[1]}" for i, t in enumerate(TEXTS)])
def test_text_of_each_version(line: str, event: str, values: dict[str, object]) -> None:
    found = match(line)
    assert found is not None
    assert found.event == event
    assert_near(found.values, values)


def assert_near(found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name


STATS = [
    (
        (
            "Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: 3.5 tokens/s, Running: 1 reqs, Swapped: 2"
            " reqs, Pending: 3 reqs, GPU KV cache usage: 100.0%, CPU KV cache usage: 25.0%."
        ),
        {
            "flavour": "v0",
            "running": 1.0,
            "swapped": 2.0,
            "waiting": 3.0,
            "kv_usage": 1.0,
            "cpu_kv_usage": 0.25,
            "prompt_rate": 12.0,
            "generation_rate": 3.5,
        },
    ),
    (
        (
            "Engine 001: Avg prompt throughput: 24000.0 tokens/s, Avg generation throughput: 18.0 tokens/s, Running: 10"
            " reqs, Waiting: 90 reqs, GPU KV cache usage: 19.3%"
        ),
        {
            "flavour": "v1",
            "engine": 1.0,
            "running": 10.0,
            "waiting": 90.0,
            "kv_usage": 0.193,
            "prompt_rate": 24000.0,
            "generation_rate": 18.0,
        },
    ),
    (
        (
            "4 Engines Aggregated: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s,"
            " Running: 5 reqs, Waiting: 6 reqs, Deferred: 2 reqs, KV fetch: 1 waiting to start, 2 in progress, 3"
            " completed waiting, Preemptions: 7, CPU KV cache usage: 98.4%, Prefix cache hit rate: 12.5%"
        ),
        {
            "flavour": "v1",
            "engines": 4.0,
            "running": 5.0,
            "waiting": 6.0,
            "deferred": 2.0,
            "preemptions": 7.0,
            "kv_usage": 0.984,
            "prefix_hit_ratio": 0.125,
            "prompt_rate": 1.0,
            "generation_rate": 2.0,
        },
    ),
    (
        (
            "Avg prompt tput: 5.0 toks/s, Avg generation tput: 6.0 toks/s, Reqs Running: 7, Waiting: 8, Deferred: 1"
            " reqs, Preemptions: 2, GPU KV cache used: 50.5%, Prefix cache hit rate: 1.0%"
        ),
        {
            "flavour": "rust",
            "running": 7.0,
            "waiting": 8.0,
            "deferred": 1.0,
            "preemptions": 2.0,
            "kv_usage": 0.505,
            "prefix_hit_ratio": 0.01,
            "prompt_rate": 5.0,
            "generation_rate": 6.0,
        },
    ),
]


@pytest.mark.parametrize(("line", "values"), STATS, ids=["v0", "v1", "v1-dp", "rust"])
def test_periodic_line_of_each_engine(line: str, values: dict[str, object]) -> None:
    found = match(f"(APIServer pid=1) INFO 11-14 22:14:30 [loggers.py:257] {line}")
    assert found is not None
    assert found.event == "stats"
    assert_near(found.values, values)


def test_every_event_is_covered_here_and_declared() -> None:
    seen = {event for _, event, _ in TEXTS} | {"stats"}
    assert seen == set(EVENTS)
    assert set(EVENTS) >= ALLOCATION_EVENTS | FACT_EVENTS
    assert not ALLOCATION_EVENTS & FACT_EVENTS


@pytest.mark.parametrize(
    "line",
    [
        (
            "INFO 07-28 06:40:59 [logger.py:39] Received request cmpl-1: prompt: 'Why does torch say CUDA out of"
            " memory. Tried to allocate 1 GiB', params: SamplingParams(n=1)"
        ),
        (
            "INFO 07-28 [logger.py:80] Generated response chatcmpl-1: output: 'EngineDeadError means ...',"
            " finish_reason: stop"
        ),
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        "Warning: NUMA binding: Using MEMBIND policy for memory allocation on the NUMA nodes (0).",
        "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  6.87it/s]",
        "WARNING [cpu.py:296] CPU backend prefers block_size is multiples of 32, otherwise the performance",
        "",
    ],
)
def test_users_text_and_everyday_lines_are_no_events(line: str) -> None:
    assert match(line) is None


MESSAGE = "Using max model len 2048"


@pytest.mark.parametrize(
    "line",
    [
        f"(APIServer pid=2709) INFO 11-21 05:37:59 [model.py:1883] {MESSAGE}",
        f"INFO 07-28 06:40:59 [loggers.py:118] {MESSAGE}",
        f"INFO 05-09 00:49:33 scheduler.py:1057] {MESSAGE}",
        f"my-prefix: (EngineCore_DP0 pid=3) WARNING 2026-05-09 00:49:33.123 [v1/engine/core.py:10] {MESSAGE}\r\n",
        f"\x1b[1;36m(Worker_TP0 pid=7)\x1b[0;0m INFO 11-21 05:37:59 [model.py:1883] {MESSAGE}",
        json.dumps({"level": "INFO", "message": MESSAGE, "file": "model.py"}),
        json.dumps({"log": f"INFO 11-21 05:37:59 [model.py:1883] {MESSAGE}\n", "stream": "stderr"}),
        MESSAGE,
    ],
)
def test_prefix_colours_and_json_are_removed(line: str) -> None:
    assert strip(line) == MESSAGE
    found = match(line)
    assert found is not None
    assert found.event == "max_model_len"


def test_stripping_changes_no_event_of_a_real_log() -> None:
    for path in sorted(LOGS.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            assert match(strip(line)) == match(line)


KEYWORDS = sorted({row[0] for row in logevents._TABLE})


def test_every_keyword_passes_the_first_look() -> None:
    assert [k for k in KEYWORDS if not any(word in k for word in logevents.WORDS)] == []


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(KEYWORDS + [text for text, _, _ in TEXTS]),
            st.text(max_size=30),
            st.sampled_from(["1", "-", ".", "GiB", "'", '"', "{", "(", "[", "\x1b[", "\x00"]),
        ),
        max_size=12,
    )
)
def test_never_raises_and_values_are_numbers_or_text(parts: list[str]) -> None:
    line = "".join(parts)
    found = match(line)
    assert isinstance(strip(line), str)
    if found is not None:
        assert found.event in EVENTS
        assert all(isinstance(value, str) or abs(value) < 1e300 for value in found.values.values())


@pytest.mark.parametrize(
    "unit",
    [
        "x",
        "9",
        "Available KV cache memory: ",
        "Free memory on device ",
        "Running: ",
        "args: ",
        "non-default args: {" + "[" * 50,
        "\x1b[",
        '{"',
        "(a pid=",
        "1.",
        "out of memory ",
    ],
)
def test_a_line_of_ten_megabytes_costs_no_more_than_a_long_one(unit: str) -> None:
    line = unit * (10_000_000 // len(unit))
    started = time.perf_counter()
    match(line)
    strip(line)
    assert time.perf_counter() - started < 0.25


def test_cost_of_lines_without_keywords_is_small() -> None:
    line = 'INFO:     127.0.0.1:59272 - "POST /v1/completions HTTP/1.1" 200 OK'
    best = min(_timed(line) for _ in range(5))
    assert best < 10e-6  # about 0.7 us on the machine it was written on; the margin is for a loaded one


def _timed(line: str) -> float:
    started = time.thread_time()
    for _ in range(2000):
        match(line)
    return (time.thread_time() - started) / 2000


def test_only_the_first_characters_of_a_line_count() -> None:
    assert match("x" * (MAX_LINE - 10) + MESSAGE) is None
    assert match(MESSAGE + "x" * MAX_LINE) is not None
