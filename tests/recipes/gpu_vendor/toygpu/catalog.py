"""The row of the catalog: name, flags and intervals of the source, and what others call the vendor's GPUs."""

from kvpressure.sources.catalog import SourceSpec, lazy
from kvpressure.sources.vendors import GpuVendor

SPEC = SourceSpec(
    name="toy",
    help="ToyGPU accelerators",
    factory=lazy("toygpu.source", "ToySource"),
    default=False,
    hold_seconds=3.0,
    settings=("toy.",),
    gpus=GpuVendor("0x7070", ("toygpu.example/",), "gpu.toygpu.example"),
)
