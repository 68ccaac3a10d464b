"""The recording format, version 1: header and tick as JSON, and the way back.

A recording holds what was *read*, never what was concluded. The first line is the header, each further line a tick;
every key of a tick but ``t`` may be missing or null, and unknown keys are ignored. Keys are the field names of
``kvpressure.model.readings``; an engine page stands as ``exposition``, the raw text as scraped.

Beyond the documented keys a tick may carry ``owners``, ``pods``, ``steps``, ``node_conditions``, ``targets``,
``process_pods``, ``expected_gpus`` and ``health``, and an engine
``t`` (when the page was fetched, if not at the tick's time), ``env``, ``version``, ``group`` and ``dialect`` (of a page
that does not show it).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpressure.engines import registry as engines
from kvpressure.engines.registry import log_line
from kvpressure.errors import InputError, shown
from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    LogLine,
    NodeCondition,
    Scrape,
    Snapshot,
    SourceHealth,
    StepStats,
    Termination,
)
from kvpressure.printable import visible
from kvpressure.recording.fields import (
    Field,
    MalformedTick,
    T,
    decode,
    describe,
    encode,
    fields,
    numbers_as_text,
    read_amount,
    read_counts,
    read_counts_by_number,
    read_flag,
    read_level,
    read_list,
    read_moment,
    read_moments_by_number,
    read_name,
    read_names,
    read_object,
    read_pods,
    read_ratio,
    read_text,
    read_text_map,
    read_texts,
    read_time,
    read_whole,
)

FORMAT: Final = "kvpressure-recording"
VERSION: Final = 1
LONG_LINE_BYTES: Final = 1024 * 1024  # up to which any line may be read
MAX_VALUES: Final = 500_000  # of a longer one; a tick of 64 engines with batch sizes has 70 000
"""Values in one long line of a recording. Beyond: the tick is skipped. Shown as: reported by the command."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LINE_ENDS: Final = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
#: Builds the page of one engine entry; arguments as ``sources.vllm.exposition.parse_scrape``.
PageBuilder = Callable[..., Scrape]


class RecordingError(InputError):
    """A recording cannot be used at all; the text is one line naming the file and what is allowed."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a recording. ``interval_seconds`` is the nominal distance of ticks; ``source`` is free text."""

    interval_seconds: float | None = None
    node: str = ""
    source: str = ""

    def to_json(self) -> str:
        """The header line, without line end."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "interval_seconds": self.interval_seconds,
                "node": self.node,
                "source": self.source,
            }
        )


def header_from_json(line: bytes, where: str) -> Header:
    """Read the first line. Raises ``RecordingError`` for anything that is not a version 1 header."""
    if not line.strip():
        raise RecordingError(f'{where}: empty; a recording begins with a line {{"format": "{FORMAT}", ...}}')
    try:
        body = _parse(line)
    except MalformedTick:
        body = {}
    if body.get("format") != FORMAT:
        raise RecordingError(f'{where}:1: not a recording; the first line must be JSON with "format": "{FORMAT}"')
    version = body.get("version")
    if version != VERSION or isinstance(version, bool):
        raise RecordingError(
            f"{where}:1: version {shown(version)} is not supported; this release reads version {VERSION}"
        )
    try:
        return decode(Header, _HEADER, body, "header")
    except MalformedTick as error:
        raise RecordingError(f"{where}:1: {error}; give a recording (kvpressure record writes one)") from error


# --- records: the fields of each reading, used in both directions --------------------------------------------------


def _read_line(value: object) -> str:
    """One line of a log: what would begin another one is shown as its escape."""
    return "".join(visible(char) if char in _LINE_ENDS else char for char in read_text(value))


_CONTAINER_NAME: Final = fields(read_name, "namespace", "pod", "container", required=True)
_HEADER: Final = (Field("interval_seconds", read_level), *fields(read_name, "node", "source"))
_PROCESS: Final = (Field("pid", read_amount, required=True), Field("used_bytes", read_amount))
_TERMINATION: Final = (Field("reason", read_name), Field("exit_code", read_whole), Field("finished_at", read_moment))


def _processes(value: object) -> tuple[GpuProcess, ...]:
    return tuple(decode(GpuProcess, _PROCESS, entry, f"[{i}]") for i, entry in enumerate(read_list(value)))


_GPU: Final = (
    Field("uuid", read_name, required=True),
    Field("index", read_amount),
    Field("vendor", read_name),
    *fields(read_name, "name", "driver", "pci_bus_id", "parent_uuid", "error"),
    *fields(
        read_amount, "minor", "gpu_instance_id", "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"
    ),
    *fields(read_ratio, "utilization_ratio", "sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio"),
    *fields(read_level, "power_watts", "power_limit_watts"),
    Field("throttle_reasons", read_names, list),
    Field("xid_errors", read_counts_by_number, numbers_as_text, default={}),
    Field(
        "xid_last_times", read_moments_by_number, lambda times: {str(xid): at for xid, at in times.items()}, default={}
    ),
    Field("ecc_errors", read_counts, dict, default={}),
    Field("processes", _processes, lambda items: [encode(_PROCESS, item) for item in items], default=()),
)
_PAGE: Final = (
    Field("target", read_name, required=True),
    *fields(read_name, "namespace", "pod", "container", default=""),
    Field("gpus", read_names, list, default=()),
    Field("args", read_texts, engines.public_texts, default=()),
    Field("env", read_text_map, engines.public_environment, default={}),
    Field("error", read_name),
    Field("duration_seconds", read_level),
)
_PAGE_GIVEN: Final = (
    Field("t", read_time),
    Field("exposition", read_text),
    *fields(read_name, "version", "dialect", "group"),
)  # not for the builder
_CONTAINER: Final = (
    *_CONTAINER_NAME,
    *fields(
        read_amount,
        "restarts",
        "cpu_periods",
        "cpu_throttled_periods",
        "memory_working_set_bytes",
        "memory_limit_bytes",
    ),
    Field("ready", read_flag),
    *fields(read_level, "cpu_usage_seconds", "cpu_limit_cores"),
    Field("cpu_pressure_some_ratio", read_ratio),
    Field("alerts", read_text),
    Field(
        "last_termination",
        lambda value: decode(Termination, _TERMINATION, value, ""),
        lambda value: encode(_TERMINATION, value),
    ),
)
_LOG: Final = (*_CONTAINER_NAME, Field("line", _read_line, engines.public_line, required=True))
_ALLOCATOR: Final = (
    *fields(read_name, "namespace", "pod", required=True),
    Field("rank", read_amount, required=True),
    *fields(read_amount, "allocated_bytes", "reserved_bytes", "inactive_split_bytes", "alloc_retries", "ooms"),
)
_STEPS: Final = (
    *fields(read_name, "namespace", "pod", "engine", required=True),
    *fields(read_moment, "started", "written", required=True),
    *fields(read_amount, "steps", "decoded", required=True),
    Field("exact", read_flag, default=False),
    Field("preemptions", read_amount),
    Field("kv_max", read_ratio),
    Field("sizes", read_counts_by_number, numbers_as_text, default={}),
)
_OWNER: Final = (
    Field("uuid", read_name, required=True),
    *_CONTAINER_NAME,
    Field("shared", read_flag, default=False),
    Field("group", read_name, default=""),
)
_HEALTH: Final = (
    Field("up", read_flag),
    Field("reason", read_name),
    Field("last_success", read_moment),
    Field("duration_seconds", read_level),
    Field("errors", read_counts, dict, default={}),
)
_POD: Final = fields(read_name, "namespace", "pod", "uid", required=True)
#: The entries of each list in a tick, and of ``health`` by source.
ENTRIES: Final = {
    "gpus": _GPU,
    "engines": (*_PAGE, *_PAGE_GIVEN),
    "containers": _CONTAINER,
    "logs": _LOG,
    "allocator": _ALLOCATOR,
    "steps": _STEPS,
    "owners": _OWNER,
    "pods": _POD,
    "health": _HEALTH,
}


# --- ticks -------------------------------------------------------------------------------------------------------


def _parse(line: bytes) -> dict[str, Any]:
    """One JSON object. Raises ``MalformedTick``."""
    if len(line) > LONG_LINE_BYTES and _values(line) > MAX_VALUES:
        raise MalformedTick(f"more than {MAX_VALUES} values")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise MalformedTick(f"not JSON ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise MalformedTick(f"expected a JSON object, found {describe(body)}")
    return body


def _values(line: bytes) -> int:
    """How many values stand in JSON, about: each takes sixty bytes or more, and three on the line."""
    bare = _STRING.sub(b"", line)
    return bare.count(b",") + bare.count(b"[") + bare.count(b"{")


def _entries(body: Mapping[str, Any], key: str, build: Callable[[object, str], T]) -> tuple[T, ...]:
    raw = body.get(key)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise MalformedTick(f"{key}: expected a list, found {describe(raw)}")
    return tuple(build(entry, f"{key}[{i}]") for i, entry in enumerate(raw))


def _gpus(body: Mapping[str, Any]) -> tuple[GpuReading, ...]:
    """The GPUs; one without an index gets its place in the list."""
    places = itertools.count()

    def build(uuid: str, index: int | None = None, vendor: str = "", **rest: Any) -> GpuReading:
        place = next(places)
        return GpuReading(uuid, place if index is None else index, vendor, **rest)

    return _entries(body, "gpus", lambda entry, where: decode(build, _GPU, entry, where))


def _logged(namespace: str, pod: str, container: str, line: str) -> LogLine:
    """The line with its event: lines are kept raw and recognised once, when they are read."""
    return log_line(namespace, pod, container, line)


def _page(entry: object, where: str, time: float, build: PageBuilder) -> Scrape:
    body = read_object(entry)
    given: dict[str, Any] = decode(dict, _PAGE_GIVEN, body, where)
    page = decode(
        lambda **values: build(given.get("exposition"), time=given.get("t", time), **values), _PAGE, body, where
    )
    known = {name: given[name] for name in ("version", "dialect", "group") if name in given}
    if page.engines:
        known.pop("dialect", None)  # the page itself shows whose it is
    return replace(page, **known) if known else page


def _pod(entry: object, where: str) -> tuple[tuple[str, str], str]:
    """A pod's name with its uid."""
    return decode(lambda namespace, pod, uid: ((namespace, pod), uid), _POD, entry, where)


def _health(body: Mapping[str, Any]) -> dict[str, SourceHealth]:
    raw = body.get("health")
    if raw is None:
        return {}
    return {
        name: decode(lambda _name=name, **values: SourceHealth(_name, **values), _HEALTH, entry, f"health.{name}")
        for name, entry in read_object(raw).items()
    }


def tick_from_json(line: bytes, build: PageBuilder) -> Snapshot:
    """Read one tick; ``build`` makes an ``Scrape`` from raw text. Raises ``MalformedTick``."""
    body = _parse(line)
    if body.get("t") is None:
        raise MalformedTick("'t' is missing")
    try:
        time = read_time(body["t"])
    except MalformedTick as error:
        raise MalformedTick(f"t: {error}") from error
    targets = body.get("targets")
    return Snapshot(
        time=time,
        gpus=_gpus(body),
        pages=_entries(body, "engines", lambda entry, where: _page(entry, where, time, build)),
        containers=_entries(body, "containers", lambda e, w: decode(ContainerReading, _CONTAINER, e, w)),
        owners=_entries(body, "owners", lambda e, w: decode(GpuOwner, _OWNER, e, w)),
        logs=_entries(body, "logs", lambda e, w: decode(_logged, _LOG, e, w)),
        allocator=_entries(body, "allocator", lambda e, w: decode(AllocatorReading, _ALLOCATOR, e, w)),
        steps=_entries(body, "steps", lambda e, w: decode(StepStats, _STEPS, e, w)),
        node_conditions=_entries(body, "node_conditions", _node_condition),
        health=_health(body),
        targets=None if targets is None else read_names(targets),
        pods=None if body.get("pods") is None else dict(_entries(body, "pods", _pod)),
        process_pods={} if body.get("process_pods") is None else read_pods(body["process_pods"]),
        expected_gpus={} if body.get("expected_gpus") is None else read_counts(body["expected_gpus"]),
    )


def _node_condition(entry: object, where: str) -> NodeCondition:
    body = read_object(entry)
    if "type" not in body:
        raise MalformedTick(f"{where}: 'type' is missing")
    status = body.get("status")
    return NodeCondition(read_name(body["type"]), None if status is None else read_flag(status))


def tick_to_json(snapshot: Snapshot) -> str:
    """One tick as a line, without line end. Pages must have been fetched with their exposition kept."""
    body: dict[str, object] = {"t": snapshot.time}
    lists: tuple[tuple[str, list[dict[str, object]]], ...] = (
        ("gpus", [encode(_GPU, item) for item in snapshot.gpus]),
        ("engines", [_page_entry(page, snapshot.time) for page in snapshot.pages]),
        ("containers", [encode(_CONTAINER, item) for item in snapshot.containers]),
        ("owners", [encode(_OWNER, item) for item in snapshot.owners]),
        ("logs", [encode(_LOG, item) for item in snapshot.logs]),
        ("allocator", [encode(_ALLOCATOR, item) for item in snapshot.allocator]),
        ("steps", [encode(_STEPS, item) for item in snapshot.steps]),
        ("node_conditions", [{"type": item.type, "status": item.status} for item in snapshot.node_conditions]),
    )
    body.update((name, entries) for name, entries in lists if entries)
    if snapshot.targets is not None:
        body["targets"] = list(snapshot.targets)
    if snapshot.pods is not None:
        body["pods"] = [{"namespace": name[0], "pod": name[1], "uid": uid} for name, uid in snapshot.pods.items()]
    if snapshot.process_pods:
        body["process_pods"] = {str(pid): list(pod) for pid, pod in snapshot.process_pods.items()}
    if snapshot.expected_gpus:
        body["expected_gpus"] = dict(snapshot.expected_gpus)
    if snapshot.health:
        body["health"] = {name: encode(_HEALTH, item) for name, item in snapshot.health.items()}
    return json.dumps(body, separators=(",", ":"))


def _page_entry(page: Scrape, time: float) -> dict[str, object]:
    entry = encode(_PAGE, page)
    given = {
        "t": None if page.time == time else page.time,
        "version": page.version,
        "dialect": None if page.engines else page.dialect or None,
        "group": page.group or None,
        "exposition": page.exposition,
    }
    entry.update((key, value) for key, value in given.items() if value is not None)
    return entry
