"""A node with two subjects of every source, an innocent and an evil one, and what stands in for drivers and servers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import Source
from kvpressure.sources.catalog import CollectorSettings
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

NOW = 1_790_000_000.0
NAMESPACE = "inference"


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
