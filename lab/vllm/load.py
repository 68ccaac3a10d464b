"""Load for a vLLM server on loopback: closed loop, Poisson or a burst. Standard library only.

Usage: load.py PORT MODE SECONDS [--clients N] [--rate R] [--prompt A B] [--output A B]. Prints one JSON line with what
the clients saw: requests, failures by status, time to first token and token gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time


class Client:
    """Sends streaming completions and remembers what came back."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.done = 0
        self.failed: dict[str, int] = {}
        self.ttft: list[float] = []
        self.gaps: list[float] = []

    async def request(self) -> None:
        """One request over its own connection; tokens are counted as they stream in."""
        prompt = [self.random.randrange(10, 990) for _ in range(self.random.randint(*self.options.prompt))]
        body = json.dumps(
            {
                "model": "small",
                "prompt": prompt,
                "max_tokens": self.random.randint(*self.options.output),
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        began = last = time.monotonic()
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.options.port, limit=2**20)
            writer.write(head + body)
            await writer.drain()
            status = (await reader.readline()).split()[1].decode()
            first = True
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                (self.ttft if first else self.gaps).append(now - (began if first else last))
                first, last = False, now
            if status == "200":
                self.done += 1
            else:
                self.failed[status] = self.failed.get(status, 0) + 1
        except (OSError, IndexError, asyncio.IncompleteReadError) as error:
            name = type(error).__name__
            self.failed[name] = self.failed.get(name, 0) + 1
        finally:
            if writer is not None:
                writer.close()

    async def closed(self, end: float) -> None:
        """Ask again as soon as the answer is there."""
        while time.monotonic() < end:
            await self.request()


def quantile(values: list[float], q: float) -> float | None:
    """Nearest rank."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4) if ordered else None


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Drive the load for the asked time, then cut what is still open."""
    client, end = Client(options), time.monotonic() + options.seconds
    tasks: set[asyncio.Task[None]] = set()
    if options.mode == "closed":
        tasks = {asyncio.create_task(client.closed(end)) for _ in range(options.clients)}
        await asyncio.sleep(options.seconds)
    elif options.mode == "burst":
        tasks = {asyncio.create_task(client.request()) for _ in range(options.clients)}
        await asyncio.sleep(options.seconds)
    else:
        while time.monotonic() < end:
            await asyncio.sleep(client.random.expovariate(options.rate))
            tasks.add(asyncio.create_task(client.request()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "requests": client.done,
        "failed": client.failed,
        "ttft_p50": quantile(client.ttft, 0.5),
        "ttft_p95": quantile(client.ttft, 0.95),
        "gap_p50": quantile(client.gaps, 0.5),
        "gap_p99": quantile(client.gaps, 0.99),
        "tokens": len(client.gaps) + len(client.ttft),
    }


def main() -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("mode", choices=["closed", "poisson", "burst"])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--prompt", type=int, nargs=2, default=[50, 100])
    parser.add_argument("--output", type=int, nargs=2, default=[20, 60])
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
