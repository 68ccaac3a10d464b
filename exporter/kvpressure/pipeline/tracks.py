"""What the pipeline keeps of each container, GPU and engine from one snapshot to the next; all of it bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from kvpressure.args import EngineArgs, from_log
from kvpressure.diagnosis.diagnose import Diagnoser
from kvpressure.diagnosis.longest import LongestRequest
from kvpressure.readings import EngineKey, EnginePage, GpuReading, LogLine
from kvpressure.signals.engine import EngineTracker
from kvpressure.signals.host import ContainerWindow
from kvpressure.signals.logevents import match, strip
from kvpressure.signals.score import GpuWindow
from kvpressure.thresholds import Thresholds

MAX_EVENTS_KEPT: Final = 512  # of one kind
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})  # errors of the application; the GPU is healthy
_NO_FIGURES: Final[Mapping[str, float]] = {}


class ContainerTrack:
    """A container: its window, its log events, and the facts its start-up lines told."""

    __slots__ = (
        "_events",
        "_log_window",
        "_oom",
        "counts",
        "facts",
        "logged",
        "seen_log",
        "seen_t",
        "version",
        "window",
    )

    def __init__(self, thresholds: Thresholds) -> None:
        self.window = ContainerWindow()
        self.counts: dict[str, int] = {}
        self._log_window = thresholds["log_window_seconds"]
        self._events: dict[str, deque[float]] = {}  # times by event: a chatty one must not push out a rare one
        self.facts: dict[str, float] = {}
        self.logged: EngineArgs | None = None
        self.version: str | None = None  # vLLM's own word
        self._oom: tuple[float, Mapping[str, float]] | None = None  # when an out-of-memory text came, its figures
        self.seen_log = False
        self.seen_t = float("-inf")

    def take_line(self, t: float, line: LogLine) -> None:
        """Recognise a log line, count its event and keep the facts it carries."""
        self.seen_log, self.seen_t = True, t
        event = match(strip(line.line))
        if event is None:
            return
        self.counts[event.event] = self.counts.get(event.event, 0) + 1
        self._events.setdefault(event.event, deque(maxlen=MAX_EVENTS_KEPT)).append(t)
        if event.event == "args":
            self.logged = from_log(line.line)
        if event.event == "engine_config":
            self.version = str(event.values["version"])
        values = {name: value for name, value in event.values.items() if isinstance(value, int | float)}
        self.facts.update(_facts(event.event, values))
        if event.event == "cuda_oom" and values:
            self._oom = (t, values)

    def recent_events(self, now: float) -> dict[str, int]:
        """Events that are still news, by name."""
        counted = {name: sum(1 for t in times if self._news(t, now)) for name, times in self._events.items()}
        return {name: count for name, count in counted.items() if count}

    def recent_oom(self, now: float) -> Mapping[str, float]:
        """Figures of the last out-of-memory text that has some, while it is news."""
        return self._oom[1] if self._oom is not None and self._news(self._oom[0], now) else _NO_FIGURES

    def _news(self, t: float, now: float) -> bool:
        return now - self._log_window <= t <= now


def _facts(event: str, values: Mapping[str, float]) -> dict[str, float]:
    """What a start-up line says that no metric carries; bytes are of one worker, i.e. per GPU."""
    names: Mapping[str, Mapping[str, str]] = {
        "pool_bytes": {"bytes": "pool_bytes"},
        "weights_bytes": {"bytes": "weights_bytes"},
        "graphs_bytes": {"bytes": "graphs_bytes"},
        "max_num_batched_tokens": {"tokens": "max_num_batched_tokens"},
        "max_model_len": {"tokens": "max_model_len"},
        "engine_config": {"max_model_len": "max_model_len"},
        "capacity": {"tokens": "capacity_tokens", "max_model_len": "max_model_len"},
        "breakdown": {
            "activation_bytes": "activations_bytes",
            "graphs_bytes": "graphs_bytes",
            "kv_bytes": "pool_bytes",
        },
    }
    return {
        fact: values[name]
        for name, fact in names.get(event, {}).items()
        if name in values and (values[name] > 0 or fact.endswith("_bytes"))
    }


class GpuTrack:
    """A GPU: its activity window and the faults seen lately."""

    __slots__ = ("_fault_window", "_faults", "_xids", "seen_t", "window")

    def __init__(self, thresholds: Thresholds) -> None:
        self.window = GpuWindow()
        self._fault_window = thresholds["gpu_fault_window_seconds"]
        self._xids: Mapping[int, int] | None = None
        self._faults: deque[float] = deque(maxlen=MAX_EVENTS_KEPT)
        self.seen_t = float("-inf")

    def observe(self, t: float, gpu: GpuReading) -> None:
        """Take a reading; new hardware XIDs and a lost device are faults."""
        self.seen_t = t
        self.window.observe(t, gpu)
        before = self._xids or {}
        for xid, count in gpu.xid_errors.items():
            if self._xids is not None and count > before.get(xid, 0) and xid not in APPLICATION_XIDS:
                self._faults.append(t)
        self._xids = dict(gpu.xid_errors)
        if gpu.error in ("gpu_lost", "lost", "reset_required"):
            self._faults.append(t)

    def recent_faults(self, now: float) -> int:
        """Faults that still count."""
        return sum(1 for t in self._faults if now - self._fault_window <= t <= now)


class EngineTrack:
    """An engine: tracker, diagnoser and identity."""

    __slots__ = ("container", "counters", "diagnoser", "gpus", "key", "longest", "named", "seen_t", "target", "tracker")

    def __init__(self, key: EngineKey, page: EnginePage, thresholds: Thresholds, named: tuple[str, str]) -> None:
        self.key = key
        self.named = named  # model and engine as the page calls them
        self.tracker = EngineTracker(thresholds)
        self.diagnoser = Diagnoser(thresholds)
        self.longest = LongestRequest(thresholds)
        self.target, self.container, self.gpus = page.target, page.container, page.gpus
        self.seen_t = page.time
        self.counters: Mapping[str, float] = {}
