"""Arguments of an inference server under common names, and numbers as command lines spell them.

Names are those of the package's limits and properties, whatever the server's flag; a dialect adds its other arguments
under its own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from math import ceil
from typing import Final

from kvpressure.model import ceilings
from kvpressure.model.frozen import frozen

GIB: Final = 2**30
OF_PROCESS: Final = "process"
"""Source of arguments that a running process was started with."""
WITH_VALUE: Final = (
    "block_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "served_model_name",
    "tensor_parallel_size",
    "watermark",
)
"""Common arguments that mean nothing without a value."""


@frozen
class EngineArgs:
    """Arguments by name: ``max_num_seqs``, ``max_model_len``, ... as the properties below read them.

    ``values``: the text given, None when given but not visible (an environment variable from a secret, a shell
    substitution). ``explicit``: the names that were set. ``complete``: the whole command line was seen, so that a
    name missing from ``explicit`` has its default. ``env``: variables that the server itself reads. ``source``: of its
    limits: args (stated by a manifest or a person) or ``OF_PROCESS``.
    """

    values: Mapping[str, str | None] = field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    complete: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    source: str = "args"

    def is_explicit(self, name: str) -> bool | None:
        """True = set, False = left at its default, None = unknown."""
        if name in self.explicit:
            return True
        return False if self.complete else None

    def integer(self, name: str) -> int | None:
        """The value as an integer, ``8k`` = 8000 and ``8K`` = 8192; None when absent, bad or below 0."""
        return human_int(self.values.get(name))

    def number(self, name: str) -> float | None:
        """The value as a number of at most 1e15 in size, else None."""
        return ceilings.number_in(self.values.get(name), ceilings.LABEL, -ceilings.LABEL)

    def merged(self, other: EngineArgs) -> EngineArgs:
        """Both together; ``other`` (e.g. the logged arguments, which include a config file) takes precedence."""
        return EngineArgs(
            {**self.values, **other.values},
            self.explicit | other.explicit,
            self.complete or other.complete,
            {**self.env, **other.env},
        )

    @property
    def max_num_seqs(self) -> int | None:
        """Maximum number of requests in the running batch."""
        return _positive(self.integer("max_num_seqs"))

    @property
    def max_num_active_seqs(self) -> int | None:
        """Maximum number of running requests where it is lower than ``max_num_seqs``."""
        return _positive(self.integer("max_num_active_seqs"))

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Token budget of one engine step."""
        return _positive(self.integer("max_num_batched_tokens"))

    @property
    def max_model_len(self) -> int | None:
        """Context limit in tokens; None for ``auto`` and -1."""
        return _positive(self.integer("max_model_len"))

    @property
    def gpu_memory_utilization(self) -> float | None:
        """Share of device memory the server may take, above 0 and at most 1."""
        value = self.number("gpu_memory_utilization")
        return value if value is not None and 0 < value <= 1 else None

    @property
    def watermark(self) -> float | None:
        """Share of KV blocks kept free on admission, 0-1."""
        value = self.number("watermark")
        return value if value is not None and 0 <= value <= 1 else None

    @property
    def kv_cache_memory_bytes(self) -> int | None:
        """KV pool of one GPU in bytes where it was set directly."""
        return _positive(self.integer("kv_cache_memory_bytes"))

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block."""
        return _positive(self.integer("block_size"))

    @property
    def tensor_parallel_size(self) -> int | None:
        """GPUs that share one layer."""
        return _positive(self.integer("tensor_parallel_size"))

    @property
    def pipeline_parallel_size(self) -> int | None:
        """Pipeline stages."""
        return _positive(self.integer("pipeline_parallel_size"))

    @property
    def data_parallel_size(self) -> int | None:
        """Engines behind one server."""
        return _positive(self.integer("data_parallel_size"))

    @property
    def engine_gpus(self) -> int | None:
        """GPUs of one engine; None where the arguments do not show it."""
        if not self.complete and not {"tensor_parallel_size", "pipeline_parallel_size"} & self.explicit:
            return None
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)

    @property
    def decode_context_parallel_size(self) -> int | None:
        """Ranks among which the tokens of a request are split."""
        return _positive(self.integer("decode_context_parallel_size"))

    @property
    def port(self) -> int | None:
        """Port of the API server, 1-65535."""
        value = self.integer("port")
        return value if value is not None and 0 < value < 65536 else None

    @property
    def kv_cache_dtype(self) -> str | None:
        """Element type of the KV cache, e.g. ``fp8``; ``auto`` = the model's."""
        return self.values.get("kv_cache_dtype")

    @property
    def model(self) -> str | None:
        """Model name or path."""
        return self.values.get("model") or self.values.get("model_tag")

    @property
    def served_model_name(self) -> str | None:
        """The first served name, which is the ``model_name`` label; else the model's own name."""
        return self.values.get("served_model_name") or self.model


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


_SUFFIX: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_INT = re.compile(r"(\d{1,18})(\.\d{1,9})?([kKmMgGtT])?")


@lru_cache(maxsize=256)  # asked at every sample
def human_int(text: str | None) -> int | None:
    """An integer as command lines write it: ``25600``, ``25.6k`` (decimal), ``8K`` = 8192 (binary, whole numbers
    only); None for anything else, also for negative numbers.
    """
    found = _INT.fullmatch(text.strip()) if text is not None else None
    if found is None:
        return None
    whole, fraction, suffix = found.groups()
    if fraction is None:
        return int(whole) * _SUFFIX.get(suffix or "", 1)
    if suffix is None or suffix.isupper():
        return None
    return int(float(whole + fraction) * _SUFFIX[suffix])


def value_text(value: float) -> str:
    """A value as written on a command line."""
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


def context_limit(longest: float, t: Mapping[str, float]) -> int:
    """A value of ``max_model_len`` for the ``longest`` request: tokens with a margin, rounded up to a usual number.
    ``t``: the thresholds.
    """
    step = t["max_model_len_step_tokens"]
    return int(ceil(longest * t["max_model_len_spare_ratio"] / step) * step)


Version = tuple[int, int, int]


def parse_version(text: str | None) -> Version | None:
    """``0.9.1``, ``v0.6.3.post1``, ``0.27.0+cpu`` as three numbers; None for anything else."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text.strip()) if text else None
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))
