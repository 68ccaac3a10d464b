"""One vLLM V1 engine as a discrete-event model: continuous batching over a block pool, in simulated time.

What is modelled, after vLLM 0.33 (scheduler defaults of a GPU server):

* first come, first served; at most ``max_num_seqs`` running and ``max_num_batched_tokens`` tokens a step; chunked
  prefill, decodes first;
* a request is admitted only if its whole prompt fits into free blocks (``scheduler_reserve_full_isl``), above the
  watermark; the head of the queue blocks the rest;
* when a decode needs a block and none is free, the newest running request is preempted: its blocks are freed, it goes
  to the front of the queue and computes everything again; such a step admits nobody;
* a step lasts as long as measured (``model``); the CPU's part of it can be stretched (``host_factor``);
* numbers are booked when vLLM books them: gauges after a step, the whole prompt at the first token, queue and
  end-to-end times when a request finishes. Without async scheduling a preemption is booked with the next output of
  its victim, which can be tens of seconds later.

Not modelled: prefix-cache hits, aborts by clients, parallel sampling.

Between events (an arrival, a finish, a block shortage) all steps are alike, so the engine leaps over them at once:
a calm day costs seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from lab.demo.activity import Totals, Work, cost
from lab.demo.batch import DecodeBatch, steps_within
from lab.demo.counters import Books
from lab.demo.requests import EngineConfig, SimulatedRequest, SimulationError

TOKENIZE_SECONDS: Final = 0.006  # arrival to queued, with a CPU that keeps up
DETOKENIZE_SECONDS: Final = 0.002  # engine output to client
API_CPU_SECONDS_PER_TOKEN: Final = 40e-6
API_CPU_SECONDS_PER_REQUEST: Final = 2e-3
API_CPU_SECONDS_PER_PAGE: Final = 6e-3


@dataclass(slots=True)
class _Step:
    """A step in flight and its result. A stall moves ``end`` but adds no work."""

    start: float
    end: float = 0.0
    decoding: int = 0
    prefill_tokens: int = 0
    work: Work = field(default_factory=lambda: Work(0, 0.0, 0.0, 0, 0))
    prefilled: list[SimulatedRequest] = field(default_factory=list)
    preempted: list[SimulatedRequest] = field(default_factory=list)


class SimulatedEngine:
    """One engine from ``start`` (seconds) on. Drive it with ``submit`` and ``advance``."""

    def __init__(self, config: EngineConfig, start: float) -> None:
        config.check()
        self.config = config
        self.start = start
        self.now = start  # when the last step ended, or until when the engine is known to be idle
        self.host_factor = 1.0  # stretches the CPU's part of a step and of a request; 1 = the CPU keeps up
        self.stalled = False
        self.books = Books(config.max_model_len)
        self._done = Totals()
        self.usable_blocks = config.num_blocks - 1
        self.free_blocks = self.usable_blocks
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._batch = DecodeBatch(config.block_size)
        self._arrivals: deque[SimulatedRequest] = deque()  # with the API server, not yet with the engine
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: dict[int, SimulatedRequest] = {}  # in order of admission
        self._prefilling: list[SimulatedRequest] = []
        self._step: _Step | None = None
        self._numbers = 0

    # --- driving --------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that clients wait for."""
        return len(self._arrivals) + len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """Requests in the scheduler's running list now (the gauge shows the end of the last step)."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the scheduler's queue now, preempted ones included."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Running requests that are past their prompt."""
        return self._batch.size

    def submit(self, request: SimulatedRequest) -> None:
        """Send a request; arrivals must come in order of time. One longer than the context is answered with 400."""
        if self._arrivals and request.arrival < self._arrivals[-1].arrival:
            raise SimulationError("requests must be submitted in order of arrival")
        if request.prompt_tokens < 1 or request.prompt_tokens >= self.config.max_model_len:
            self.books.http["4xx"] += 1
            return
        self._numbers += 1
        request.number = self._numbers
        room = self.config.max_model_len - request.prompt_tokens
        request.output_target = max(1, min(request.output_tokens, request.max_tokens, room))
        self._arrivals.append(request)
        self.books.cpu_seconds += API_CPU_SECONDS_PER_REQUEST

    def advance(self, to: float) -> None:
        """Run until ``to``. A step that ends later stays in flight: nothing of it is booked yet."""
        if self.stalled:
            return
        while True:
            if self._step is not None:
                if self._step.end > to:
                    return
                self._complete(self._step)
            self._accept()
            if not self._running and not self._waiting:
                if not self._arrivals or self._due(self._arrivals[0]) > to:
                    self.now = max(self.now, to)
                    return
                self.now = max(self.now, self._due(self._arrivals[0]))
                continue
            leap = self._leap_length(to)
            if leap > 0:
                self._leap(leap)
            else:
                self._step = self._schedule()

    def stall(self) -> None:
        """Stop stepping (a deadlock): nothing is booked any more, clients keep waiting."""
        self.stalled = True

    def resume(self, at: float) -> None:
        """End a stall at time ``at``."""
        self.stalled = False
        if self._step is not None:
            self._step.end = max(self._step.end, at)
        else:
            self.now = max(self.now, at)

    def work_until(self, at: float) -> Totals:
        """What the GPU has done by ``at``, the step in flight by its share. A stalled engine does nothing more."""
        if self._step is None or self.stalled:
            return self._done
        share = min(1.0, max(0.0, (at - self._step.start) / self._step.work.seconds))
        return self._done.plus(cost(self.config.model, self._step.work), share)

    # --- queueing -------------------------------------------------------------------------------------------

    def _due(self, request: SimulatedRequest) -> float:
        return request.arrival + TOKENIZE_SECONDS * self.host_factor

    def _accept(self) -> None:
        """Move what the API server has tokenized by now into the engine's queue."""
        limit = self.config.max_num_queued_reqs
        while self._arrivals and self._due(self._arrivals[0]) <= self.now:
            request = self._arrivals.popleft()
            if limit is not None and len(self._waiting) >= limit:
                self.books.rejected_requests += 1
                self.books.http["5xx"] += 1
                continue
            request.queued = self._due(request)
            self._waiting.append(request)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _head_fits(self) -> bool:
        """Whether the head of the queue may run: a place in the batch, and room for all of it above the watermark."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return False
        watermark = self._watermark_blocks if self._running else 0
        return self._blocks(self._waiting[0].known_tokens) + watermark <= self.free_blocks

    # --- leaping over equal steps ---------------------------------------------------------------------------

    def _decode_seconds(self) -> tuple[float, float]:
        """Duration of the next step if it only decodes, and by how much each further one is longer."""
        model, size = self.config.model, self._batch.size
        stretch = (self.host_factor - 1) * model.gap_ms(size)
        first = model.decode_ms(size, self._batch.slots + size) + stretch
        return first / 1000, model.step_kv_ms * size / 1000

    def _leap_length(self, to: float) -> int:
        """How many steps ahead are plain decoding: nobody joins, leaves or is preempted. 0 = take a single step."""
        if not self._batch.size or self._prefilling or self._head_fits():
            return 0
        finish = self._batch.next_finish()
        assert finish is not None  # the batch is not empty
        steps = min(finish - self._batch.steps - 1, self._batch.steps_within(self.free_blocks))
        if steps < 1:
            return 0
        first, slope = self._decode_seconds()
        if self._arrivals:
            steps = min(steps, steps_within(self._due(self._arrivals[0]) - self.now, first, slope) + 1)
        return min(steps, steps_within(to - self.now, first, slope))

    def _leap(self, steps: int) -> None:
        """Do ``steps`` plain decoding steps at once."""
        batch, books = self._batch, self.books
        first, slope = self._decode_seconds()
        books.inter_token.observe_ramp(first, slope, steps, batch.size)
        books.iteration.observe(batch.size, steps)
        self._book_tokens(batch.size * steps)
        seconds = steps * first + slope * steps * (steps - 1) / 2
        kv_read = steps * (batch.slots + batch.size) + batch.size * steps * (steps - 1) // 2
        gap = steps * self.config.model.gap_ms(batch.size) * self.host_factor / 1000
        self._did(Work(steps, seconds, gap, kv_read, batch.size * steps))
        self.free_blocks -= batch.blocks_over(steps)
        batch.steps += steps
        self.now += seconds
        self._set_gauges()

    # --- one step -------------------------------------------------------------------------------------------

    def _schedule(self) -> _Step:
        """Decide what the next step does and start it."""
        step = _Step(self.now)
        while self._batch.blocks_needed() > self.free_blocks:
            self._preempt_newest(step)
        self.free_blocks -= self._batch.blocks_needed()
        budget = self.config.max_num_batched_tokens - self._batch.size
        budget = self._continue_prefills(step, budget)
        if not step.preempted:
            self._admit(step, budget)
        self._time(step)
        return step

    def _time(self, step: _Step) -> None:
        """Work out how long the step takes."""
        model = self.config.model
        step.decoding = self._batch.size
        kv_tokens = self._batch.slots + step.decoding
        plain_gap = model.gap_ms(step.decoding + len(self._prefilling)) / 1000
        gap = plain_gap * self.host_factor
        prefill = model.prefill_ms(step.decoding, step.prefill_tokens) / 1000
        seconds = model.decode_ms(step.decoding, kv_tokens) / 1000 - plain_gap + gap + prefill
        step.work = Work(1, seconds, gap, kv_tokens, step.decoding, step.prefill_tokens, prefill)
        step.end = step.start + seconds

    def _preempt_newest(self, step: _Step) -> None:
        """Preempt the newest running request: back to the front of the queue, to be computed again."""
        _, victim = self._running.popitem()
        if victim in self._prefilling:
            self._prefilling.remove(victim)
            self.free_blocks += self._blocks(victim.computed)
        else:
            self.free_blocks += self._batch.remove(victim)
            victim.last_token = self.now
        victim.computed = 0
        victim.preemptions += 1
        victim.unbooked_preemptions += 1
        self._waiting.appendleft(victim)
        step.preempted.append(victim)

    def _continue_prefills(self, step: _Step, budget: int) -> int:
        """Give prompts that have begun their next chunk; returns the tokens left."""
        for request in list(self._prefilling):
            chunk = min(request.known_tokens - request.computed, budget)
            while request in self._prefilling and self._chunk_blocks(request, chunk) > self.free_blocks:
                self._preempt_newest(step)
            if request in self._prefilling and chunk > 0:
                budget -= self._compute(step, request, chunk)
        return budget

    def _admit(self, step: _Step, budget: int) -> None:
        """Let the queue in, head first, until a place, a block or the token budget is missing."""
        while budget > 0 and self._head_fits():
            request = self._waiting.popleft()
            self._running[request.number] = request
            self._prefilling.append(request)
            if request.scheduled is None:
                request.scheduled = self.now
                self.books.prefix_queries += request.prompt_tokens
            budget -= self._compute(step, request, min(request.known_tokens, budget))

    def _chunk_blocks(self, request: SimulatedRequest, chunk: int) -> int:
        return self._blocks(request.computed + chunk) - self._blocks(request.computed)

    def _compute(self, step: _Step, request: SimulatedRequest, chunk: int) -> int:
        """Put ``chunk`` prompt tokens into the step; returns ``chunk``."""
        self.free_blocks -= self._chunk_blocks(request, chunk)
        request.computed += chunk
        step.prefill_tokens += chunk
        if request.computed == request.known_tokens:
            step.prefilled.append(request)
        return chunk

    def _complete(self, step: _Step) -> None:
        """Book the result of a finished step."""
        self._step = None
        self.now = step.end
        self._batch.steps += 1
        books = self.books
        if step.decoding:
            books.inter_token.observe(step.end - step.start, step.decoding)
        computed = sum(r.prompt_tokens for r in step.prefilled if r.first_token is None)
        outputs = step.decoding + len(step.prefilled)
        if outputs:
            books.iteration.observe(outputs + computed)
        self._book_tokens(outputs)
        for request in step.prefilled:
            self._first_output(request)
        for request in self._batch.pop_finished():
            self.free_blocks += self._batch.remove(request)
            self._finish(request)
        if self.config.async_scheduling:
            for request in step.preempted:
                self._book_preemptions(request)
        self._did(step.work)
        self._set_gauges()

    # --- booking --------------------------------------------------------------------------------------------

    def _first_output(self, request: SimulatedRequest) -> None:
        """A prefill is done: the first token, or the next one of a request that had been preempted."""
        books = self.books
        self._prefilling.remove(request)
        if request.first_token is None:
            request.first_token = self.now
            books.first_token.observe(self.now + self._reply_delay - request.arrival)
            books.prompt_tokens += request.prompt_tokens
        else:
            assert request.last_token is not None  # set when it was preempted
            books.inter_token.observe(self.now - request.last_token)
        self._book_preemptions(request)
        slots = request.known_tokens
        request.outputs += 1
        request.last_token = self.now
        if request.outputs >= request.output_target:
            self.free_blocks += self._blocks(slots)
            self._finish(request)
        else:
            self._batch.add(request, slots)

    @property
    def _reply_delay(self) -> float:
        return DETOKENIZE_SECONDS * self.host_factor

    def _finish(self, request: SimulatedRequest) -> None:
        """Book a finished request and answer its client."""
        del self._running[request.number]
        books = self.books
        assert request.scheduled is not None
        assert request.first_token is not None
        request.finish_reason = "length" if request.outputs < request.output_tokens else "stop"
        books.finished[request.finish_reason] += 1
        elapsed = self.now + self._reply_delay - request.arrival
        books.e2e.observe(elapsed)
        books.queue.observe(request.scheduled - request.queued)
        books.prefill.observe(request.first_token - request.scheduled)
        books.decode.observe(self.now - request.first_token)
        books.inference.observe(self.now - request.scheduled)
        if request.outputs > 1:
            books.per_output_token.observe((self.now - request.first_token) / (request.outputs - 1))
        books.request_prompt.observe(request.prompt_tokens)
        books.request_output.observe(request.outputs)
        books.request_max_output.observe(request.outputs)
        books.params_n.observe(1)
        books.params_max_tokens.observe(request.max_tokens)
        books.request_preemptions.observe(request.preemptions)
        books.request_computed.observe(request.prompt_tokens)
        books.http["2xx"] += 1
        books.http_fine.observe(elapsed)
        books.http_coarse.observe(elapsed)
        if request.on_finish is not None:
            request.on_finish(request)

    def _book_tokens(self, tokens: int) -> None:
        self.books.generation_tokens += tokens
        self.books.cpu_seconds += tokens * API_CPU_SECONDS_PER_TOKEN

    def _book_preemptions(self, request: SimulatedRequest) -> None:
        self.books.preemptions += request.unbooked_preemptions
        request.unbooked_preemptions = 0

    def _did(self, work: Work) -> None:
        self._done = self._done.plus(cost(self.config.model, work), 1.0)

    def _set_gauges(self) -> None:
        self.books.running = len(self._running)
        self.books.waiting = len(self._waiting)
        self.books.kv_usage = 1 - self.free_blocks / self.usable_blocks
