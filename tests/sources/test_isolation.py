"""What one pod, container, GPU, file, target or process makes a source raise costs that one alone and is counted.

Every source reads one innocent subject and one evil one. Then every call to a driver, every field of what is read, and
every function that works for the evil one alone fails, one at a time.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import GpuProcess, GpuReading, Scrape
from kvpressure.settings.settings import Settings
from kvpressure.sources import base
from kvpressure.sources.base import BeyondSubject, Reading, Source, SourceError, isolated
from kvpressure.sources.catalog import CollectorSettings, registry
from kvpressure.sources.gpu.amd.source import AmdSource
from kvpressure.sources.gpu.nvidia.source import NvidiaSource
from kvpressure.sources.host.cgroup import CgroupSource
from kvpressure.sources.host.container_logs import LogsSource
from kvpressure.sources.host.processes import ProcessesSource
from kvpressure.sources.host.procfs import ProcfsSource
from kvpressure.sources.kubernetes import podresources
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.kubernetes.pods import PodsSource
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape import source as scraping
from tests.sources.gpu.amd import trees
from tests.sources.kubernetes.kubelet import claim
from tests.sources.kubernetes.objects import Json, container_id, pod, uid_of
from tests.sources.kubernetes.podresources_api import api_pb2

pytestmark = pytest.mark.slow

NOW = 1_790_000_000.0
NAMESPACE = "inference"
ERRORS = (OSError(36, "File name too long"), ValueError("x"), OverflowError("x"), RuntimeError("x"))


def _marks(name: str, bus: str, number: int, pid: int, address: str) -> tuple[str, ...]:
    """Texts by which a subject is known, whatever the source calls it."""
    uid = uid_of(NAMESPACE, name)
    render = 128 + number
    return (
        name,
        uid,
        uid.replace("-", "_"),
        container_id(NAMESPACE, name, "vllm"),
        bus,
        f"card{number}",
        f"renderD{render}",
        f"minor={render}",
        str(trees.gpu_id(render)),
        f"nodes/{1 + number}",
        f"proc/{pid}",
        f"pid={pid}",
        address,
        f"GPU-8f6c2a1d4e3b5a{number:02x}",
    )


EVIL = _marks("evil", "0000:05:00.0", 0, 666, "10.6.6.6")  # before the innocent one in every order
GOOD = _marks("good", "0000:27:00.0", 1, 777, "10.7.7.7")


def mentions(marks: tuple[str, ...], item: object) -> bool:
    text = repr(item)
    return any(mark in text for mark in marks)


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


# --- the sources, each over an evil and an innocent subject -----------------------------------------------------


class Node:
    """Files and answers of one node."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.documents = [evil_pod(), pod("good", ip="10.7.7.7")]
        self.driver = Driver(patch)
        self.gpm = True
        self.library = Library(patch)
        self.settings = Settings(
            node_name="node",
            host_sys=root / "sys",
            host_proc=root / "proc",
            host_cgroup=root / "cgroup",
            host_pod_logs=root / "logs",
            kubelet_socket=root / "kubelet.sock",
        )
        tree = trees.mi300x(root / "sys", 2)
        self._files(tree)
        claims = [claim(name, devices={"nvidia.com/gpu": [f"GPU-{name}"]}) for name in ("evil", "good")]
        self.claims = api_pb2.ListPodResourcesResponse(pod_resources=claims)
        patch.setattr(podresources, "unary", lambda *_: self.claims.SerializeToString())
        patch.setattr(scraping.Fetcher, "fetch", lambda *_: METRICS)
        patch.setattr("kvpressure.sources.scrape.source.time", lambda: NOW)
        self.gpus = tuple(
            GpuReading(f"GPU-{name}", index, "nvidia", processes=(GpuProcess(pid, 1),))
            for index, (name, pid) in enumerate((("evil", 666), ("good", 777)))
        )

    def _files(self, tree: trees.Tree) -> None:
        tree.process(666, {128: 5})
        tree.process(777, {129: 7})
        self._write("cgroup/cgroup.controllers", "cpu memory\n")
        self._write("kubelet.sock", "")
        sockets = [
            f"0: 0100007F:{7000 + pid:04X} 00000000:0000 0A 0:0 0:0 0 {os.getuid()} 0 {pid}" for pid in (666, 777)
        ]
        self._write("proc/net/tcp", "\n".join(["  sl", *sockets]))
        for name, pid in (("evil", 666), ("good", 777)):
            uid, own = uid_of(NAMESPACE, name), container_id(NAMESPACE, name, "vllm")
            slices = f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{own}.scope"
            self._write(f"proc/{pid}/cgroup", f"0::/{slices}\n")
            self._write(f"proc/{pid}/cmdline", f"vllm\0serve\0{name}\0--port\0{7000 + pid}\0")
            self._write(f"proc/{pid}/stat", f"{pid} (vllm) S 1 1 1")
            (self.root / f"proc/{pid}/fd").mkdir()
            (self.root / f"proc/{pid}/fd/3").symlink_to(f"socket:[{pid}]")
            for file, text in CGROUP.items():
                self._write(f"cgroup/{slices}/{file}", text)
            line = "2026-01-01T00:00:00Z stderr F torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB\n"
            self._write(f"logs/{NAMESPACE}_{name}_{uid}/vllm/0.log", line)
            self._write(f"logs/{NAMESPACE}_{name}_{uid}/vllm/0.log.20260101-000000", line)

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @property
    def pods(self) -> tuple[Any, ...]:
        return tuple(found for item in self.documents if (found := read_pod(item, Policy())) is not None)

    def discovered(self) -> Settings:
        self.settings.shared.pods, self.settings.shared.gpus = tuple(self.pods), self.gpus
        return self.settings

    def source(self, name: str) -> Source:
        self.settings.shared.__init__()  # as of a new process
        (self.root / "positions").unlink(missing_ok=True)
        return MAKERS[name](self)

    def engines(self) -> Source:
        shared = SharedDiscovery()
        shared.targets = tuple(target for one in self.pods for engine in one.engines for target in engine.targets)
        collectors = {"engines": CollectorSettings(True, 60.0, 60.0)}  # as long as a busy machine may need
        return scraping.EngineSource(replace(self.settings, shared=shared, collectors=collectors))

    def processes(self) -> Source:
        self.settings.shared.gpus = self.gpus
        return ProcessesSource(self.settings, Clock())


def evil_pod() -> Json:
    """A pod with every field that is read of one."""
    probe = {"httpGet": {"path": "/health", "port": 8000}}
    field = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}}
    document = pod(
        "evil",
        ip="10.6.6.6",
        annotations={
            "kubernetes.io/config.hash": "0123456789abcdef0123456789abcdef",
            "kubernetes.io/config.mirror": "0123456789abcdef0123456789abcdef",
            "kvpressure.io/port": "8000",
            "kvpressure.io/path": "/metrics",
            "kvpressure.io/scrape": "true",
            "kvpressure.io/container": "vllm",
            "kvpressure.io/alerts": "ticket",
        },
        labels={"app": "m", "ray.io/cluster": "c", "ray.io/node-type": "head"},
        last={"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T00:00:00Z"},
        status={"reason": "Evicted", "initContainerStatuses": [{"name": "init", "restartCount": 1}]},
    )
    document["spec"]["restartPolicy"] = "Always"
    document["metadata"]["ownerReferences"] = [{"kind": "Node", "name": "node", "controller": True}]
    document["spec"]["containers"][0] |= {
        "readinessProbe": probe,
        "env": [{"name": "VLLM_PORT", "value": "8000"}, {"name": "VLLM_APP", **field}],
    }
    return document


CGROUP = {
    "cpu.stat": "usage_usec 5000000\nnr_periods 100\nnr_throttled 25\n",
    "cpu.max": "800000 100000\n",
    "cpu.pressure": "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\n",
    "memory.current": "1000000\n",
    "memory.max": "2000000\n",
    "memory.stat": "inactive_file 400000\n",
}
MAKERS: dict[str, Callable[[Node], Source]] = {
    "nvidia": lambda node: NvidiaSource(SimpleNamespace(nvidia_gpm=node.gpm), clock=Clock(4.0)),
    "amd": lambda node: AmdSource(node.settings, Clock(100.0)),
    "podresources": lambda node: podresources.PodResourcesSource(node.discovered()),
    "pods": lambda node: PodsSource(node.settings, Api(node.documents), (0.02, 0.1)),
    "engines": Node.engines,
    "procfs": lambda node: ProcfsSource(node.discovered()),
    "processes": Node.processes,
    "cgroup": lambda node: CgroupSource(node.discovered(), Clock()),
    "logs": lambda node: LogsSource(node.discovered(), lambda: 1_767_225_600.0),
}
OF_PODS = ("pods", "podresources", "engines", "procfs", "cgroup", "logs")
WITHOUT_SUBJECTS = {"node", "demo"}  # one object; nothing from outside


class Clock:
    """Goes on each time it is asked."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self._seconds
        return self.now


class Api:
    """An API server whose watch ends after the same pods as its list."""

    def __init__(self, documents: list[Json]) -> None:
        self._documents = documents
        self.watched = threading.Event()

    def items(self, *_: object) -> Iterator[Json]:
        yield from self._documents
        return {"resourceVersion": "1"}

    def watch(self, *_: object) -> Iterator[Json]:
        yield from ({"type": "MODIFIED", "object": one} for one in self._documents)
        self.watched.set()


_LABELS = 'engine="0",model_name="m"'
METRICS = f"""vllm:num_requests_running{{{_LABELS}}} 3
vllm:num_requests_waiting{{{_LABELS}}} 0
vllm:kv_cache_usage_perc{{{_LABELS}}} 0.5
kvpressure:allocator{{rank="0",figure="allocated_bytes"}} 5
kvpressure:written_seconds{{rank="0"}} {NOW}
kvpressure:frontends 1
kvpressure:engine_steps_total{{engine="0",count="batch",size="1"}} 3
""".encode()


class Driver:
    """NVML's Python binding without NVML. Values are replaced, or raised, by function for the evil GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.evil = "evil"
        self.instead: dict[str, object] = {}
        self.called: dict[str, object] = {}
        for name in ANSWERS:
            patch.setattr(pynvml, name, partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        answer = ANSWERS[name](*arguments)
        if self.evil == "evil instance" and name == "nvmlDeviceGetMigMode" and arguments == ("good",):
            answer = [1, 1]
        if self.evil not in (arguments[:1] or ((),)) and (name, arguments) != ("nvmlDeviceGetHandleByIndex", (0,)):
            return answer
        self.called[name] = answer
        answer = self.instead.get(name, answer)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _instance(gpu: str, slot: int) -> str:
    if gpu != "good":
        raise pynvml.NVMLError(6)
    return ("evil instance", "good instance")[slot]


PROCESSES = [SimpleNamespace(pid=5, usedGpuMemory=7, gpuInstanceId=1, computeInstanceId=1)]
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInitWithFlags": lambda *_: None,
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580",
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: ("evil", "good")[index],
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetName": lambda handle: f"H100 {handle}",
    "nvmlDeviceGetMinorNumber": lambda handle: len(handle),
    "nvmlDeviceGetPciInfo_v3": lambda *_: SimpleNamespace(busId="00000000:3B:00.0"),
    "nvmlDeviceGetMigMode": lambda *_: [0, 0],
    "nvmlDeviceGetMaxMigDeviceCount": lambda *_: 2,
    "nvmlDeviceGetMigDeviceHandleByIndex": _instance,
    "nvmlDeviceGetGpuInstanceId": lambda handle: len(handle),
    "nvmlDeviceGetGpuInstanceById": lambda _, number: number,
    "nvmlGpuInstanceGetInfo": lambda number: SimpleNamespace(placement=SimpleNamespace(start=number)),
    "nvmlGpmMigSampleGet": lambda *_: True,
    "nvmlDeviceGetMemoryInfo": lambda *_: SimpleNamespace(total=80, free=50),
    "nvmlDeviceGetUtilizationRates": lambda *_: SimpleNamespace(gpu=50),
    "nvmlDeviceGetPowerUsage": lambda *_: 400_000,
    "nvmlDeviceGetEnforcedPowerLimit": lambda *_: 700_000,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda *_: 4,
    "nvmlDeviceGetComputeRunningProcesses_v3": lambda *_: PROCESSES,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": lambda *_: [],
    "nvmlGpmQueryDeviceSupport": lambda *_: SimpleNamespace(isSupportedDevice=1),
    "nvmlGpmSampleAlloc": pynvml.c_nvmlGpmSample_t,
    "nvmlGpmSampleGet": lambda *_: True,
    "nvmlGpmSampleFree": lambda _: None,
    "nvmlGpmMetricsGet": lambda request: request,
    "nvmlDeviceGetSupportedEventTypes": lambda *_: 0,
    "nvmlEventSetCreate": lambda: None,
    "nvmlEventSetFree": lambda _: None,
}


class Library(ModuleType):
    """The package ``amdsmi`` without AMD's library."""

    __version__ = "25.3.0"
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__("amdsmi")
        self.instead: dict[str, object] = {}
        patch.setitem(sys.modules, "amdsmi", self)

    def __getattr__(self, name: str) -> Any:
        if name not in AMDSMI:
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        answer = AMDSMI[name](*arguments)
        if EVIL[4] in arguments:
            answer = self.instead.get(name, answer)
        if isinstance(answer, Exception):
            raise answer
        return answer


NODE_CALLS = ("amdsmi_get_lib_version", "amdsmi_get_processor_handles")
AMDSMI: dict[str, Callable[..., Any]] = {
    "amdsmi_init": lambda: None,
    "amdsmi_shut_down": lambda: None,
    "amdsmi_get_lib_version": lambda: {"year": 25, "major": 3, "minor": 0},
    "amdsmi_get_processor_handles": lambda: [EVIL[4], GOOD[4]],
    "amdsmi_get_gpu_device_bdf": lambda handle: handle,
    "amdsmi_get_gpu_activity": lambda *_: {"gfx_activity": 55},
    "amdsmi_get_power_info": lambda *_: {"current_socket_power": 480, "power_limit": 700},
    "amdsmi_get_power_cap_info": lambda *_: {"power_cap": 700_000_000},
    "amdsmi_get_gpu_memory_total": lambda *_: trees.MI300X_VRAM,
    "amdsmi_get_gpu_memory_usage": lambda *_: trees.GIB,
}


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
