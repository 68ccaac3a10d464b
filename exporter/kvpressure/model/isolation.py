"""Each engine, GPU, container, target and source is handled apart, so that an exception of one does not affect the
others.

A ``Guard`` runs one subject's work. When that raises, it counts and logs the failure, and the subject is published as
unknown, with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import ContainerReading, Discovered, EngineKey

log = logging.getLogger(__name__)

TICK: Final = "tick"  # taking in what was read, signals and diagnosis
RENDER: Final = "render"  # metrics, page and JSON
STAGES: Final = (TICK, RENDER)

ENGINE: Final = "engine"
GPU: Final = "gpu"
CONTAINER: Final = "container"
TARGET: Final = "target"
SOURCE: Final = "source"
NODE: Final = "node"  # what belongs to none of the others

_REASONS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (ArithmeticError, "arithmetic"),
    (LookupError, "lookup"),
    (RecursionError, "resources"),
    (MemoryError, "resources"),
    (ValueError, "value"),
    (TypeError, "type"),
    (AttributeError, "type"),
)
INTERNAL: Final = "internal"
REASONS: Final = (*dict.fromkeys(reason for _, reason in _REASONS), INTERNAL)

MAX_COUNTED: Final = 256  # failures counted and logged apart; those of further subjects count as "other"
MAX_NAME: Final = 256
OTHER: Final = "other"

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")


@frozen
class Failure:
    """Which subject failed, at which stage, and why (one of ``REASONS``)."""

    kind: str
    name: str
    stage: str
    reason: str

    @property
    def text(self) -> str:
        """The failure as a sentence."""
        return (
            f"kvpressure itself failed on this {self.kind} (stage: {self.stage}, reason: {self.reason}); its log names"
            " the place"
        )


def engine_name(key: EngineKey) -> str:
    """``namespace/pod/model/engine``, as in failures; no namespace on a bare host."""
    return "/".join(filter(None, (key.namespace, key.pod, key.model_name, key.engine)))


def container_name(one: ContainerReading | Discovered) -> str:
    """``namespace/pod/container``, as in failures; the name alone on a bare host."""
    return "/".join(filter(None, (one.namespace, one.pod, one.container)))


class FailureLog:
    """Logs what a subject raised once by subject, stage and type, and at most ``MAX_COUNTED`` in all. Thread-safe."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def add(self, subject: str, stage: str, error: Exception) -> None:
        """Log ``error`` without its text, which may quote what came from outside."""
        failure = (_printable(subject), stage, type(error).__name__)
        with self._lock:
            if failure in self._logged or len(self._logged) >= MAX_COUNTED:
                return
            self._logged.add(failure)
        log.error(
            "%s failed at stage %s: %s at %s; all others are published, repetitions are not logged",
            *failure,
            _place(error.__traceback__),
        )
        log.debug("traceback of the failure", exc_info=error)


class Guard:
    """Runs the work of a stage for one subject at a time and counts failures. Thread-safe."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._counts: dict[Failure, int] = {}
        self._log = FailureLog()
        self._lock = threading.Lock()

    def run(self, kind: str, name: Callable[[], str], work: Callable[[], T], instead: Callable[[Failure], U]) -> T | U:
        """What ``work`` returns; what ``instead`` returns when it raises. ``name`` is called only then."""
        try:
            return work()
        except Exception as error:
            failure = self._failed(self._stage, kind, name, error)
        return instead(failure)

    def each(
        self,
        kind: str,
        items: Iterable[S],
        name: Callable[[S], str],
        work: Callable[[S], T],
        without: Callable[[S, Failure], S] | None = None,
    ) -> list[T]:
        """What ``work`` returns for each item. When it raises, what it returns for the item ``without`` values; nothing
        when it raises for that too.
        """

        def again(item: S, failure: Failure) -> list[T]:
            return [] if without is None else self.each(kind, (item,), name, lambda _: work(without(item, failure)))

        def one(item: S) -> list[T]:
            return self.run(kind, partial(name, item), lambda: [work(item)], partial(again, item))

        return [done for item in items for done in one(item)]

    @property
    def counts(self) -> Mapping[Failure, int]:
        """Number of failures since the start, by failure."""
        with self._lock:
            return dict(self._counts)

    def _failed(self, stage: str, kind: str, name: Callable[[], str], error: Exception) -> Failure:
        reason = next((reason for raised, reason in _REASONS if isinstance(error, raised)), INTERNAL)
        failure = Failure(kind, _shown(name), stage, reason)
        with self._lock:
            known = failure in self._counts or len(self._counts) < MAX_COUNTED
            counted = failure if known else Failure(kind, OTHER, stage, reason)
            self._counts[counted] = self._counts.get(counted, 0) + 1
        self._log.add(f"{kind} {failure.name}", stage, error)
        return failure


def _shown(name: Callable[[], str]) -> str:
    try:
        return _printable(name())
    except Exception:
        return OTHER


def _printable(text: str) -> str:
    """``text`` as it may stand in a log line: cut, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_NAME])


def _place(trace: TracebackType | None) -> str:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown place" if trace is None else f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
