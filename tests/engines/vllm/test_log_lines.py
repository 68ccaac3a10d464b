"""What log lines are recognised, on real logs, on the texts of all versions, and on hostile lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvpressure.engines.vllm import log_lines as logevents
from kvpressure.engines.vllm.log_lines import recognise, strip
from kvpressure.model.log_events import ALLOCATION_EVENTS, EVENTS, FACT_EVENTS, MAX_LINE

LOGS = Path(__file__).parents[2] / "fixtures" / "vllm-logs"
GIB = 2.0**30
MIB = 2.0**20


def events_of(name: str) -> Counter[str]:
    found = Counter[str]()
    for line in (LOGS / name).read_text(encoding="utf-8", errors="replace").splitlines():
        event = recognise(strip(line))
        if event is not None:
            found[event.event] += 1
    return found


def test_real_logs_give_exactly_these_events() -> None:
    start = {"args": 1, "max_model_len": 1, "engine_config": 1}
    expected = {
        "server-full-0.27.0.log": {**start, "capacity": 2, "stats": 10},
        "server-b_light.log": {"stats": 3},
        "server-d_kv_pressure.log": {"stats": 10},
        "server-k_api_server_count2.log": {},
        "server-engine-core-killed.log": {**start, "capacity": 1, "engine_dead": 1},
        "server-startfail-too-few-blocks.log": {**start, "start_failed": 2, "context_too_long": 2},
    }
    assert {name: events_of(name) for name in expected} == expected


#: Each event with its values, and below it a line that reports it: torch 2.1 with its misprint, 2.0 and older, XPU and
#: NPU with other words; vLLM V0, V1, several engines, and the Rust front end.
LINES = r"""
cuda_oom: requested_bytes=50MiB, total_bytes=23.56GiB, free_bytes=21.75MiB, allocated_bytes=22.88GiB,
reserved_unallocated_bytes=275MiB
  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB
  of which 21.75 MiB is free. Including non-PyTorch memory, this process has 23.53 GiB memory in use. Of the
  allocated memory 22.88 GiB is allocated by PyTorch, and 275.00 MiB is reserved by PyTorch but unallocated. If
  reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
cuda_oom: requested_bytes=1.16GiB, allocated_bytes=20GiB, private_pool_bytes=1.5GiB, reserved_unallocated_bytes=512
  torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 1.16 GiB. Of the allocated memory 20.0 GiB is
  allocated by PyTorch, with 1.5 GiB allocated in private pools (e.g., CUDA Graphs), and 512 bytes is reserved by
  PyTorch but unallocated.
cuda_oom: requested_bytes=0.875GiB, total_bytes=23.69GiB, free_bytes=4.94MiB, allocated_bytes=20.08GiB,
reserved_unallocated_bytes=3.21GiB
  torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacty of 23.69
  GiB of which 4.94 MiB is free. Process 9 has 23.68 GiB memory in use. Of the allocated memory 20.08 GiB is
  allocated by PyTorch, and 3.21 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is
  large try setting max_split_size_mb to avoid fragmentation.
cuda_oom: requested_bytes=20MiB, total_bytes=10.75GiB, free_bytes=12.5MiB, allocated_bytes=9.5GiB,
reserved_unallocated_bytes=0.25GiB
  torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.75 GiB total capacity;
  9.50 GiB already allocated; 12.50 MiB free; 9.75 GiB reserved in total by PyTorch) If reserved memory is >>
  allocated memory try setting max_split_size_mb to avoid fragmentation.
cuda_oom: requested_bytes=2GiB, total_bytes=15.5GiB, allocated_bytes=14.5GiB, reserved_unallocated_bytes=0
  XPU out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.5 GiB total capacity; 14.5 GiB already allocated; 14.0
  GiB reserved in total by PyTorch)
cuda_oom:
  RuntimeError: NPU out of memory.
cuda_oom:
  RuntimeError: CUDA error: out of memory
warmup_oom:
  RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering
load_oom:
  Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory
too_few_blocks: fitting_requests=300
  ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (300). Each decode request needs one
no_kv_blocks:
  ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when
context_too_long: needed_bytes=16GiB, available_bytes=9.31GiB, fitting_tokens=76256
  ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed,
  which is larger than the available KV cache memory (9.31 GiB). Based on the available memory, the estimated
  maximum model length is 76256. Try increasing `gpu_memory_utilization`
context_too_long: fitting_tokens=28000
  The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache
  (28000). Try increasing `gpu_memory_utilization`
memory_profiling_failed:
  ValueError: Free memory on device cuda:0 (3.1/79.11 GiB) on startup is less than desired GPU memory utilization
  (0.92, 72.78 GiB). Decrease GPU memory utilization
memory_profiling_failed:
  AssertionError: Error in memory profiling. Initial free memory 1, current free memory 2.
host_oom:
  ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. Memory on the node was
preemption:
  Sequence group 200 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. This
  can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size to provide more KV
  cache memory. total_num_cumulative_preemption=51
engine_dead:
  (EngineCore pid=201) ERROR 11-14 22:18:23 [core.py:1101] EngineCore encountered a fatal error.
engine_dead:
  vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.
start_failed:
  (EngineCore pid=1) ERROR 11-21 05:08:12 [core.py:1510] EngineCore failed to start.
broadcast_wait:
  INFO 11-14 22:19:20 [shm_broadcast.py:406] No available block found in 60 second.
broadcast_wait:
  No available shared memory broadcast block found in 60 seconds. This typically happens
iteration:
  Iteration(17): 2 context requests, 812 context tokens, 30 generation requests, 30 generation tokens, iteration
  elapsed time: 41.20 ms, GPU KV cache usage: 97.5%
capacity:
  # GPU blocks: 2048, # CPU blocks: 512
capacity: capacity_tokens=153200
  GPU KV cache size: 153,200 tokens
capacity: max_model_len=131072
  Maximum concurrency for 131,072 tokens per request: 1.17x
capacity: capacity_tokens=2048, max_model_len=1024
  GPU + host KV cache size: 2,048 tokens, Maximum concurrency for 1,024 tokens per request: 2.00x
pool_bytes: pool_bytes=55.5GiB
  Available KV cache memory: 55.5 GiB
pool_bytes:
  Available KV cache memory: -1.25 GiB
weights_bytes: weights_bytes=14.9888GiB
  Loading model weights took 14.9888 GB
weights_bytes: weights_bytes=14.9889GiB
  Model loading took 14.9889 GiB and 3.2 seconds
graphs_bytes: graphs_bytes=0.58GiB
  Graph capturing finished in 21 secs, took 0.58 GiB
graphs_bytes:
  Graph capturing finished in 21 secs.
graphs_bytes: graphs_bytes=0.6GiB
  CUDA graph pool memory: 0.6 GiB (actual), 0.7 GiB (estimated), difference: 0.1 GiB
breakdown: activations_bytes=1.3GiB, graphs_bytes=0.55GiB, pool_bytes=55.52GiB
  Free memory on device (78.6/79.11 GiB) on startup. Desired GPU memory utilization is (0.92, 72.78 GiB). Actual
  usage is 15.41 GiB for consumed memory (weights + non-torch), 1.3 GiB for peak activation, and 0.55 GiB for
  CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` to fit. Current kv cache memory
  in use is 55.52 GiB.
breakdown: activations_bytes=1.22GiB, graphs_bytes=0.5GiB, pool_bytes=55.5GiB
  Actual usage is 14.99 GiB for weight, 1.22 GiB for peak activation, 0.14 GiB for non-torch memory, and 0.5 GiB for
  CUDAGraph memory. Current kv cache memory in use is 55.5 GiB.
breakdown: activations_bytes=1.34GiB, pool_bytes=54.62GiB
  model weights take 15.08GiB; non_torch_memory takes 0.14GiB; PyTorch activation peak memory takes 1.34GiB; the
  rest of the memory reserved for KV Cache is 54.62GiB.
max_num_batched_tokens: max_num_batched_tokens=8192
  Chunked prefill is enabled with max_num_batched_tokens=8192.
max_model_len: max_model_len=2048
  Using max model len 2048
args:
  non-default args: {'model': 'm', 'max_num_seqs': 64, 'served_model_name': ['a', 'b'], 'enforce_eager': True}
args:
  INFO 05-09 00:49:33 api_server.py:528] args: Namespace(host=None, port=8000, allowed_origins=['*'],
  model='facebook/opt', max_num_seqs=256, max_model_len=None, dispatch_function=<function serve at 0x7f>)
sleep:
  Sleep mode freed 60.12 GiB memory, 1.5 GiB memory is still in use.
sleep:
  It took 2.5 seconds to fall asleep.
kv_padding:
  Add 8 padding layers, may waste at most 15.38% KV cache memory
engine_config: version=0.5.5, max_model_len=2048
  Initializing an LLM engine (v0.5.5) with config: model='facebook/opt-125m', max_seq_len=2048,
  tensor_parallel_size=2, kv_cache_dtype=auto, served_model_name=opt,
stats:
  (APIServer pid=1) INFO 11-14 22:14:30 [loggers.py:257] Avg prompt throughput: 12.0 tokens/s, Avg generation
  throughput: 3.5 tokens/s, Running: 1 reqs, Swapped: 2 reqs, Pending: 3 reqs, GPU KV cache usage: 100.0%, CPU KV
  cache usage: 25.0%.
stats:
  (APIServer pid=1) INFO 11-14 22:14:30 [loggers.py:257] 4 Engines Aggregated: Avg prompt throughput: 1.0 tokens/s,
  Avg generation throughput: 2.0 tokens/s, Running: 5 reqs, Waiting: 6 reqs, Deferred: 2 reqs, KV fetch: 1 waiting
  to start, 2 in progress, 3 completed waiting, Preemptions: 7, CPU KV cache usage: 98.4%, Prefix cache hit rate:
  12.5%
stats:
  (APIServer pid=1) INFO 11-14 22:14:30 [loggers.py:257] Avg prompt tput: 5.0 toks/s, Avg generation tput: 6.0
  toks/s, Reqs Running: 7, Waiting: 8, Deferred: 1 reqs, Preemptions: 2, GPU KV cache used: 50.5%, Prefix cache hit
  rate: 1.0%
pause:
  (APIServer pid=1) INFO:     10.0.0.9:50111 - "POST /pause?mode=keep HTTP/1.1" 200 OK
pause:
  INFO:     10.0.0.9:50111 - "POST /sleep?level=1 HTTP/1.1" 200 OK
resume:
  INFO:     10.0.0.9:50111 - "POST /resume HTTP/1.1" 200 OK
resume:
  INFO:     10.0.0.9:50111 - "POST /wake_up HTTP/1.1" 200 OK
"""


def rows() -> Iterator[tuple[str, str, dict[str, object]]]:
    """(line, event, values) of ``LINES``."""
    for row in re.findall(r"^(?:\w+:.*\n(?:\w+=.*\n)*)(?:  .*\n)+", LINES, re.MULTILINE):
        lines = row.splitlines()
        head = " ".join(line for line in lines if not line.startswith("  "))
        event, _, pairs = head.partition(":")
        named = dict(pair.strip().split("=", 1) for pair in pairs.split(", ") if pair.strip(", "))
        yield (
            " ".join(line.strip() for line in lines if line.startswith("  ")),
            event,
            {k: number(v) for k, v in named.items()},
        )


def number(word: str) -> object:
    """A number with MiB or GiB behind it as bytes, another one as it is; anything else is text."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB)?", word.rstrip(","))
    return float(size[1]) * {"MiB": MIB, "GiB": GIB, None: 1.0}[size[2]] if size else word.rstrip(",")


TEXTS = list(rows())


@pytest.mark.parametrize(("line", "event", "values"), TEXTS, ids=[f"{i}-{t[1]}" for i, t in enumerate(TEXTS)])
def test_text_of_each_version(line: str, event: str, values: dict[str, object]) -> None:
    found = recognise(strip(line))
    assert found.event == event
    given = {"version": found.version} if found.version else {}
    assert_near({**found.facts, **found.allocator, **given}, values)


def assert_near(found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_every_event_is_covered_here_and_declared() -> None:
    seen = {event for _, event, _ in TEXTS}
    assert seen == set(EVENTS)
    assert set(EVENTS) >= ALLOCATION_EVENTS | FACT_EVENTS
    assert not ALLOCATION_EVENTS & FACT_EVENTS


@pytest.mark.parametrize(
    "line",
    [
        "INFO 07-28 06:40:59 [logger.py:39] Received request cmpl-1: prompt: 'Why CUDA out of memory?', params: ...",
        "INFO 07-28 [logger.py:80] Generated response chatcmpl-1: output: 'EngineDeadError means ...'",
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        "Warning: NUMA binding: Using MEMBIND policy for memory allocation on the NUMA nodes (0).",
        "",
    ],
)
def test_users_text_and_everyday_lines_are_no_events(line: str) -> None:
    assert recognise(strip(line)) is None


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
    found = recognise(strip(line))
    assert found.event == "max_model_len"


KEYWORDS = sorted({row.keyword for row in logevents.TABLE})


def test_every_keyword_passes_the_first_look() -> None:
    assert [k for k in KEYWORDS if not any(word in k for word in logevents.WORDS)] == []


def test_only_the_first_characters_of_a_line_count() -> None:
    assert recognise("x" * (MAX_LINE - 10) + MESSAGE) is None
    assert recognise(MESSAGE + "x" * MAX_LINE) is not None
