"""The recording format, version 1: header and tick as JSON, and the way back.

A recording holds what was *read*, never what was concluded. The first line is the header, each further line a tick;
every key of a tick but ``t`` may be missing or null, and unknown keys are ignored. Keys are the field names of
``kvpressure.model.readings``; an engine page stands as ``exposition``, the raw text as scraped.

Beyond the documented keys a tick may carry ``owners``, ``pods``, ``steps``, ``caches``, ``node_conditions``,
``targets``, ``process_pods``, ``expected_gpus`` and ``health``, and an engine ``t`` (when the page was fetched, if not
at the tick's time), ``env``, ``version``, ``group``, ``pool`` and ``dialect`` (of a page that does not show it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from kvpressure.engines import registry as engines
from kvpressure.engines.registry import log_line
from kvpressure.errors import InputError, shown
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import (
    AllocatorReading,
    CacheReading,
    ContainerReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    NodeCondition,
    Run,
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
    at,
    by_number,
    describe,
    encode,
    fields,
    list_of,
    map_of,
    read_amount,
    read_counts,
    read_flag,
    read_level,
    read_moment,
    read_name,
    read_names,
    read_pair,
    read_ratio,
    read_text,
    read_texts,
    read_time,
    read_whole,
    record,
    records,
    values_of,
)

FORMAT: Final = "kvpressure-recording"
VERSION: Final = 1
LONG_LINE_BYTES: Final = 1024 * 1024  # up to which any line may be read
MAX_VALUES: Final = 500_000  # of a longer one; a tick of 64 engines with batch sizes has 70 000
"""Values in one long line of a recording. Beyond: the tick is skipped. Shown as: reported by the command."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LINE_ENDS: Final = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
#: Builds the page of one engine entry; arguments as ``sources.scrape.scanner.parse_scrape``.
PageBuilder = Callable[..., Scrape]


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
    """Read the first line. Raises ``InputError`` for anything that is not a version 1 header."""
    if not line.strip():
        raise InputError(f'{where}: empty; a recording begins with a line {{"format": "{FORMAT}", ...}}')
    try:
        body = _parse(line)
    except MalformedTick:
        body = {}
    if body.get("format") != FORMAT:
        raise InputError(f'{where}:1: not a recording; the first line must be JSON with "format": "{FORMAT}"')
    version = body.get("version")
    if version != VERSION or isinstance(version, bool):
        raise InputError(f"{where}:1: version {shown(version)} is not supported; this release reads version {VERSION}")
    try:
        return at("header", record(Header, _HEADER), body)
    except MalformedTick as error:
        raise InputError(f"{where}:1: {error}; give a recording (kvpressure record writes one)") from error


# --- records: the fields of each reading, used in both directions --------------------------------------------------


def _read_line(value: object) -> str:
    """One line of a log: what would begin another one is shown as its escape."""
    return "".join(visible(char) if char in _LINE_ENDS else char for char in read_text(value))


_POOL: Final = (
    *fields(read_name, "name", "role", "source", required=True),
    *fields(read_name, "revision", "pair", default=""),
)
_RUN: Final = (
    *fields(read_moment, "since", "answered"),
    *fields(read_name, "stopped", "ended", default=""),
    *fields(read_flag, "counted", "assumed", default=False),
)
_CONTAINER_NAME: Final = fields(read_name, "namespace", "pod", "container", required=True)
_HEADER: Final = (Field("interval_seconds", read_level), *fields(read_name, "node", "source"))
_PROCESS: Final = (Field("pid", read_amount, required=True), Field("used_bytes", read_amount))
_TERMINATION: Final = (Field("reason", read_name), Field("exit_code", read_whole), Field("finished_at", read_moment))


_GPU: Final = (
    Field("uuid", read_name, required=True),
    Field("index", read_amount),
    Field("vendor", read_name),
    *fields(read_name, "name", "driver", "pci_bus_id", "parent_uuid", "error"),
    *fields(read_amount, "minor", "gpu_instance_id", "gpu_instance_start"),
    Field("unseen_parts", read_flag, default=False),
    *fields(read_amount, "memory_total_bytes", "memory_used_bytes"),
    *fields(read_ratio, "utilization_ratio", "sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio"),
    *fields(read_level, "power_watts", "power_limit_watts"),
    Field("throttle_reasons", read_names, list),
    by_number("xid_errors", read_amount),
    by_number("xid_last_times", read_moment),
    records("processes", GpuProcess, _PROCESS),
)
_PAGE: Final = (
    Field("target", read_name, required=True),
    *fields(read_name, "namespace", "pod", "container", default=""),
    Field("gpus", read_names, list, default=()),
    Field("args", read_texts, engines.public_texts, default=()),
    Field("env", map_of(read_text, read_text), engines.public_environment, default={}),
    Field("error", read_name),
    Field("duration_seconds", read_level),
)
_PAGE_GIVEN: Final = (
    Field("t", read_time),
    Field("exposition", read_text),
    *fields(read_name, "version", "dialect", "group"),
    Field("args_source", read_name, default="args"),
    Field("assumed", read_flag, default=False),
    Field("pool", record(EnginePool, _POOL)),
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
    Field("last_termination", record(Termination, _TERMINATION), partial(encode, _TERMINATION)),
    Field("pool", record(EnginePool, _POOL), partial(encode, _POOL)),
    Field("run", record(Run, _RUN), partial(encode, _RUN)),
)
_LOG: Final = (*_CONTAINER_NAME, Field("line", _read_line, engines.public_line, required=True))
_ALLOCATOR: Final = (
    *fields(read_name, "namespace", "pod", required=True),
    Field("rank", read_amount, required=True),
    *fields(read_amount, "allocated_bytes", "reserved_bytes", "inactive_split_bytes"),
)
_STEPS: Final = (
    *fields(read_name, "namespace", "pod", "engine", required=True),
    *fields(read_moment, "started", "written", required=True),
    *fields(read_amount, "steps", "decoded", required=True),
    Field("exact", read_flag, default=False),
    Field("kv_max", read_ratio),
    by_number("sizes", read_amount),
)
_CACHE: Final = (
    *fields(read_name, "target", "engine", required=True),
    Field("time", read_moment, required=True),
    Field("reason", read_name, default=""),
    *(Field(name, map_of(read_ratio, read_name), dict, default={}) for name in ("adapters", "salts")),
    Field("resident_tokens", read_amount),
    Field("counters", map_of(read_level, read_name), dict, default={}),
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
_NODE_CONDITION: Final = (Field("type", read_name, required=True), Field("status", read_flag))
#: The entries of each list in a tick, and of ``health`` by source.
ENTRIES: Final = {
    "gpus": _GPU,
    "engines": (*_PAGE, *_PAGE_GIVEN),
    "containers": _CONTAINER,
    "logs": _LOG,
    "allocator": _ALLOCATOR,
    "steps": _STEPS,
    "caches": _CACHE,
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


def _gpus(value: object) -> tuple[GpuReading, ...]:
    """The GPUs; one without an index gets its place in the list."""
    listed = list_of(values_of(_GPU))(value)
    return tuple(GpuReading(**{"index": place, "vendor": "", **gpu}) for place, gpu in enumerate(listed))


def _pods(value: object) -> dict[tuple[str, str], str]:
    return {(pod["namespace"], pod["pod"]): pod["uid"] for pod in list_of(values_of(_POD))(value)}


def _health(value: object) -> dict[str, SourceHealth]:
    by_source = map_of(values_of(_HEALTH), read_text)(value)
    return {name: SourceHealth(name, **health) for name, health in by_source.items()}


_TIME: Final = Field("t", read_time, required=True)
#: A tick but for its time and its pages, by the names of ``Snapshot``.
_TICK: Final = (
    Field("gpus", _gpus, lambda gpus: [encode(_GPU, gpu) for gpu in gpus], default=()),
    records("containers", ContainerReading, _CONTAINER),
    records("owners", GpuOwner, _OWNER),
    records("logs", log_line, _LOG),  # kept raw, and recognised once, when they are read
    records("allocator", AllocatorReading, _ALLOCATOR),
    records("steps", StepStats, _STEPS),
    records("caches", CacheReading, _CACHE),
    records("node_conditions", NodeCondition, _NODE_CONDITION),
    Field("targets", read_names, list),
    Field(
        "pods",
        _pods,
        lambda pods: [{"namespace": name[0], "pod": name[1], "uid": uid} for name, uid in pods.items()],
    ),
    by_number("process_pods", read_pair),
    Field("expected_gpus", read_counts, dict, default={}),
    Field(
        "health",
        _health,
        lambda sources: {name: encode(_HEALTH, health) for name, health in sources.items()},
        default={},
    ),
)


def tick_from_json(line: bytes, build: PageBuilder) -> Snapshot:
    """Read one tick; ``build`` makes an ``Scrape`` from raw text. Raises ``MalformedTick``."""
    body = _parse(line)
    engines = body.get("engines")
    try:
        values = values_of((_TIME, *_TICK))(body)
        time = values.pop("t")
        pages = at(".engines", list_of(partial(_page, time, build)), [] if engines is None else engines)
    except MalformedTick as error:
        raise MalformedTick(str(error).removeprefix(".")) from error
    return Snapshot(time, pages=pages, **values)


def _page(time: float, build: PageBuilder, entry: object) -> Scrape:
    given = values_of(_PAGE_GIVEN)(entry)
    text, time = given.pop("exposition", None), given.pop("t", time)
    page = build(text, time=time, **values_of(_PAGE)(entry))
    if page.engines:
        given.pop("dialect", None)  # the page itself shows whose it is
    return replace(page, **given) if given else page


def tick_to_json(snapshot: Snapshot) -> str:
    """One tick as a line, without line end. Pages must have been fetched with their exposition kept."""
    body: dict[str, object] = {"t": snapshot.time}
    if snapshot.pages:
        body["engines"] = [_page_entry(page, snapshot.time) for page in snapshot.pages]
    return json.dumps({**body, **encode(_TICK, snapshot)}, separators=(",", ":"))


def _page_entry(page: Scrape, time: float) -> dict[str, object]:
    entry = encode(_PAGE, page)
    given = {
        "t": None if page.time == time else page.time,
        "version": page.version,
        "dialect": None if page.engines else page.dialect or None,
        "group": page.group or None,
        "args_source": None if page.args_source == "args" else page.args_source,
        "assumed": page.assumed or None,
        "pool": None if page.pool is None else encode(_POOL, page.pool),
        "exposition": page.exposition,
    }
    entry.update((key, value) for key, value in given.items() if value is not None)
    return entry
