"""What one pod, container, GPU, file, target or process makes a source raise costs that one alone and is counted.

Every source reads one innocent subject and one evil one. Then every call to a driver, every field of what is read, and
every function that works for the evil one alone fails, one at a time.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import Scrape
from kvpressure.sources import base
from kvpressure.sources.base import BeyondSubject, Reading, Source, SourceError, isolated
from kvpressure.sources.catalog import registry
from kvpressure.sources.kubernetes import podresources
from kvpressure.sources.kubernetes.pods import PodsSource
from kvpressure.sources.scrape import source as scraping
from tests.sources.kubernetes.kubelet import claim
from tests.sources.two_subjects import (
    AMDSMI,
    ANSWERS,
    EVIL,
    GOOD,
    MAKERS,
    NAMESPACE,
    NODE_CALLS,
    Node,
    evil_pod,
    mentions,
)

pytestmark = pytest.mark.slow

ERRORS = (OSError(36, "File name too long"), ValueError("x"), OverflowError("x"), RuntimeError("x"))
OF_PODS = ("pods", "podresources", "engines", "procfs", "cgroup", "logs")
WITHOUT_SUBJECTS = {"node", "demo"}  # one object; nothing from outside


def innocent(reading: Reading) -> dict[str, Any]:
    """What is read of the innocent subject."""
    found: dict[str, Any] = {"expected_gpus": reading.expected_gpus}
    for field in fields(Reading):
        value = getattr(reading, field.name)
        if isinstance(value, tuple):
            found[field.name] = [_timeless(one) for one in value if mentions(GOOD, one) and not mentions(EVIL, one)]
    found["process_pods"] = {pid: place for pid, place in (reading.process_pods or {}).items() if "good" in place}
    return found


def _timeless(item: Any) -> Any:
    return replace(item, time=0.0, duration_seconds=None) if isinstance(item, Scrape) else item


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def read(source: Source) -> Reading:
    """The second of two readings, with the failures and the log lines of both; of scrapes the first."""
    readings = []
    try:
        for _ in range(1 if isinstance(source, scraping.EngineSource) else 2):
            readings.append(source.read())
            if isinstance(source, PodsSource):
                assert source._views[0].watcher._api.watched.wait(10)
    finally:
        source.close()
    logs = None if readings[0].logs is None else tuple(line for one in readings for line in one.logs or ())
    return replace(readings[-1], logs=logs, errors=sum((Counter(one.errors) for one in readings), Counter()))


def test_every_source_with_subjects_is_here() -> None:
    assert {name.partition(" ")[0] for name in MAKERS} == set(registry()) - WITHOUT_SUBJECTS


@pytest.mark.parametrize("name", MAKERS)
def test_both_subjects_are_read(node: Node, name: str) -> None:
    reading = read(node.source(name))
    assert reading.errors == {}
    assert items(reading, EVIL)
    assert len(items(reading, GOOD)) == len(items(reading, EVIL))


def items(reading: Reading, marks: tuple[str, ...]) -> list[object]:
    """Everything in the reading that is about one subject."""
    values = [value for field in fields(Reading) if isinstance(value := getattr(reading, field.name), tuple)]
    return [item for value in values for item in value if mentions(marks, item)]


def assert_isolated(shown: Reading, undisturbed: Reading, failed: str) -> None:
    """The innocent subject is read as without the failure, which is counted or has cost a value that may be missing."""
    assert innocent(shown) == innocent(undisturbed), failed
    assert sum(shown.errors.values()) or len(items(shown, EVIL)) == len(items(undisturbed, EVIL)), failed


# --- drivers ------------------------------------------------------------------------------------------------------

STRANGE = (None, "x" * 300, "../\0\n", 10**400, {"a": {"b": [None]}})
HOSTILE = (None, "", "x" * 70_000, "../\0\n", float("nan"), -1, 10**400, True, [], {}, [[[]]], {"a": {"b": [None]}})


def hostile(value: object, instead: tuple[object, ...] = HOSTILE) -> Iterator[Any]:
    """The value with each part of it replaced by hostile ones, one at a time."""
    if isinstance(value, SimpleNamespace):
        for changed in hostile(vars(value), instead):
            yield SimpleNamespace(**changed) if isinstance(changed, dict) else changed
        return
    yield from instead
    if isinstance(value, dict):
        for name, part in value.items():
            yield {key: other for key, other in value.items() if key != name}
            yield from ({**value, name: changed} for changed in hostile(part, instead))
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            for changed in hostile(part, instead):
                yield type(value)([*value[:place], changed, *value[place + 1 :]])


@pytest.mark.parametrize("begun", [False, True], ids=["first reading", "later reading"])
@pytest.mark.parametrize("evil", ["evil", "evil instance"])
def test_a_driver_call_that_fails_or_answers_nonsense_costs_its_gpu_alone(node: Node, evil: str, begun: bool) -> None:
    driver = node.driver
    driver.evil = evil

    def shown(instead: dict[str, object]) -> Reading:
        driver.instead = {}
        source = node.source("nvidia")
        if begun:
            source.read()
        driver.instead, driver.called = instead, {}
        return read(source)

    undisturbed = shown({})
    expected = len(undisturbed.gpus or ())
    functions = dict(driver.called)
    assert len(functions) > 3
    for function, answer in functions.items():
        for error in (*ERRORS, MemoryError()):
            found = shown({function: error})
            assert innocent(found) == innocent(undisturbed), (function, error)
            assert found.errors.get("internal") or function not in driver.called, (function, error)
            if begun:
                assert len(found.gpus or ()) == expected, (function, error)
        for nonsense in hostile(answer):
            assert innocent(shown({function: nonsense})) == innocent(undisturbed), (function, nonsense)
    node.gpm = False  # whose buffers are no sign that the GPU answers
    undisturbed = shown({})
    everything = shown(dict.fromkeys(ANSWERS, RuntimeError("x")))
    assert innocent(everything) == innocent(undisturbed)
    if begun:
        assert [gpu.error for gpu in everything.gpus or () if gpu.uuid == f"GPU-{evil}"] == ["internal"]


@pytest.mark.parametrize(
    "function", [name for name in AMDSMI if name.startswith("amdsmi_get_") and name not in NODE_CALLS]
)
def test_a_call_of_amds_library_that_fails_or_answers_nonsense_costs_its_gpu_alone(node: Node, function: str) -> None:
    for busy in (node.root / "sys").rglob("gpu_busy_percent"):
        busy.unlink()  # what sysfs lacks is asked of the library
    undisturbed = read(node.source("amd"))
    assert [gpu.utilization_ratio for gpu in undisturbed.gpus or ()] == [0.55, 0.55]
    answer = AMDSMI[function](EVIL[4], *[0] * ("memory" in function))
    nonsense = hostile(answer) if function != "amdsmi_get_gpu_device_bdf" else ()  # a library that sees others is wrong
    for instead in (*ERRORS, MemoryError(), *nonsense):
        node.library.instead = {function: instead}
        assert_isolated(read(node.source("amd")), undisturbed, repr(instead)[:100])


# --- fields -------------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "each field of a pod in turn missing, of another type, empty, huge or a path",
    "every source reads the other pods as before",
)
@pytest.mark.writer(
    "anyone who may start a pod on the node",
    "any field of the pod, its logs",
    "its own readings",
    "each pod, container, GPU, file, target and process is read in isolation",
)
@pytest.mark.parametrize("part", ["metadata", "spec", "status"])
def test_no_field_of_a_pod_costs_another_pod_its_reading(node: Node, part: str) -> None:
    innocents = {name: innocent(read(node.source(name))) for name in OF_PODS}
    document = evil_pod()
    seen = []  # pods that were handed to the other sources
    for changed in hostile(document[part], STRANGE):
        node.documents[0] = {**document, part: changed}
        for name in OF_PODS if node.pods not in seen else ("pods",):
            assert innocent(read(node.source(name))) == innocents[name], (name, changed)
        seen.append(node.pods)


def test_no_field_of_the_kubelets_answer_costs_another_pod_its_owners(node: Node) -> None:
    undisturbed = innocent(read(node.source("podresources")))
    for namespace, name, container, resource, device in _one_strange(
        NAMESPACE, "evil", "vllm", "nvidia.com/gpu", "GPU-evil"
    ):
        evil = claim(name, namespace, container, {resource: [device]}, [("gpu.nvidia.com", device)])
        node.claims.pod_resources[0].CopyFrom(evil)
        assert innocent(read(node.source("podresources"))) == undisturbed


def _one_strange(*values: str) -> Iterator[list[str]]:
    for place in range(len(values)):
        for strange in ("", "x" * 70_000, "../\0\n", "\u202e", "0" * 300):
            yield [*values[:place], strange, *values[place + 1 :]]


CONTENTS = (b"", b"\0", b"\xff\xfe\n", b"9" * 5000, b"nan nan\n", b"-1\n", b"x" * 100_000, b"[" * 10_000)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("amd", "sys"), ("procfs", "proc"), ("processes", "proc"), ("cgroup", "cgroup"), ("logs", "logs")],
)
def test_no_content_of_a_file_costs_another_subject_its_reading(node: Node, name: str, folder: str) -> None:
    undisturbed = innocent(read(node.source(name)))
    paths = [path for path in sorted((node.root / folder).rglob("*")) if path.is_file() and mentions(EVIL, path)]
    paths = [path for path in paths if path.name != "vendor"]  # else it is no GPU of AMD
    assert paths
    for place, path in enumerate(paths):
        before = path.read_bytes()
        for content in CONTENTS if len(paths) < 10 else (CONTENTS[place % len(CONTENTS)], CONTENTS[-3]):
            path.write_bytes(content)
            assert innocent(read(node.source(name))) == undisturbed, (path, content[:20])
        path.write_bytes(before)


# --- functions ----------------------------------------------------------------------------------------------------

SOURCES = str(Path(base.__file__).parent)


WITHOUT_INPUT = ("sources/base.py", "kubernetes/pod.py", "kubernetes/discovery.py", "scrape/targets.py")
"""Modules that only look at what another one has checked."""

AROUND = frozenset(
    {
        *("NvidiaSource._read_device", "NvmlDevice.handle", "NvmlDevice.identities", "HangGuard.call"),
        *("Queries.isolated", "DeviceQuery.isolated", "EventLog.onto", "CountingFiles.isolated", "CountingFiles.text"),
        *("unreadable", "Smi._ask", "_WatchedPods._read", "bare_pod", "_FetchThreads.submit", "_directories"),
        *("_PodTable.put", "_PodTable.remove", "Pod.precedence"),
        *("EngineSource.set_targets.<locals>.precedence", "EngineSource.set_targets.<locals>.place"),
        *("PluginSource.read.<locals>.precedence", "pod_of_cgroup", "_of_name", "below", "component"),
        *("Session._find", "_subject", "_listed", "_Directory.bytes", "_reports", "_readings_of_each_pod"),
    }
)
"""Functions that isolate the subject, name it, or hand on what is known of it."""

LOOKING = ("bare_pod", "_pod_directories")
"""Functions that look at names alone, to find out which subject something belongs to."""


class FunctionFaults:
    """Makes one call of a function of the sources fail that is about the evil subject alone, in whatever thread."""

    def __init__(self, at: tuple[CodeType, int] | None = None, error: Exception | None = None) -> None:
        self.calls: list[tuple[CodeType, int]] = []  # the function, how often it was called before
        self._counts: Counter[CodeType] = Counter()
        self._at = at
        self._error = error

    @contextmanager
    def active(self) -> Iterator[None]:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(SOURCES) or file.endswith(WITHOUT_INPUT):
            return
        if code.co_qualname in AROUND or "<" in code.co_name:
            return
        if self._at is not None and code is not self._at[0]:
            return
        if _about_evil(frame) and not any(of.f_code.co_name in LOOKING for of in _callers(frame, 2)):
            call = (code, self._counts[code])
            self._counts[code] += 1
            self.calls.append(call)
            if call == self._at and self._error is not None:
                raise self._error


def _callers(frame: FrameType, most: int) -> Iterator[FrameType]:
    for _ in range(most):
        if frame.f_back is not None:
            frame = frame.f_back
            yield frame


def _about_evil(frame: FrameType) -> bool:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    given = [frame.f_locals[name] for name in names if name in frame.f_locals]
    text = repr(given) + "".join(repr(vars(one)) for one in given if hasattr(one, "__dict__"))
    return any(mark in text for mark in EVIL) and not any(mark in text for mark in GOOD)


@pytest.mark.fault(
    "sources",
    "one pod, container, GPU, file, target or process makes the exporter raise",
    "that one's values are absent, a GPU has `gpu_up` 0; all others are read",
    '`source_errors_total{reason="internal"}`, one log line',
    "next reading",
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_function_that_fails_costs_its_subject_alone(node: Node, name: str) -> None:
    def shown(faults: FunctionFaults) -> Reading:
        source = node.source(name)
        with faults.active():
            return read(source)

    undisturbed = shown(seen := FunctionFaults())
    for at, (code, before) in enumerate(call for call in seen.calls if call[1] < 3):
        error = ERRORS[at % len(ERRORS)]
        failed = f"{type(error).__name__} at call {before + 1} of {code.co_qualname}"
        assert_isolated(shown(FunctionFaults((code, before), error)), undisturbed, failed)


def test_a_device_that_fails_costs_its_container_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = read(node.source("podresources"))
    real = podresources.from_plugin

    def failing(device: str, gpus: Any) -> Any:
        if device == "GPU-evil":
            raise KeyError
        return real(device, gpus)

    monkeypatch.setattr(podresources, "from_plugin", failing)
    assert_isolated(read(node.source("podresources")), undisturbed, "a device")


# --- the guard ----------------------------------------------------------------------------------------------------


def test_a_failure_is_counted_by_its_reason_and_logged_once_without_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "_failures", FailureLog())
    errors: dict[str, int] = {}
    with caplog.at_level(logging.ERROR):
        for error in (
            RuntimeError("hunter2"),
            RuntimeError("again"),
            OSError("x"),
            PermissionError("x"),
            SourceError("y"),
        ):
            with isolated("pod prod/chat-0\x1b", errors, base.FILE_REASONS):
                raise error
    assert errors == {"internal": 2, "unreadable": 1, "permission_denied": 1, "y": 1}
    assert len(caplog.records) == 1
    assert "pod prod/chat-0?" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_failure_that_concerns_more_than_the_subject_passes() -> None:
    errors: dict[str, int] = {}
    with pytest.raises(BeyondSubject), isolated("GPU 0", errors):
        raise BeyondSubject
    assert errors == {}
