"""The type of a finding: a sentence about an engine that is true, false or unknown, and what it is found in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter

from kvpressure.diagnosis.evaluate import Answer, Grade
from kvpressure.diagnosis.gpu_facts import GpuFacts
from kvpressure.model.frozen import frozen
from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds


class Recent:
    """The queue over the recent samples: number of samples, share with a queue (0-1), mean and most requests
    waiting.
    """

    __slots__ = ("samples", "waiting_mean", "waiting_most", "waiting_share")

    def __init__(self, waiting: Sequence[float]) -> None:
        self.samples = len(waiting)
        self.waiting_share = sum(1 for value in waiting if value > 0) / len(waiting) if waiting else None
        self.waiting_mean = sum(waiting) / len(waiting) if waiting else None
        self.waiting_most = max(waiting, default=None)


class View:
    """Inputs of every finding: signals, recent queue, thresholds, number of readings (``None`` = unknown) and the
    configured gpu_memory_utilization (0-1); ``held`` and ``ahead``: what is followed from tick to tick; ``answer``: the
    published verdict, for findings with ``after_verdict``.
    """

    __slots__ = ("_gpu", "ahead", "answer", "held", "readings", "recent", "s", "t", "utilization")

    def __init__(
        self, s: Signals, recent: Recent, t: Thresholds, readings: int | None, utilization: float | None = None
    ) -> None:
        self.s, self.recent, self.t, self.readings, self.utilization = s, recent, t, readings, utilization
        self.held: bool | None = None
        self.ahead: bool | None = None
        self.answer = Answer("unknown", Grade.NOTHING)
        self._gpu: GpuFacts | None = None

    @property
    def gpu(self) -> GpuFacts:
        """What is known about the GPUs' activity."""
        if self._gpu is None:
            self._gpu = GpuFacts(self.s.compute, self.t)
        return self._gpu


@frozen
class Finding:
    """One sentence about an engine. ``title`` states it and ``denied`` its opposite, in docs and on the page; ``seen``:
    the numbers behind either, the most telling first; ``needs``: numbers without which it is unknown; ``why``: the
    reason where none of them is missing; ``question``: what is unknown then ("" = whether ``title``). ``{names}`` are
    numbers, words of the engine or thresholds; in ``seen`` and ``why``, a part between commas with an unknown number is
    left out.

    ``fresh``: unknown while the engine's metrics are stale. ``after_verdict``: reads the verdict, so no rule may read
    it. ``published``: as ``kvpressure_finding``, because a rule or a dashboard reads it. ``serious``: bad news by
    itself. ``runbook``: the page that explains it ("" = that of the verdict).
    """

    name: str
    title: str
    denied: str
    find: Callable[[View], bool | None]
    seen: str = ""
    why: str = ""
    question: str = ""
    needs: tuple[str, ...] = ()
    fresh: bool = False
    after_verdict: bool = False
    published: bool = False
    serious: bool = False
    runbook: str = ""

    def sentence(self, value: bool | None, numbers: Mapping[str, str], missing: str = "") -> str:
        """The sentence for this value. ``numbers``: in words, "" = unknown or nothing to say; ``missing``: which of
        ``needs`` are.
        """
        if value is None:
            question = (self.question or f"whether {self.title}").format_map(numbers)
            return f"{question}: unknown ({missing or parts_known(self.why, numbers)})"
        said, seen = (self.title if value else self.denied).format_map(numbers), parts_known(self.seen, numbers)
        return f"{said}: {seen}" if seen else said


def names_in(text: str) -> Iterable[str]:
    """The names in braces, in order."""
    return (name for _, name, _, _ in Formatter().parse(text) if name)


def parts_known(text: str, numbers: Mapping[str, str]) -> str:
    """The parts of a text, without those that name something unknown."""
    parts = (part for part in text.split(", ") if all(numbers[name] for name in names_in(part)))
    return ", ".join(part.format_map(numbers) for part in parts)


def least(value: float | None, at_least: float) -> bool | None:
    """Whether a value is at least ``at_least``; ``None`` if it is unknown."""
    return None if value is None else value >= at_least
