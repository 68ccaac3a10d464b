"""NVIDIA GPUs through NVML, by the real ``nvidia-ml-py`` binding (module ``pynvml``)."""
