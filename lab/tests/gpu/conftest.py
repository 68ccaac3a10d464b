"""The stub library of NVIDIA, built once."""

from tests.gpu.conftest import nvml

__all__ = ["nvml"]
