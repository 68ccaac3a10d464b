"""The recording format, version 1: header and tick as JSON, and the way back.

A recording holds what was *read*, never what was concluded. The first line is the header, each further line a tick;
every key of a tick but ``t`` may be missing or null, and unknown keys are ignored. Keys are the field names of
``kvpressure.readings``; an engine page stands as ``exposition``, the raw text as scraped.

Beyond the documented keys a tick may carry ``owners``, ``steps``, ``node_conditions``, ``targets``,
``process_pods``, ``expected_gpus`` and ``health``, and an engine
``t`` (when the page was fetched, if not at the tick's time), ``env`` and ``version``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from kvpressure.readings import (
    AllocatorReading,
    ContainerReading,
    EnginePage,
    GpuOwner,
    GpuProcess,
    GpuReading,
    LogLine,
    NodeCondition,
    Snapshot,
    SourceHealth,
    StepStats,
    Termination,
)

FORMAT: Final = "kvpressure-recording"
VERSION: Final = 1
LAST_SECOND: Final = 253_402_300_800.0  # of the year 9999

T = TypeVar("T")

#: Builds the page of one engine entry; arguments as ``sources.vllm.exposition.page_from_text``.
PageBuilder = Callable[..., EnginePage]

_SECRET_FLAG: Final = re.compile(r"^--?(?:.*[-_])?(?:api[-_]key|hf[-_]token|password|secret)(?P<value>=.*)?$", re.I)
_REDACTED: Final = "[redacted]"


class RecordingError(ValueError):
    """A recording cannot be used at all; the text is one line naming the file and what is allowed."""


class MalformedTick(ValueError):
    """One line cannot be used; the text says which key and what was expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a recording. ``interval_seconds`` is the nominal distance of ticks; ``source`` is free text."""

    interval_seconds: float | None = None
    node: str = ""
    source: str = ""

    def to_json(self) -> str:
        """The header line, without line end."""
        return json.dumps({"format": FORMAT, "version": VERSION, "interval_seconds": self.interval_seconds,
                           "node": self.node, "source": self.source})


def header_from_json(line: bytes, where: str) -> Header:
    """Read the first line. Raises ``RecordingError`` for anything that is not a version 1 header."""
    if not line.strip():
        raise RecordingError(f"{where}: empty; a recording begins with a line {{\"format\": \"{FORMAT}\", ...}}")
    try:
        body = _parse(line)
    except MalformedTick:
        body = {}
    if body.get("format") != FORMAT:
        raise RecordingError(f"{where}:1: not a recording; the first line must be JSON with \"format\": \"{FORMAT}\"")
    version = body.get("version")
    if version != VERSION or isinstance(version, bool):
        raise RecordingError(f"{where}:1: version {version!r} is not supported; this release reads version {VERSION}")
    try:
        return _decode(Header, _HEADER, body, "header")
    except MalformedTick as error:
        raise RecordingError(f"{where}:1: {error}") from error


# --- values: JSON to Python, with one line for what is wrong ---------------------------------------------------


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise MalformedTick(f"expected text, found {_describe(value)}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedTick(f"expected a number, found {_describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MalformedTick(f"expected a finite number, found {_describe(value)}")
    return number


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    if not number.is_integer():
        raise MalformedTick(f"expected a whole number, found {_describe(value)}")
    return int(number)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise MalformedTick(f"expected true or false, found {_describe(value)}")
    return value


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MalformedTick(f"expected an object, found {_describe(value)}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedTick(f"expected a list, found {_describe(value)}")
    return value


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in _list(value))


def _text_map(value: object) -> dict[str, str]:
    return {key: _text(item) for key, item in _object(value).items()}


def _count_map(value: object) -> dict[str, int]:
    return {key: _whole(item) for key, item in _object(value).items()}


def _number_map(value: object) -> dict[int, int]:
    """Counts by a whole number (XIDs, batch sizes), which JSON writes as text."""
    try:
        return {int(key): _whole(item) for key, item in _object(value).items()}
    except ValueError as error:
        raise MalformedTick(f"expected whole numbers as keys, found {_describe(value)}") from error


def _moment_map(value: object) -> dict[int, float]:
    """Moments by a whole number (XIDs)."""
    try:
        return {int(key): _moment(item) for key, item in _object(value).items()}
    except ValueError as error:
        raise MalformedTick(f"expected whole numbers as keys, found {_describe(value)}") from error


def _pods(value: object) -> dict[int, tuple[str, str]]:
    """(namespace, pod) by host pid."""
    found: dict[int, tuple[str, str]] = {}
    for key, item in _object(value).items():
        owner = _texts(item)
        if not key.isdecimal() or len(owner) != 2:
            raise MalformedTick(f"expected a namespace and a pod by pid, found {_describe(value)}")
        found[int(key)] = (owner[0], owner[1])
    return found


def _numbers_as_text(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(number): count for number, count in counts.items()}


def _time(value: object) -> float:
    """Unix seconds up to the year 9999: what lies beyond is no time, and no database takes it."""
    time = _number(value)
    if not 0 <= time < LAST_SECOND:
        raise MalformedTick(f"expected Unix seconds, found {_describe(value)}")
    return time


def _moment(value: object) -> float:
    """Unix seconds, or a time as Kubernetes writes it (``2023-11-14T22:27:25Z``)."""
    if not isinstance(value, str):
        return _number(value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise MalformedTick(f"expected seconds or an RFC 3339 time, found {_describe(value)}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# --- records: one table per reading, used in both directions ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    read: Callable[[object], Any]
    write: Callable[[Any], object] | None = None  # None = as it is
    required: bool = False
    default: object = None  # not written


def _fields(read: Callable[[object], Any], *names: str, required: bool = False,
            default: object = None) -> tuple[_Field, ...]:
    return tuple(_Field(name, read, required=required, default=default) for name in names)


def _decode(cls: Callable[..., T], table: tuple[_Field, ...], entry: object, where: str) -> T:
    body = _object(entry)
    values: dict[str, Any] = {}
    for item in table:
        raw = body.get(item.name)
        if raw is None:
            if item.required:
                raise MalformedTick(f"{where}: {item.name!r} is missing")
            continue
        try:
            values[item.name] = item.read(raw)
        except MalformedTick as error:
            deeper = str(error).startswith((".", "["))
            raise MalformedTick(f"{where}.{item.name}{'' if deeper else ': '}{error}") from error
    return cls(**values)


def _encode(table: tuple[_Field, ...], record: object) -> dict[str, object]:
    body: dict[str, object] = {}
    for item in table:
        value = getattr(record, item.name)
        if item.required or (value is not None and value != item.default):
            body[item.name] = value if item.write is None else item.write(value)
    return body


_CONTAINER_NAME: Final = _fields(_text, "namespace", "pod", "container", required=True)
_HEADER: Final = (_Field("interval_seconds", _number), *_fields(_text, "node", "source"))
_PROCESS: Final = (_Field("pid", _whole, required=True), _Field("used_bytes", _whole))
_TERMINATION: Final = (_Field("reason", _text), _Field("exit_code", _whole), _Field("finished_at", _moment))


def _processes(value: object) -> tuple[GpuProcess, ...]:
    return tuple(_decode(GpuProcess, _PROCESS, entry, f"[{i}]") for i, entry in enumerate(_list(value)))


_GPU: Final = (
    _Field("uuid", _text, required=True), _Field("index", _whole), _Field("vendor", _text),
    *_fields(_text, "name", "driver", "pci_bus_id", "parent_uuid", "error"),
    *_fields(_whole, "minor", "gpu_instance_id", "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"),
    *_fields(_number, "utilization_ratio", "sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio",
             "power_watts", "power_limit_watts"),
    _Field("throttle_reasons", _texts, list),
    _Field("xid_errors", _number_map, _numbers_as_text, default={}),
    _Field("xid_last_times", _moment_map, lambda times: {str(xid): at for xid, at in times.items()}, default={}),
    _Field("ecc_errors", _count_map, dict, default={}),
    _Field("processes", _processes, lambda items: [_encode(_PROCESS, item) for item in items], default=()),
)
_PAGE: Final = (
    _Field("target", _text, required=True), *_fields(_text, "namespace", "pod", "container", default=""),
    _Field("gpus", _texts, list, default=()), _Field("args", _texts, lambda args: redact(args), default=()),
    _Field("env", _text_map, dict, default={}), _Field("error", _text), _Field("duration_seconds", _number),
)
_PAGE_GIVEN: Final = (_Field("t", _time), *_fields(_text, "exposition", "version"))  # not for the builder
_CONTAINER: Final = (
    *_CONTAINER_NAME,
    *_fields(_whole, "restarts", "cpu_periods", "cpu_throttled_periods", "memory_working_set_bytes",
             "memory_limit_bytes"),
    _Field("ready", _flag),
    *_fields(_number, "cpu_usage_seconds", "cpu_limit_cores", "cpu_pressure_some_ratio"),
    _Field("last_termination", lambda value: _decode(Termination, _TERMINATION, value, ""),
           lambda value: _encode(_TERMINATION, value)),
)
_LOG: Final = (*_CONTAINER_NAME, _Field("line", _text, required=True))
_ALLOCATOR: Final = (
    *_fields(_text, "namespace", "pod", required=True), _Field("rank", _whole, required=True),
    *_fields(_whole, "allocated_bytes", "reserved_bytes", "inactive_split_bytes", "alloc_retries", "ooms"),
)
_STEPS: Final = (
    *_fields(_text, "namespace", "pod", "engine", required=True), *_fields(_number, "started", "written", required=True),
    *_fields(_whole, "steps", "decoded", required=True), _Field("exact", _flag, default=False),
    _Field("preemptions", _whole), _Field("kv_max", _number), _Field("sizes", _number_map, _numbers_as_text, default={}),
)
_OWNER: Final = (_Field("uuid", _text, required=True), *_CONTAINER_NAME, _Field("shared", _flag, default=False))
_HEALTH: Final = (
    _Field("up", _flag), _Field("reason", _text), *_fields(_number, "last_success", "duration_seconds"),
    _Field("errors", _count_map, dict, default={}),
)


# --- ticks -------------------------------------------------------------------------------------------------------


def _parse(line: bytes) -> dict[str, Any]:
    """One JSON object. Raises ``MalformedTick``."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise MalformedTick(f"not JSON ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise MalformedTick(f"expected a JSON object, found {_describe(body)}")
    return body


def _entries(body: Mapping[str, Any], key: str, build: Callable[[object, str], T]) -> tuple[T, ...]:
    raw = body.get(key)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise MalformedTick(f"{key}: expected a list, found {_describe(raw)}")
    return tuple(build(entry, f"{key}[{i}]") for i, entry in enumerate(raw))


def _gpus(body: Mapping[str, Any]) -> tuple[GpuReading, ...]:
    """The GPUs; one without an index gets its place in the list."""
    places = itertools.count()

    def build(uuid: str, index: int | None = None, vendor: str = "", **rest: Any) -> GpuReading:
        place = next(places)
        return GpuReading(uuid, place if index is None else index, vendor, **rest)

    return _entries(body, "gpus", lambda entry, where: _decode(build, _GPU, entry, where))


def _page(entry: object, where: str, time: float, build: PageBuilder) -> EnginePage:
    body = _object(entry)
    given: dict[str, Any] = _decode(dict, _PAGE_GIVEN, body, where)
    page = _decode(lambda **values: build(given.get("exposition"), time=given.get("t", time), **values), _PAGE, body,
                   where)
    return replace(page, version=given["version"]) if "version" in given else page


def _health(body: Mapping[str, Any]) -> dict[str, SourceHealth]:
    raw = body.get("health")
    if raw is None:
        return {}
    return {name: _decode(lambda _name=name, **values: SourceHealth(_name, **values), _HEALTH, entry, f"health.{name}")
            for name, entry in _object(raw).items()}


def tick_from_json(line: bytes, build: PageBuilder) -> Snapshot:
    """Read one tick; ``build`` makes an ``EnginePage`` from raw text. Raises ``MalformedTick``."""
    body = _parse(line)
    if body.get("t") is None:
        raise MalformedTick("'t' is missing")
    try:
        time = _time(body["t"])
    except MalformedTick as error:
        raise MalformedTick(f"t: {error}") from error
    targets = body.get("targets")
    return Snapshot(
        time=time,
        gpus=_gpus(body),
        pages=_entries(body, "engines", lambda entry, where: _page(entry, where, time, build)),
        containers=_entries(body, "containers", lambda e, w: _decode(ContainerReading, _CONTAINER, e, w)),
        owners=_entries(body, "owners", lambda e, w: _decode(GpuOwner, _OWNER, e, w)),
        logs=_entries(body, "logs", lambda e, w: _decode(LogLine, _LOG, e, w)),
        allocator=_entries(body, "allocator", lambda e, w: _decode(AllocatorReading, _ALLOCATOR, e, w)),
        steps=_entries(body, "steps", lambda e, w: _decode(StepStats, _STEPS, e, w)),
        node_conditions=_entries(body, "node_conditions", _node_condition),
        health=_health(body),
        targets=None if targets is None else _texts(targets),
        process_pods={} if body.get("process_pods") is None else _pods(body["process_pods"]),
        expected_gpus={} if body.get("expected_gpus") is None else _count_map(body["expected_gpus"]),
    )


def _node_condition(entry: object, where: str) -> NodeCondition:
    body = _object(entry)
    if "type" not in body:
        raise MalformedTick(f"{where}: 'type' is missing")
    status = body.get("status")
    return NodeCondition(_text(body["type"]), None if status is None else _flag(status))


def tick_to_json(snapshot: Snapshot) -> str:
    """One tick as a line, without line end. Pages must have been fetched with their exposition kept."""
    body: dict[str, object] = {"t": snapshot.time}
    lists: tuple[tuple[str, list[dict[str, object]]], ...] = (
        ("gpus", [_encode(_GPU, item) for item in snapshot.gpus]),
        ("engines", [_page_entry(page, snapshot.time) for page in snapshot.pages]),
        ("containers", [_encode(_CONTAINER, item) for item in snapshot.containers]),
        ("owners", [_encode(_OWNER, item) for item in snapshot.owners]),
        ("logs", [_encode(_LOG, item) for item in snapshot.logs]),
        ("allocator", [_encode(_ALLOCATOR, item) for item in snapshot.allocator]),
        ("steps", [_encode(_STEPS, item) for item in snapshot.steps]),
        ("node_conditions", [{"type": item.type, "status": item.status} for item in snapshot.node_conditions]),
    )
    body.update((name, entries) for name, entries in lists if entries)
    if snapshot.targets is not None:
        body["targets"] = list(snapshot.targets)
    if snapshot.process_pods:
        body["process_pods"] = {str(pid): list(pod) for pid, pod in snapshot.process_pods.items()}
    if snapshot.expected_gpus:
        body["expected_gpus"] = dict(snapshot.expected_gpus)
    if snapshot.health:
        body["health"] = {name: _encode(_HEALTH, item) for name, item in snapshot.health.items()}
    return json.dumps(body, separators=(",", ":"))


def _page_entry(page: EnginePage, time: float) -> dict[str, object]:
    entry = _encode(_PAGE, page)
    given = {"t": None if page.time == time else page.time, "version": page.version, "exposition": page.exposition}
    entry.update((key, value) for key, value in given.items() if value is not None)
    return entry


def redact(args: tuple[str, ...]) -> list[str]:
    """Arguments with the values of key, token and password flags replaced: recordings travel in tickets."""
    shown: list[str] = []
    hide_next = False
    for arg in args:
        match = None if hide_next else _SECRET_FLAG.match(arg)
        if hide_next:
            shown.append(_REDACTED)
        elif match is not None and match["value"] is not None:
            shown.append(arg[: match.start("value")] + "=" + _REDACTED)
        else:
            shown.append(arg)
        hide_next = match is not None and match["value"] is None
    return shown
