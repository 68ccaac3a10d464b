"""The built-in sources. Importing this module registers them; their code loads only when they are switched on."""

from __future__ import annotations

from kvpressure.sources.base import SourceSpec, lazy, register

register(SourceSpec(
    name="nvidia", help="NVIDIA GPUs through NVML", factory=lazy("kvpressure.sources.nvidia", "NvidiaSource"),
    interval_seconds=1.0, deadline_seconds=5.0, hold_seconds=3.0,
))
register(SourceSpec(
    name="amd", help="AMD GPUs through sysfs, or AMD SMI", factory=lazy("kvpressure.sources.amd", "AmdSource"),
    interval_seconds=1.0, deadline_seconds=5.0, hold_seconds=3.0,
))
register(SourceSpec(
    name="vllm", help="metrics pages of vLLM engines", factory=lazy("kvpressure.sources.vllm", "VllmSource"),
    interval_seconds=1.0, deadline_seconds=5.0,
))
register(SourceSpec(
    name="recording", help="a recording, played instead of live sources",
    factory=lazy("kvpressure.sources.recording", "RecordingSource"), default=False, interval_seconds=1.0,
    deadline_seconds=5.0,
))
register(SourceSpec(
    name="demo", help="a simulated node with engines and GPUs, on which an incident comes and goes",
    factory=lazy("kvpressure.sources.demo", "DemoSource"), default=False, interval_seconds=1.0, deadline_seconds=5.0,
    hold_seconds=3.0,
))
