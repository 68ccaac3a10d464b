"""From one way to make an alert fire to all the situations that its unit test distinguishes.

Each situation ("variant") is a subject of its own (a pod, a GPU, an exporter), so that one timeline holds all, and
every firing one also proves that its silent neighbours stay silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from kvpressure.bundle.spec import SUBJECTS, AlertLevel, Input, TestCase
from kvpressure.bundle.text import number
from kvpressure.publish.metrics import BY_NAME, PREFIX

_VLLM: Final = ("namespace", "pod", "model_name", "engine")

EXTERNAL: Final[Mapping[str, tuple[str, ...]]] = {
    "up": (),
    "process_start_time_seconds": (),
    "ALERTS": ("alertname", "alertstate", "severity", "namespace", "model_name"),
    "kube_pod_status_unschedulable": ("namespace", "pod"),
    "kube_pod_container_status_waiting_reason": ("namespace", "pod", "container", "reason"),
    "kube_pod_info": ("namespace", "pod", "node", "created_by_kind"),
    "kube_node_status_allocatable": ("node", "resource"),
    "kube_node_status_condition": ("node", "condition", "status"),
    "kube_deployment_spec_replicas": ("namespace", "deployment"),
    "kube_statefulset_replicas": ("namespace", "statefulset"),
    "kube_pod_container_status_restarts_total": ("namespace", "pod", "container"),
    "kube_pod_container_status_last_terminated_reason": ("namespace", "pod", "container", "reason"),
    **dict.fromkeys(
        (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "vllm:generation_tokens_total",
            "vllm:num_preemptions_total",
            "vllm:prompt_tokens_total",
        ),
        _VLLM,
    ),
    "http_requests_total": ("namespace", "pod", "handler", "method", "status"),
    "vllm:request_success_total": (*_VLLM, "finished_reason"),
    **dict.fromkeys(
        (
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:request_queue_time_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
            "vllm:time_per_output_token_seconds_bucket",
        ),
        (*_VLLM, "le"),
    ),
}
"""Metrics that are not ours: Prometheus' own, kube-state-metrics' where it is there, and what ``--source vllm``
reads.
"""

MARGIN: Final = 0.05  # a value this share below or above a threshold; smaller than the 10 % by which mutants move it

QUIET_SECONDS: Final = 360  # before anything happens; longer than the five-minute ranges of the recordings
TAIL_STEPS: Final = 4  # after the last assertion, and slack around the end of a range

_SITE: Final = ("cluster", "node", "role")  # may be missing

COMPARE: Final = (">=", "<=", ">", "<", "==")


@dataclass(frozen=True, slots=True)
class CaseTimeline:
    """Steps of a test: the input that drives the alert is on from ``onset`` up to ``end``;
    ``length`` samples in all.
    """

    step: float
    onset: int
    end: int
    length: int


@dataclass(frozen=True, slots=True)
class InputSeries:
    """One input series in promtool's notation."""

    name: str
    values: str


@dataclass(slots=True)
class Variant:
    """One subject: its series, whether it fires, and the alert's identity labels."""

    name: str
    fires: bool
    series: list[InputSeries] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


def recorded_line(step: float, after: float = QUIET_SECONDS) -> CaseTimeline:
    """The timeline of a recording's test; values are queried at the last sample."""
    return CaseTimeline(step, 0, 0, ceil(after / step) + TAIL_STEPS)


def recorded_at(step: float, after: float = QUIET_SECONDS) -> float:
    """When a recording's values are queried, in seconds."""
    return (recorded_line(step, after).length - 1) * step


def metric_labels(metric: str, recorded: Mapping[str, tuple[str, ...]] | None = None) -> tuple[str, ...]:
    """Labels of series of ``metric``, without those of the scrape. ``recorded``: labels of each recording.

    Raises ``KeyError`` for an unknown metric.
    """
    if recorded and metric in recorded:
        return recorded[metric]
    if metric in EXTERNAL:
        return EXTERNAL[metric]
    return BY_NAME[metric.removeprefix(PREFIX)].labels


def identity(subject: str, name: str) -> dict[str, str]:
    """Label values of the subject called ``name``."""
    values = {
        "namespace": "inference",
        "pod": "pod",
        "model_name": "llama",
        "engine": "0",
        "container": "vllm",
        "uuid": f"GPU-{name}",
        "UUID": f"GPU-{name}",
        "Hostname": "host-1",
        "gpu": "0",
        "vendor": "nvidia",
        "instance": "node-1:9846",
        "workload": "chat",
        "objective": "ttft",
    }
    own = {
        "model": ("model_name",),
        "exporter": ("instance",),
        "model_role": ("namespace", "model_name"),
        "objective": ("model_name",),
        "workload": ("workload",),
        "cluster": ("cluster",),
        "device": ("uuid",),
        "pod": ("namespace", "pod"),
    }
    return values | dict.fromkeys(own.get(subject, ("pod",)), name)


def plain(value: float, count: int) -> str:
    """``count`` samples of one value."""
    text = "NaN" if value != value else number(value)
    return text if count == 1 else f"{text}+0x{count - 1}"


def growing(start: float, step: float, count: int) -> str:
    """``count`` samples that grow by ``step``."""
    return f"{number(start)}+{number(round(step, 9))}x{count - 1}"


# --- values ------------------------------------------------------------------------------------------------


def on_value(item: Input) -> float:
    """The value (or rate) at which an input just makes the alert fire."""
    if item.op in (">", "rate>", "rate>="):
        return _moved(item.value, 1 + MARGIN)
    if item.op == "<":
        return _moved(item.value, 1 - MARGIN)
    return item.value


def off_value(item: Input) -> float:
    """The nearest value at which it does not, or the initial value that the case gives."""
    if item.start is not None:
        return item.start
    if item.op in (">", "<"):
        return item.value
    if item.op == ">=":
        return _moved(item.value, 1 - MARGIN)
    if item.op == "<=":
        return _moved(item.value, 1 + MARGIN)
    return 1 - item.value if item.value in (0, 1) else 0


def _moved(value: float, factor: float) -> float:
    return round(value * factor, 9) if value else factor - 1


def values_of(item: Input, line: CaseTimeline, driver: bool, value: float | None = None) -> str:
    """The samples of ``item``; the driver is on only between onset and end, other inputs always."""
    if item.op in COMPARE:
        level = on_value(item) if value is None else value
        if not driver or level != level:
            return plain(level, line.length)
        off = plain(off_value(item), line.onset)
        return f"{off} {plain(level, line.end - line.onset)} {plain(off_value(item), line.length - line.end)}"
    if item.op == "veto" and driver:  # present before onset and after end
        gone = f"stale _x{line.end - line.onset - 1}"
        return f"{plain(1, line.onset)} {gone} {plain(1, line.length - line.end)}"
    if item.op == "appears" and driver:
        return f"_x{line.onset} {plain(item.value, line.end - line.onset)} stale"
    if item.op == "down":
        return f"{plain(1, line.onset)} {plain(0, line.length - line.onset)}"
    if item.op in ("counts", "events"):
        grown = item.value if value is None else value
        return f"{plain(3, line.onset)} {plain(3 + grown, line.length - line.onset)}"
    if item.op == "flat":
        grows, still, last = line.onset - 1, line.end - line.onset, line.length - line.end
        reached = line.step * line.onset  # after a missed scrape: closed and left-open ranges then see the same stop
        again = growing(reached + line.step, line.step, last)
        return f"{growing(0, line.step, grows)} _ {plain(reached, still)} {again}"
    if item.op in ("rate>", "rate>=", "flows"):
        rate = on_value(item) if value is None else value
        return growing(0, rate * line.step, line.length)
    return plain(item.value, line.length)


# --- variants ----------------------------------------------------------------------------------------------


class Builder:
    """Builds the variants of one level."""

    def __init__(
        self, subject: str, level: AlertLevel, line: CaseTimeline, recorded: Mapping[str, tuple[str, ...]]
    ) -> None:
        """``recorded``: labels of each recording, which a case may use as input like any other metric."""
        self._subject, self._level, self._line, self._recorded = subject, level, line, recorded

    def all(self) -> list[Variant]:
        """Every variant of every case."""
        found: list[Variant] = []
        for index, case in enumerate(self._level.cases):
            tag = f"{index}-" if index else ""
            if not case.fires:
                found.append(self._variant(f"{tag}not", case, fires=False))
                continue
            found.append(self.base(case, f"{tag}fires"))
            found.extend(self._boundaries(case, tag))
            found.extend(self._absences(case, tag))
            found.extend(self._neighbours(case, tag))
        return found

    def base(self, case: TestCase, name: str) -> Variant:
        """The variant with every input as the case gives it."""
        return self._variant(name, case, fires=True)

    def _variant(
        self,
        name: str,
        case: TestCase,
        fires: bool,
        changed: Mapping[int, str | None] | None = None,
        more: Mapping[str, str] | None = None,
        moved: Mapping[int, Mapping[str, str]] | None = None,
    ) -> Variant:
        """``changed``: input index -> other samples, None = no series. ``more``: labels on every series. ``moved``:
        input index -> labels by which its series belongs to another subject.
        """
        ids = identity(self._subject, name)
        variant = Variant(name, fires)
        wanted = {label: ids[label] for label in case.labels}
        variant.labels = wanted | dict(more or {}) | dict(case.extra_labels)
        for index, item in enumerate(case.inputs):
            values: str | None = values_of(item, self._line, driver=index == 0)
            if item.op == "veto" and index:
                values = None
            if changed and index in changed:
                values = changed[index]
            if values is not None:
                elsewhere = (moved or {}).get(index, {})
                variant.series.append(self._series(item, ids | dict(more or {}), elsewhere, values))
        return variant

    def _series(self, item: Input, labels: Mapping[str, str], elsewhere: Mapping[str, str], values: str) -> InputSeries:
        """``item`` on the subject with ``labels``, or on one that differs by ``elsewhere``."""
        own = {key: value for key, value in item.labels.items() if key not in elsewhere}
        moved = Input(item.metric, own, item.op, item.value)
        return InputSeries(series_name(moved, {**labels, **elsewhere}, self._recorded), values)

    def _boundaries(self, case: TestCase, tag: str) -> Iterator[Variant]:
        for index, item in enumerate(case.inputs):
            for name, value, fires in _values_around(item):
                samples = values_of(item, self._line, driver=index == 0, value=value)
                yield self._variant(f"{tag}{name}-{_short(item)}", case, fires, {index: samples})
            if item.op == "flat":
                yield self._variant(
                    f"{tag}grows-{_short(item)}", case, False, {index: growing(0, self._line.step, self._line.length)}
                )
            if item.op == "down":
                yield from self._down_cases(case, tag, index, item)
            if item.op in ("counts", "events"):
                yield from self._counter_cases(case, tag, index, item)
            if item.op in ("rate>", "rate>="):
                half, step = self._line.length // 2, 2 * item.value * self._line.step
                slope, rest = growing(0, step, half), growing(0, step, self._line.length - half)
                yield self._variant(f"{tag}reset-{_short(item)}", case, True, {index: f"{slope} {rest}"})

    def _down_cases(self, case: TestCase, tag: str, index: int, item: Input) -> Iterator[Variant]:
        """An input that never goes down, and one that never was up, alone and while a neighbour goes down."""
        for name, value in (("stays", 1), ("never", 0)):
            own: dict[int, str | None] = {index: plain(value, self._line.length)}
            yield self._variant(f"{tag}{name}-{_short(item)}", case, False, own)
            for label in ("cluster", *case.splits):
                variant = self._variant(f"{tag}{name}-{_short(item)}-beside-{label}", case, False, own)
                ids, down = identity(self._subject, variant.name), values_of(item, self._line, driver=False)
                variant.series.append(self._series(item, ids, {label: "other"}, down))
                yield variant

    def _counter_cases(self, case: TestCase, tag: str, index: int, item: Input) -> Iterator[Variant]:
        line = self._line
        reset = f"{plain(3, line.onset)} {plain(0, line.length - line.onset)}"
        yield self._variant(f"{tag}reset-{_short(item)}", case, False, {index: reset})
        born = {index: f"_x{line.onset} {plain(item.value, line.length - line.onset)}"}
        yield self._variant(f"{tag}born-{_short(item)}", case, item.op == "events", born)
        if item.op == "events":
            yield self._variant(f"{tag}born-in-cluster", case, True, born, more={"cluster": "west"})
            for label in ("cluster", "job", "instance"):
                yield self._variant(f"{tag}born-in-new-{label}", case, False, born, moved={index: {label: "new"}})
            for label in dict.fromkeys((*SUBJECTS[self._subject], *case.extra_labels)):
                yield self._beside(f"{tag}born-beside-other-{label}", case, item, born, label)

    def _beside(self, name: str, case: TestCase, item: Input, born: Mapping[int, str | None], label: str) -> Variant:
        """A first appearance while the series of a neighbour, which differs in ``label`` only, exists already."""
        variant = self._variant(name, case, True, born)
        ids = identity(self._subject, name)
        variant.series.append(self._series(item, ids, {label: "other"}, plain(3, self._line.length)))
        return variant

    def _absences(self, case: TestCase, tag: str) -> Iterator[Variant]:
        for index, item in enumerate(case.inputs):
            if item.op == "veto":
                name = f"{tag}veto-{_short(item)}"
                apart = {"cluster": name} if self._joined(item) == {"cluster"} else {}  # it silences the whole cluster
                yield self._variant(name, case, False, {index: plain(1, self._line.length)}, more=apart)
            elif item.op != "extra":
                yield self._variant(f"{tag}missing-{_short(item)}", case, False, {index: None})
            if item.op in COMPARE:
                nan = values_of(item, self._line, driver=index == 0, value=float("nan"))
                yield self._variant(f"{tag}nan-{_short(item)}", case, False, {index: nan})

    def _neighbours(self, case: TestCase, tag: str) -> Iterator[Variant]:
        """The same in a named cluster, reported by two exporters, and with conditions met on another subject only."""
        if self._subject == "none":
            return
        yield from self._vetoes_elsewhere(case, tag)
        if self._subject != "cluster":
            node = {"node": "node-1"} if "node" in SUBJECTS[self._subject] else {}
            yield self._variant(f"{tag}in-cluster", case, True, more={"cluster": "west", **node})
        if self._subject != "exporter":
            variant = self.base(case, f"{tag}two-exporters")
            variant.series += [
                InputSeries(s.name.replace('instance="node-1', 'instance="node-2'), s.values) for s in variant.series
            ]
            yield variant
        asked = [index for index, item in enumerate(case.inputs) if item.op not in ("extra", "veto")]
        others = len(asked) > 1 or case.inputs[0].op == "veto"
        for index in asked if others else ():
            item = case.inputs[index]
            carried = {"cluster", "instance", "job", *metric_labels(item.metric, self._recorded)}
            for label in ("cluster", *case.splits):
                if label in carried:
                    name = f"{tag}{_short(item)}-on-other-{label}"  # also the neighbour's name, so that each is unique
                    yield self._variant(name, case, False, moved={index: {label: f"not-{name}"}})

    def _vetoes_elsewhere(self, case: TestCase, tag: str) -> Iterator[Variant]:
        """A veto on another subject, which must not silence this one."""
        for item in case.inputs[1:]:
            for label in ("cluster", *case.splits) if item.op == "veto" else ():
                if label in self._joined(item):
                    variant = self.base(case, f"{tag}veto-{_short(item)}-elsewhere-{label}")
                    ids = identity(self._subject, variant.name)
                    variant.series.append(self._series(item, ids, {label: "other"}, plain(1, self._line.length)))
                    yield variant

    def _joined(self, item: Input) -> set[str]:
        """Labels of a veto on which conditions join it; all if the expression itself reads it."""
        known = {"cluster", *metric_labels(item.metric, self._recorded)}
        named = re.compile(rf"\b{item.metric}\b")
        if named.search(self._level.expr):
            return known
        return known.intersection(*(set(one.on) for one in self._level.conditions if named.search(one.expr)))


def _values_around(item: Input) -> Iterator[tuple[str, float, bool]]:
    below, above = _moved(item.value, 1 - MARGIN), _moved(item.value, 1 + MARGIN)
    if item.op in (">=", ">"):
        yield from (("below", below, False), ("at", item.value, item.op == ">="), ("above", above, True))
    elif item.op in ("<=", "<"):
        yield from (("below", below, True), ("at", item.value, item.op == "<="), ("above", above, False))
    elif item.op == "==":
        yield "off", off_value(item), False
    elif item.op in ("counts", "events"):
        yield from (("below", item.value - 1, False), ("above", item.value + 1, True))
    elif item.op in ("rate>", "rate>="):
        yield "below", below, False


def _short(item: Input) -> str:
    own = "-".join(item.labels.values())
    name = item.metric.removeprefix(PREFIX).replace("_", "-").replace(":", "-")
    return f"{name}-{own}".rstrip("-").lower()


def series_name(item: Input, labels: Mapping[str, str], recorded: Mapping[str, tuple[str, ...]]) -> str:
    """The series of ``item`` on the subject with ``labels``, as promtool writes it. A recorded one also has a
    scrape's labels, like a federated copy, so that it never collides with what its own rule writes.
    """
    names = [name for name in metric_labels(item.metric, recorded) if name in labels or name not in _SITE]
    known = {name: labels.get(name, "x") for name in names} | dict(item.labels)
    scrape = {"instance": labels.get("instance", "node-1:9846"), "job": labels.get("job", "kvpressure")}
    site = {name: labels[name] for name in ("cluster", "node") if name in labels}
    body = ",".join(f'{name}="{value}"' for name, value in sorted({**scrape, **site, **known}.items()))
    return f"{item.metric}{{{body}}}"
