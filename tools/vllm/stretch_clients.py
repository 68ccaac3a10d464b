"""Clients of the stretches: what they send to vLLM, and a record of every request. Standard library only."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Range = tuple[int, int]
Wanted = dict[str, Any]
"""Further fields of the request's body: ``n``, ``priority``, ``model``, ``logprobs``."""
WINDOW = 10.0


@dataclass
class Request:
    """One request as its client saw it; times in Unix seconds, ``outcome`` empty while it is open."""

    sent: float
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)  # by choice
    gaps: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    ended: float = 0.0


class Clients:
    """All clients of one server."""

    def __init__(self, port: int, model: str, seed: int) -> None:
        self.port = port
        self.model = model
        self.random = random.Random(seed)
        self.requests: list[Request] = []

    def text(self, length: Range) -> list[int]:
        """A prompt as token ids, its length drawn from ``length`` (both ends included)."""
        return [self.random.randrange(10, 990) for _ in range(self.random.randint(*length))]

    async def ask(self, prompt: list[int], output: int, give_up: float | None = None, **wanted: Any) -> Request:
        """Stream one completion of ``output`` tokens; the client hangs up after ``give_up`` seconds."""
        asked = Request(time.time())
        self.requests.append(asked)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        } | wanted
        try:
            async with asyncio.timeout(give_up):
                await self._stream(json.dumps(body).encode(), asked)
        except TimeoutError:
            asked.outcome = "gave up"
        except asyncio.CancelledError:
            asked.outcome = "cut"
            raise
        except (OSError, IndexError, EOFError) as error:
            asked.outcome = type(error).__name__
            await asyncio.sleep(1)
        finally:
            asked.ended = time.time()
        return asked

    async def _stream(self, body: bytes, asked: Request) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            await writer.drain()
            status = (await reader.readline()).split()[1].decode()
            ended = status != "200"
            async for line in reader:
                if line.startswith(b"data: {"):
                    _note(asked, json.loads(line[6:]))
                ended = ended or line.startswith(b"data: [DONE]")
            asked.outcome = "cut off by the server" if not ended else "finished" if status == "200" else status
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _note(asked: Request, chunk: Wanted) -> None:
    """Count one chunk of a stream; each choice has gaps of its own."""
    now = time.time()
    asked.first = asked.first or now
    for choice in chunk.get("choices", ()):
        before = asked.last.get(choice["index"])
        if before is not None:
            asked.gaps.append((now, now - before))
        asked.last[choice["index"]] = now
        asked.tokens += choice.get("token_ids") or ()


@dataclass(frozen=True, eq=False)
class Load:
    """A kind of traffic: runs until it is cancelled, which hangs up what is open. ``server`` is its number."""

    text: str
    run: Callable[[Clients], Awaitable[None]]
    server: int = 0


async def together(work: Iterable[Awaitable[Any]]) -> None:
    """Run all until they end; cancel all when cancelled."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(_as_coroutine(one))


async def _as_coroutine(work: Awaitable[Any]) -> None:
    await work


def poisson(
    rate: float, prompt: Range, output: Range, *, server: int = 0, give_up: float | None = None, **wanted: Any
) -> Load:
    """Arrivals at random, ``rate`` a second."""

    async def run(clients: Clients) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(clients.random.expovariate(rate))
                length = clients.random.randint(*output)
                group.create_task(clients.ask(clients.text(prompt), length, give_up, **wanted))

    return Load(
        f"Poisson, {rate:g} requests/s, prompts {_span(prompt)}, outputs {_span(output)}" + _further(give_up, wanted),
        run,
        server,
    )


def closed(
    number: int,
    prompt: Range,
    output: Range,
    *,
    server: int = 0,
    give_up: float | None = None,
    models: tuple[str, ...] = (),
    **wanted: Any,
) -> Load:
    """``number`` clients that ask again as soon as they have the answer, each for its own one of ``models``."""

    async def client(clients: Clients, position: int) -> None:
        own = wanted | ({"model": models[position % len(models)]} if models else {})
        while True:
            await clients.ask(clients.text(prompt), clients.random.randint(*output), give_up, **own)

    async def run(clients: Clients) -> None:
        await together(client(clients, position) for position in range(number))

    asked = wanted | ({"model": " ".join(models)} if models else {})
    return Load(
        f"{number} clients in a closed loop, prompts {_span(prompt)}, outputs {_span(output)}"
        + _further(give_up, asked),
        run,
        server,
    )


def growing(number: int, every: float, prompt: Range, output: Range, *, server: int = 0) -> Load:
    """One more client each ``every`` seconds, up to ``number``; each sends one request after another."""

    async def client(clients: Clients, position: int) -> None:
        await asyncio.sleep(every * position)
        while True:
            await clients.ask(clients.text(prompt), clients.random.randint(*output))

    async def run(clients: Clients) -> None:
        await together(client(clients, position) for position in range(number))

    return Load(
        f"one client more each {every:g} s up to {number}, prompts {_span(prompt)}, outputs {_span(output)}",
        run,
        server,
    )


def agents(number: int, shared: int, turn: Range, output: Range, think: tuple[float, float], longest: int) -> Load:
    """Agents that send their whole conversation each turn, with a tool's answer of ``turn`` tokens added; past
    ``longest`` tokens they begin a new one. ``shared`` tokens of system prompt are the same for all.
    """

    async def agent(clients: Clients, system: list[int]) -> None:
        context = list(system)
        while True:
            context += clients.text(turn)
            asked = await clients.ask(context, clients.random.randint(*output))
            context += asked.tokens
            if len(context) > longest:
                context = list(system)
            await asyncio.sleep(clients.random.uniform(*think))

    async def run(clients: Clients) -> None:
        system = random.Random(7).choices(range(10, 990), k=shared)
        await together(agent(clients, system) for _ in range(number))

    return Load(
        f"{number} agents, {shared} tokens of common system prompt, {_span(turn)} tokens more each turn, outputs "
        f"{_span(output)}, {think[0]:g}-{think[1]:g} s between turns, a new conversation past {longest} tokens",
        run,
    )


def _span(length: Range) -> str:
    return f"{length[0]}-{length[1]}"


def _further(give_up: float | None, wanted: Wanted) -> str:
    parts = [f"{name}={value}" for name, value in wanted.items()]
    if give_up is not None:
        parts.append(f"clients hang up after {give_up:g} s")
    return "".join(", " + part for part in parts)


def table(requests: list[Request], begin: float, end: float) -> list[dict[str, Any]]:
    """What the clients saw, by ``WINDOW`` seconds from ``begin``: counts, latencies in seconds, tokens
    streamed (of a choice's first token only the request's).
    """
    rows, start = [], begin
    while start < end:
        stop = min(start + WINDOW, end)
        rows.append(_row(requests, start, stop, start - begin))
        start = stop
    return rows


def _row(requests: list[Request], start: float, stop: float, second: float) -> dict[str, Any]:
    ttft = [one.first - one.sent for one in requests if one.first is not None and start <= one.first < stop]
    gaps = [gap for one in requests for at, gap in one.gaps if start <= at < stop]
    outcomes: dict[str, int] = {}
    for one in requests:
        if one.outcome and start <= one.ended < stop:
            outcomes[one.outcome] = outcomes.get(one.outcome, 0) + 1
    return {
        "from": round(second, 1),
        "sent": sum(start <= one.sent < stop for one in requests),
        **outcomes,
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p95": quantile(ttft, 0.95),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p95": quantile(gaps, 0.95),
        "tokens": len(gaps) + len(ttft),
    }


def quantile(values: list[float], q: float) -> float | None:
    """Nearest rank; None without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) if ordered else None
