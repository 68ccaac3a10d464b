"""The guides' four diagnostic steps against a running server, each with a verdict.

Growth is measured in KV blocks, which is what vLLM allocates, and compared with the model's formula for the tokens in
flight at the same moment (prompts plus output so far).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvpressure.capacity.kvbytes import CacheLayout
from kvpressure.printable import grouped
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.completions import Api, Completion, CompletionRequest
from kvpressure.toolbox.kv_block_meter import BlockReading, Cache, Meter

Verdict = Literal["as expected", "baseline too high", "leak", "duplication", "less than expected", "not measured"]

SHORT_TOKENS: Final = 512
CONCURRENT: Final = 10  # guide: 10 concurrent requests with 2K context each
CONCURRENT_TOKENS: Final = 2048
LONG_TOKENS: Final = 16384  # guide: 1 request with 16K context
FILL: Final = 0.8  # share of the cache that a step may want, so that nothing is preempted
LEAST_TOKENS: Final = 64  # a shorter prompt measures rounding
TOLERANCE: Final = 0.1  # measured against expected; beside it one block a request
SAMPLE_SECONDS: Final = 0.1
RETURN_SECONDS: Final = 10.0  # how long the cache may take to be empty again
BASELINE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: its requests; ``note``: what was reduced. Without requests it cannot be done, and ``note`` says why."""

    name: str
    asks: tuple[CompletionRequest, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One measured step. Blocks are means over moments when every request was decoding; ``slots_per_token`` is blocks
    × block size / tokens, ``bytes_per_token`` the same in bytes where the model is known.
    """

    step: int
    name: str
    verdict: Verdict
    text: str
    tokens: float | None = None
    blocks: float | None = None
    expected_blocks: float | None = None
    slots_per_token: float | None = None
    bytes_per_token: float | None = None
    expected_bytes_per_token: float | None = None
    baseline_blocks: float | None = None
    returned_blocks: float | None = None
    samples: int = 0


def stages(cache: Cache, max_model_len: int | None, output: int, max_requests: int, max_tokens: int) -> list[Stage]:
    """Steps 2 to 4, as far as the server and the user's limits allow: requests, and tokens of prompts and outputs, in
    all.
    """
    longest = min(max_model_len or cache.tokens, int(FILL * cache.tokens)) - output - 1
    many = min(CONCURRENT, max_requests - 2)
    left, requests = max_tokens, max_requests
    plan: list[Stage] = []
    for name, count, wanted, share in (
        ("one request", 1, SHORT_TOKENS, 1),
        (f"{CONCURRENT} concurrent requests", many, CONCURRENT_TOKENS, 2),
        ("one long request", 1, LONG_TOKENS, 1),
    ):
        if count > requests or count < (2 if wanted == CONCURRENT_TOKENS else 1):
            plan.append(Stage(name, (), f"--max-requests {max_requests} leaves too few"))
            continue
        room = int(FILL * cache.tokens) // count - output - 1
        affordable = left // share // count - output  # the last step gets what the third leaves: at least half
        length = min(wanted, longest, room, affordable)
        if length < LEAST_TOKENS:
            plan.append(
                Stage(
                    name,
                    (),
                    "the budget of --max-tokens is used up" if affordable < LEAST_TOKENS else "the cache is too small",
                )
            )
            continue
        left -= count * (length + output)
        requests -= count
        reduced = (
            [f"{count} requests instead of {CONCURRENT}"] if wanted == CONCURRENT_TOKENS and count < CONCURRENT else []
        )
        reduced += [f"{length} tokens instead of {wanted}"] if length < wanted else []
        plan.append(Stage(name, (CompletionRequest(length, output),) * count, ", ".join(reduced)))
    return plan


@dataclass(slots=True)
class _Steady:
    """One moment when every started request decodes."""

    level: BlockReading
    tokens: int
    expected: float


class Probe:
    """Runs the steps. ``layout``: the model's cache layout, None = plain attention is assumed; ``forced``: other
    traffic is tolerated.
    """

    def __init__(
        self,
        meter: Meter,
        api: Api,
        layout: CacheLayout | None,
        thresholds: Thresholds,
        *,
        forced: bool = False,
    ) -> None:
        self._meter = meter
        self._api = api
        self._layout = layout
        self._thresholds = thresholds
        self._forced = forced
        self._seed = time.time_ns()
        self.baseline: float = 0.0

    def busy(self) -> str | None:
        """Why the server is busy, or None; also measures the baseline."""
        levels = self._watch(BASELINE_SECONDS)
        if not levels:
            return "the page cannot be read"
        most = max(levels, key=lambda level: level.running + level.waiting)
        self.baseline = min(level.blocks for level in levels)
        return f"{most.running:.0f} running, {most.waiting:.0f} waiting" if most.running + most.waiting > 0 else None

    def run(self, plan: Sequence[Stage]) -> Iterator[Result]:
        """Run step 1 and then those of ``plan``."""
        yield self._first()
        short: float | None = None
        for number, stage in enumerate(plan, 2):
            if not stage.asks:
                yield Result(number, stage.name, "not measured", stage.note)
                continue
            result = self._measure(number, stage, short)
            if number == 2 and result.blocks and result.expected_blocks:
                short = result.blocks / result.expected_blocks
            yield result

    def _first(self) -> Result:
        cache = self._meter.cache
        share = self.baseline / cache.blocks
        text = f"{share:.1%} of {cache.blocks} blocks ({cache.tokens} tokens) are in use with nothing running"
        high = share >= self._thresholds["kv_held_ratio"]
        return Result(
            1,
            "baseline",
            "baseline too high" if high else "as expected",
            text + ("; somebody holds them: a leak, or a KV connector" if high else ""),
            baseline_blocks=self.baseline,
        )

    # --- measuring ----------------------------------------------------------------------------------------

    def _measure(self, number: int, stage: Stage, short: float | None) -> Result:
        samples, problem = self._send(stage)
        found = self._result(number, stage, samples, self._settle(self.baseline))
        verdict, text = self._judge(found, len(stage.asks), short)
        if problem:
            verdict, text = "not measured", problem
        return replace(found, verdict=verdict, text=text + (f" ({stage.note})" if stage.note else ""))

    def _send(self, stage: Stage) -> tuple[list[_Steady], str]:
        """Send the requests and sample until the last has ended: the samples, or why there are none that count."""
        running = [Completion(self._api, ask, self._seed + number) for number, ask in enumerate(stage.asks)]
        self._seed += len(running)
        for completion in running:
            completion.start()
        samples: list[_Steady] = []
        disturbed = False
        while any(completion.is_alive() for completion in running):
            before = [completion for completion in running if completion.decoding]
            tokens = {id(c): c.ask.prompt_tokens + c.answered for c in before}
            level = self._meter.read()
            if level is not None:
                disturbed = disturbed or level.running + level.waiting > len(running)
                steady = [c for c in before if c.decoding]
                if steady and len(steady) == len(before) and level.running == len(steady):
                    samples.append(_Steady(level, sum(tokens.values()), sum(self._blocks(n) for n in tokens.values())))
            time.sleep(SAMPLE_SECONDS)
        if refused := next((completion.error for completion in running if completion.error), None):
            return [], f"the server refused: {refused}"
        if disturbed and not self._forced:
            return [], "other requests arrived meanwhile"
        most = max((sample.tokens for sample in samples), default=0)
        return [sample for sample in samples if sample.tokens >= most / 2], ""  # not the first or last few of many

    def _settle(self, base: float) -> float:
        """The blocks after the step, once they are back at ``base`` or ``RETURN_SECONDS`` have passed."""
        end = time.monotonic() + RETURN_SECONDS
        level = self._meter.read()
        while (level is None or level.blocks > base + 0.5) and time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
            level = self._meter.read() or level
        return level.blocks if level is not None else base

    def _blocks(self, tokens: int) -> float:
        return self._layout.blocks(tokens) if self._layout is not None else -(-tokens // self._meter.cache.block_size)

    def _result(self, number: int, stage: Stage, samples: list[_Steady], returned: float) -> Result:
        base = self.baseline
        if not samples:
            return Result(number, stage.name, "not measured", "", baseline_blocks=base, returned_blocks=returned)
        grown = statistics.mean(sample.level.blocks - base for sample in samples)
        tokens = statistics.mean(sample.tokens for sample in samples)
        layout, size = self._layout, self._meter.cache.block_size
        return Result(
            number,
            stage.name,
            "as expected",
            "",
            tokens,
            grown,
            statistics.mean(sample.expected for sample in samples),
            grown * size / tokens,
            None if layout is None else grown * layout.block_bytes / tokens,
            None if layout is None else layout.bytes_per_token,
            base,
            returned,
            len(samples),
        )

    # --- judging ------------------------------------------------------------------------------------------

    def _judge(self, found: Result, requests: int, short: float | None) -> tuple[Verdict, str]:
        base, returned = found.baseline_blocks or 0.0, found.returned_blocks or 0.0
        if returned > base + 0.5:
            return (
                "leak",
                (
                    f"{returned - base:.0f} blocks are still in use {RETURN_SECONDS:.0f} s after the end (or the engine"
                    " made no step since: gauges freeze then; send one request and look again)"
                ),
            )
        if found.blocks is None or found.expected_blocks is None or found.slots_per_token is None:
            return "not measured", "answered faster than the page could be read: give a larger --output"
        said = (
            f"{found.blocks:.0f} blocks for {found.tokens:.0f} tokens in flight, {found.expected_blocks:.0f} expected; "
            f"{found.slots_per_token:.2f} token slots a token"
            + (
                ""
                if found.bytes_per_token is None or found.expected_bytes_per_token is None
                else (
                    f", {grouped(found.bytes_per_token)} bytes a token on each GPU (formula"
                    f" {grouped(found.expected_bytes_per_token)})"
                )
            )
            + "; back to the baseline"
        )
        allowance = TOLERANCE * found.expected_blocks + requests
        if found.blocks > found.expected_blocks + allowance:
            factor = found.blocks / found.expected_blocks
            linear = short is not None and factor > short * (1 + TOLERANCE)
            return "duplication", said + (
                f"; growth is not linear: {factor / short:.1f} times that of one short request"
                if linear and short
                else f"; {factor:.1f} times what is expected"
            )
        if found.blocks < found.expected_blocks - allowance:
            why = (
                "a hybrid model takes less than full attention: give --model-config"
                if self._layout is None
                else "is --model-config this model's, and --tp right?"
            )
            return "less than expected", f"{said}; {why}"
        return "as expected", said

    def _watch(self, seconds: float) -> list[BlockReading]:
        end = time.monotonic() + seconds
        levels: list[BlockReading] = []
        while True:
            if (level := self._meter.read()) is not None:
                levels.append(level)
            if time.monotonic() >= end:
                return levels
            time.sleep(SAMPLE_SECONDS)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All steps of one server. ``busy``: with what it was when they began."""

    server: str
    model: str
    cache: Cache
    results: tuple[Result, ...]
    busy: str | None = None

    @property
    def fine(self) -> bool:
        """Whether every step was measured and is as expected."""
        return all(result.verdict == "as expected" for result in self.results)
