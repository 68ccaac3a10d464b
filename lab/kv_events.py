"""What KV events cost: ``python -m lab.kv_events``, CPU and memory of ``kvpressure serve`` while an engine sends them.

The publisher is ZeroMQ's. A request stores a hundred blocks; once the cache is full, as many are evicted. Three in ten
requests repeat an earlier one. CPU is that of the whole process, less the same without events; beside it, of a process
that decodes the same batches with pyzmq and msgspec, and does nothing with them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec
import zmq
from tests.e2e.test_process import in_order
from tests.helpers.kv_publisher import Publisher
from tests.helpers.serve_process import LISTEN, QUIET, Process

from lab.engines import pages
from lab.node import cpu_seconds

CACHE_BLOCKS = 65_536
REQUEST_BLOCKS = 100
STEPS_PER_SECOND = 50


def batches(blocks_per_second: int, seconds: float, time_of_first: float, tenants: int) -> Iterator[bytes]:
    """Batches of one step each."""
    rng, cached, known, first = random.Random(1), OrderedDict[int, list[int]](), list[list[int]](), 0
    tokens = [rng.randrange(150_000) for _ in range(16 * REQUEST_BLOCKS)]
    for step in range(round(seconds * STEPS_PER_SECOND)):
        events: list[dict[str, object]] = []
        while first < (step + 1) * blocks_per_second / STEPS_PER_SECOND:
            again = known and rng.random() < 0.3
            blocks = rng.choice(known) if again else [rng.getrandbits(64) for _ in range(REQUEST_BLOCKS)]
            known = [*known[-2000:], blocks]
            hit = blocks[0] in cached
            cached[blocks[0]] = blocks
            cached.move_to_end(blocks[0])
            if hit:
                continue
            first += REQUEST_BLOCKS
            events.append(_stored(blocks, f"tenant-{rng.randrange(tenants)}" if tenants else None, tokens))
            if len(cached) * REQUEST_BLOCKS > CACHE_BLOCKS:
                events.append(_removed(cached.popitem(last=False)[1]))
        yield msgspec.msgpack.encode([time_of_first + step / STEPS_PER_SECOND, events, 0])


def _stored(blocks: list[int], salt: str | None, tokens: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 16,
        "medium": "GPU",
        "extra_keys": [[salt], *[None] * (len(blocks) - 1)] if salt else None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(blocks: list[int]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU", "group_idx": 0}


def floor(port: int) -> None:
    """Decode and forget."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.subscribe(b"")
        while True:
            msgspec.msgpack.decode(subscriber.recv_multipart()[-1])


def measured(pids: Sequence[int], publisher: Publisher, sent: Sequence[bytes]) -> list[float]:
    """Share of a core that each process takes while the batches are sent."""
    used, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    for step, payload in enumerate(sent):
        time.sleep(max(0.0, began + step / STEPS_PER_SECOND - time.monotonic()))
        publisher.send_raw(payload, kept=False)
    seconds = time.monotonic() - began
    return [(cpu_seconds(pid) - before) / seconds for pid, before in zip(pids, used, strict=True)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50_000, help="stored each second")
    parser.add_argument("--tenants", type=int, default=50, help="with a cache salt each; 0 = no salts")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    prepared = list(batches(given.blocks, given.seconds, time.time(), given.tenants))
    quiet = [msgspec.msgpack.encode([0.0, [], 0])] * len(prepared)
    with in_order([page.decode() for page in pages()[-4:]]) as (url, _), Publisher() as publisher:
        target = f"inference/vllm-0={url};kv-events=tcp://127.0.0.1:{publisher.port}"
        process = Process(*LISTEN, *QUIET, "--node-name", "n", "--engine.target", target)
        beside = multiprocessing.get_context("spawn").Process(target=floor, args=(publisher.port,), daemon=True)
        beside.start()
        try:
            publisher.wait()
            pids = process.child.pid, beside.pid or 0
            without, before = measured(pids, publisher, quiet), process.memory_mib()
            measured(pids, publisher, prepared)  # the cache fills
            ours, least = (used - idle for used, idle in zip(measured(pids, publisher, prepared), without, strict=True))
            peak = process.memory_mib("VmHWM")
        finally:
            beside.kill()
            process.stop()
    print(f"{given.blocks} blocks stored a second, and as many evicted: {100 * ours:.1f} % of a core")
    print(
        f"a process that only decodes them: {100 * least:.1f} %; memory {before:.1f} MiB before, {peak:.1f} MiB at most"
    )


if __name__ == "__main__":
    main()
