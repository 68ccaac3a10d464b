"""What being watched costs an engine: CPU of its API server and tokens per second, by how it is watched.

CPU is user and system time of the API server's process from ``/proc/PID/stat``, as a share of one core (its event loop
is one thread). Idle servers are compared side by side at the same time; under load one server is watched in turns of
ten seconds, forth and back, so that a drift hits every way alike; the other exporters are stopped meanwhile.
Differences are taken turn by turn, at the same number of tokens, and given with their 95 % confidence interval.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bed import Exporter, Server, exporter, loaded, ready, server

NOBODY, SECOND, ADAPTIVE, TEN = "nobody", "every second", "adaptive", "ten, adaptive"
EVERY_SECOND = ("--engine.pace", "fixed")
CALM = ("--engine.pace", "fixed", "--interval", "5")  # the adaptive pace of a calm engine, at once
IDLE_SECONDS = 60.0
TURN_SECONDS, ROUNDS = 10.0, 6
BUDGETS = {"idle": 0.005, "steady": 0.005, "pressure": 0.015}  # of a core; the calm and pressure
STUDENT = {5: 2.571}  # 97.5 % quantile of t by degrees of freedom


@dataclass(frozen=True)
class Turn:
    """What one turn used: CPU as a share of a core, tokens per second, pages that were asked for."""

    cpu: float
    tokens: float
    pages: int


@dataclass
class Cost:
    """All turns of a phase by the way of watching."""

    phase: str
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def seconds(self, way: str) -> float:
        """How long this way was measured."""
        return IDLE_SECONDS if self.phase == "idle" else TURN_SECONDS * len(self.turns[way])

    def cpu(self, way: str) -> float:
        """Mean share of a core."""
        return statistics.mean(turn.cpu for turn in self.turns[way])

    def extra_cpu(self, way: str) -> tuple[float, float]:
        """Additional share of a core at the same number of tokens, and half its confidence interval (0 for
        one turn).
        """
        per_token = self.cpu_per_token()
        return interval(
            [
                a.cpu - b.cpu - per_token * (a.tokens - b.tokens)
                for a, b in zip(self.turns[way], self.turns[NOBODY], strict=True)
            ]
        )

    def cpu_per_token(self) -> float:
        """What a token costs the API server, by the turns of each way among themselves: some turns have more tokens
        than others, whoever watches.
        """
        above = below = 0.0
        for turns in self.turns.values():
            mean, cpu = statistics.mean(turn.tokens for turn in turns), statistics.mean(turn.cpu for turn in turns)
            above += sum((turn.tokens - mean) * (turn.cpu - cpu) for turn in turns)
            below += sum((turn.tokens - mean) ** 2 for turn in turns)
        return above / below if below else 0.0

    def fewer_tokens(self, way: str) -> tuple[float, float]:
        """Relative change of the tokens per second, and half its confidence interval."""
        base = statistics.mean(turn.tokens for turn in self.turns[NOBODY])
        change, half = interval([a.tokens - b.tokens for a, b in zip(self.turns[way], self.turns[NOBODY], strict=True)])
        return change / base, half / base

    def pages(self, way: str) -> float:
        """Pages a minute."""
        return 60 * sum(turn.pages for turn in self.turns[way]) / self.seconds(way)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of the 95 % confidence interval by Student."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def idle_cost(workdir: Path, model: str, first: Server) -> Cost:
    """Fresh servers of the same kind side by side: ``first``, and three that start here, one watched by ten."""
    watched = {SECOND: [EVERY_SECOND], ADAPTIVE: [CALM], TEN: [CALM] * 10}
    with ExitStack() as stack:
        others = {way: stack.enter_context(server(f"idle-{n}", workdir, model)) for n, way in enumerate(watched)}
        ready(first, *others.values())
        watchers = [
            stack.enter_context(exporter(others[way], *flags)) for way, each in watched.items() for flags in each
        ]
        time.sleep(5)
        servers = {NOBODY: first, **others}
        before = {way: (of.cpu_seconds(), of.pages_served()) for way, of in servers.items()}
        begin = time.monotonic()
        time.sleep(IDLE_SECONDS)
        took = time.monotonic() - begin
        turns = {
            way: [Turn((of.cpu_seconds() - before[way][0]) / took, 0.0, of.pages_served() - before[way][1])]
            for way, of in servers.items()
        }
        for watcher in watchers:
            watcher.pause()
        return Cost("idle", turns)


def loaded_cost(phase: str, of: Server, watchers: Mapping[str, Exporter | None], load: str) -> Cost:
    """One server under ``load``, watched in turns by each of ``watchers`` (paused before and after)."""
    turns: dict[str, list[Turn]] = {way: [] for way in watchers}
    marks: list[tuple[str, float, float, float, int]] = []
    with loaded(of, load, 30 + ROUNDS * len(watchers) * (TURN_SECONDS + 1)):
        time.sleep(6)  # the load builds up
        for n in range(ROUNDS):
            for way in list(watchers)[:: -1 if n % 2 else 1]:
                marks.append(_turn(of, way, watchers[way]))
    steps = of.steps()
    for way, begin, end, cpu, pages in marks:
        tokens = sum(step.decoding for step in steps if begin < step.t <= end)
        turns[way].append(Turn(cpu / (end - begin), tokens / (end - begin), pages))
    cost = Cost(phase, turns)
    print(f"  cost, {phase}:", *(f"{way} {cost.cpu(way):.2%}" for way in watchers), flush=True)
    return cost


def _turn(of: Server, way: str, watcher: Exporter | None) -> tuple[str, float, float, float, int]:
    """One way of watching for one turn: when it was, CPU seconds used, pages served."""
    if watcher is not None:
        watcher.resume()
    begin, cpu, pages = time.time(), of.cpu_seconds(), of.pages_served()
    time.sleep(TURN_SECONDS)
    end, used, served = time.time(), of.cpu_seconds() - cpu, of.pages_served() - pages
    if watcher is not None:
        watcher.pause()
    return way, begin, end, used, served


ABOUT = f"""
## What being watched costs

CPU of the API server's process (`/proc/PID/stat`) as a share of one core, the most that its event loop can use. The budgets are
shares of that core too ({BUDGETS["steady"]:.1%} calm, {BUDGETS["pressure"]:.1%} under pressure): an idle server uses next to none, of which any page is a
large part. *idle*: four fresh servers of the same kind at the same time, {IDLE_SECONDS:.0f} s. *steady* (8 clients) and *pressure* (48 clients,
full cache): one server in turns of {TURN_SECONDS:.0f} s, forth and back, {ROUNDS} turns each way, the other exporters stopped. Differences against
"nobody" turn by turn, those of CPU at the same number of tokens, with their 95 % confidence interval. Under pressure the adaptive
pace is one page a second. Server, clients and exporter share two cores, so the exporter's own CPU is in the change of tokens/s.

| load | watched | pages a minute | CPU | more than unwatched | of its own CPU | tokens/s | change |
|---|---|---|---|---|---|---|---|"""  # noqa: E501


def table(costs: list[Cost]) -> list[str]:
    """The section of the report."""
    lines = ABOUT.splitlines()
    for cost in costs:
        for way, turns in cost.turns.items():
            cells = [cost.phase, way, f"{cost.pages(way):.0f}", f"{cost.cpu(way):.2%}"]
            extra, half = cost.extra_cpu(way)
            near = f" ± {half:.2%}" if half else ""
            cells += ["", ""] if way == NOBODY else [f"{extra:+.2%}{near}", f"{extra / cost.cpu(NOBODY):+.0%}"]
            tokens = statistics.mean(turn.tokens for turn in turns)
            change, half = cost.fewer_tokens(way) if tokens else (0.0, 0.0)
            cells += (
                ["", ""] if not tokens else [f"{tokens:.0f}", "" if way == NOBODY else f"{change:+.1%} ± {half:.1%}"]
            )
            lines.append("| " + " | ".join(cells) + " |")
    return lines
