"""NVIDIA GPUs through NVML, by the real ``nvidia-ml-py`` binding (module ``pynvml``)."""

from kvpressure.sources.nvidia.codes import REASONS
from kvpressure.sources.nvidia.fields import THROTTLE_REASONS
from kvpressure.sources.nvidia.options import NvidiaOptions
from kvpressure.sources.nvidia.source import NvidiaSource

__all__ = ["REASONS", "THROTTLE_REASONS", "NvidiaOptions", "NvidiaSource"]
