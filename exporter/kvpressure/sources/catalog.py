"""The built-in sources. Importing this module registers them; their code loads only when they are switched on."""

from __future__ import annotations

from kvpressure.sources.base import SourceSpec, lazy, register

register(
    SourceSpec(
        name="nvidia",
        help="NVIDIA GPUs through NVML",
        factory=lazy("kvpressure.sources.nvidia", "NvidiaSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
register(
    SourceSpec(
        name="amd",
        help="AMD GPUs through sysfs, or AMD SMI",
        factory=lazy("kvpressure.sources.amd", "AmdSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
register(
    SourceSpec(
        name="vllm",
        help="metrics pages of vLLM engines",
        factory=lazy("kvpressure.sources.vllm", "VllmSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
    )
)
register(
    SourceSpec(
        name="recording",
        help="a recording, played instead of live sources",
        factory=lazy("kvpressure.sources.recording", "RecordingSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
    )
)
register(
    SourceSpec(
        name="demo",
        help="a simulated node with engines and GPUs, on which an incident comes and goes",
        factory=lazy("kvpressure.sources.demo", "DemoSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
# --- on a Kubernetes node; the deployment switches them on ---------------------------------------------------------
register(
    SourceSpec(
        name="pods",
        help="engines among the pods of this node, from the API server",
        factory=lazy("kvpressure.sources.pods", "PodsSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=10.0,
        hold_seconds=6.0,
    )
)
register(
    SourceSpec(
        name="node",
        help="conditions of this node, from the API server",
        factory=lazy("kvpressure.sources.node", "NodeSource"),
        default=False,
        interval_seconds=30.0,
        deadline_seconds=15.0,
        hold_seconds=75.0,
    )
)
register(
    SourceSpec(
        name="podresources",
        help="which container holds which GPU, from the kubelet",
        factory=lazy("kvpressure.sources.podresources", "PodResourcesSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=8.0,
        hold_seconds=25.0,
    )
)
register(
    SourceSpec(
        name="procfs",
        help="which pod the processes on the GPUs belong to, from the host's /proc",
        factory=lazy("kvpressure.sources.procfs", "ProcfsSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=5.0,
        hold_seconds=25.0,
    )
)
register(
    SourceSpec(
        name="cgroup",
        help="CPU and memory of the engines' containers, from cgroup v2",
        factory=lazy("kvpressure.sources.cgroup", "CgroupSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=5.0,
        hold_seconds=6.0,
    )
)
register(
    SourceSpec(
        name="allocator",
        help="reports of the plugin inside vLLM: torch's allocator and every step's batch, from files",
        factory=lazy("kvpressure.sources.allocator", "AllocatorSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
register(
    SourceSpec(
        name="logs",
        help="events in the logs of the engines' containers, from files on the node",
        factory=lazy("kvpressure.sources.logs", "LogsSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
    )
)
