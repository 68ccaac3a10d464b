"""What a metric is, and how a signal's field declares the metric that publishes it.

Collector, table of metrics and ``docs/reference/metrics.md`` derive from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar

from kvpressure.model.frozen import frozen

PREFIX: Final = "kvpressure_"

# A summary is quantiles over a window here, without count and sum.
Kind = Literal["gauge", "counter", "info", "histogram", "summary"]

ENGINE: Final = ("namespace", "pod", "model_name", "engine")
GPU: Final = ("uuid", "gpu", "vendor")
CONTAINER: Final = ("namespace", "pod", "container")

_DECLARED: Final = "kvpressure.published"
_F = TypeVar("_F", bound=Callable[..., Any])


@frozen
class Metric:
    """One metric family. ``name``: without prefix, with ``_total`` for counters and ``_info`` for infos. ``absent``:
    when the series is missing, which is part of its meaning.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    absent: str = ""

    @property
    def full_name(self) -> str:
        """Name as published on ``/metrics``."""
        return PREFIX + self.name


def gauge(name: str, help: str, *labels: str, absent: str = "") -> Metric:
    """A gauge of one engine; ``labels`` come after the engine's own."""
    return Metric(name, "gauge", help, (*ENGINE, *labels), absent)


def quantiles(name: str, help: str, *labels: str, absent: str = "") -> Metric:
    """Quantiles of one engine; ``labels`` are those between the engine's own and ``quantile``."""
    return Metric(name, "summary", help, (*ENGINE, *labels, "quantile"), absent)


@frozen
class Published:
    """A value of a signal group as samples of ``metric``; ``labels`` are label values after the engine's own. A
    mapping has a sample per key, which is the last label. ``states``: the value is a text, published as a state set.
    ``total``: the field with the sum of a histogram.
    """

    metric: Metric
    labels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    total: str = ""


@frozen
class Output:
    """How one published value is read from its group."""

    read: Callable[[Any], Any]
    published: Published


def published(metric: Metric, *labels: str, default: Any = None, states: tuple[str, ...] = (), total: str = "") -> Any:
    """A dataclass field whose value is published; a type as ``default`` (such as ``dict``) is a factory."""
    declared = {_DECLARED: Published(metric, labels, states, total)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=declared)
    return field(default=default, metadata=declared)


def publishes(metric: Metric, *labels: str) -> Callable[[_F], _F]:
    """Decorator: publish what a method of a signal group derives from its fields."""

    def mark(method: _F) -> _F:
        setattr(method, _DECLARED, Published(metric, labels))
        return method

    return mark


_OUTPUTS: Final[dict[type[Any], tuple[Output, ...]]] = {}  # by group: there are as many as classes of signals


def outputs(group: type[Any]) -> tuple[Output, ...]:
    """Everything that a signal group publishes, in order of declaration."""
    if group not in _OUTPUTS:
        read = [(attrgetter(item.name), item.metadata.get(_DECLARED)) for item in fields(group)]
        read += [(method, getattr(method, _DECLARED, None)) for method in vars(group).values()]
        _OUTPUTS[group] = tuple(Output(reader, said) for reader, said in read if isinstance(said, Published))
    return _OUTPUTS[group]


def metrics_of(groups: Sequence[type[Any]]) -> Iterator[Metric]:
    """The metrics that signal groups publish, each once."""
    seen: dict[str, Metric] = {}
    for group in groups:
        for output in outputs(group):
            metric = output.published.metric
            if metric.name not in seen:
                seen[metric.name] = metric
                yield metric
