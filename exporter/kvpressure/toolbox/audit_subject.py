"""One server with all inputs of its checklist, and how many requests fit on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Final, Literal

from kvpressure.capacity import kvbytes, models, plan, weights
from kvpressure.capacity.kvbytes import Parallel
from kvpressure.capacity.shapes import ModelShape
from kvpressure.engines.base import EngineDialect, Known
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError, shown
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.state import Found
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.live_pages import GivenGpu
from kvpressure.toolbox.manifests import ServerContainer

Given = Literal["not visible", "not set", "hidden", "set", "no number", "refused"]
"""Whether a limit was set: ``hidden``: to a value that is not visible; ``no number``: left to the server, or switched
off; ``refused``: to what the server does not accept.
"""
OF_GIVEN: Final[Mapping[Given, bool | None]] = {"not visible": None, "hidden": True, "set": True}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the checklist. ``found``: whether the server does what ``text`` asks, and its value in words; unknown
    where that cannot be seen. ``set``: what to set if it does not. ``measured``: what measurements say against it.
    """

    found: Found
    text: str
    why: str
    set: str = ""
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """One server with all inputs of its checklist. ``context``: tokens of a usual request (prompt and output);
    ``siblings``: the other servers that were read.
    """

    server: ServerContainer
    thresholds: Thresholds
    shape: ModelShape | None = None
    gpu: GivenGpu | None = None
    version: str | None = None
    context: int | None = None
    demanding: bool = False  # long-context or bursty, as the user states it
    siblings: Sequence[ServerContainer] = ()

    @property
    def args(self) -> EngineArgs:
        """Its arguments."""
        return self.server.args

    def limit(self, name: str) -> float | None:
        """The value in force: as set, else the engine's default for this version and GPU."""
        length = self.args.max_model_len or (self.shape.max_model_len if self.shape else None)
        known = Known(
            self.args,
            facts={"max_model_len": float(length)} if length else {},
            version=self.version,
            gpu=self.gpu.reading() if self.gpu else None,
        )
        found = self.dialect.limits(known).get(name)
        if found is None and name in self.dialect.not_limits:
            value: float | None = getattr(self.args, name)
            return value
        return None if found is None else found.value

    def given(self, name: str) -> Given:
        """Whether a limit was set, and to what."""
        explicit, text = self.args.is_explicit(name), self.args.values.get(name)
        if explicit is None:
            return "not visible"
        if not explicit:
            return "not set"
        if self.limit(name) is not None:
            return "set"
        if text is None:
            return "hidden"
        return "no number" if text in self.dialect.no_number.get(name, ()) else "refused"

    @property
    def dialect(self) -> EngineDialect:
        """Its inference server's dialect."""
        return dialect(self.server.dialect)

    def flag(self, name: str) -> str:
        """The flag of an argument."""
        return self.dialect.flag(name)

    def found(self, name: str) -> str:
        """The value in force in words, with its source."""
        value, given, text = self.limit(name), self.given(name), self.args.values.get(name)
        if given == "set":
            return f"{value:g}, set"
        if given == "hidden":
            return "set, to a value that is not visible"
        if given == "no number":
            return f"set to {shown(text)}, which is no limit"
        if given == "refused":  # a flag without a value is read as True
            return (
                "set without a value"
                if text == "True"
                else f"set to {shown(text)}, which {self.dialect.title} does not accept"
            )
        origin = "default" if self.version is None else f"default of {self.dialect.title} {self.version}"
        if given == "not visible":
            return (
                "arguments not visible" if value is None else f"{value:g} (may be the {origin}: arguments not visible)"
            )
        return (
            f"{value:g} ({origin})"
            if value is not None
            else "not set; the server computes the default at its start"
            if self.version is not None and self.gpu is not None
            else f"not set; the default depends on version and GPU ({self.inputs})"
        )

    def default(self, name: str) -> float | None:
        """The default as it would be set, of the reference version if the server's is unknown; None if it depends on
        more than version and GPU.
        """
        gpu_name, gpu_bytes = (None, None) if self.gpu is None else (self.gpu.name, float(self.gpu.memory_bytes))
        return self.dialect.default_limits(self.version or self.dialect.reference_version, gpu_name, gpu_bytes).get(
            name
        )

    @property
    def inputs(self) -> str:
        """The options that determine defaults."""
        return f"--{self.dialect.name}-version, --gpu"

    def called(self, name: str) -> str:
        """Name of an argument in sentences."""
        return self.dialect.called(name)

    def option(self, name: str) -> str:
        """Its flag without dashes in front."""
        return self.flag(name).removeprefix("--")


_OTHER_WEIGHTS: Final = frozenset({"quantization", "cpu_offload_gb", "hf_overrides", "load_format"})


def _parallel(args: EngineArgs) -> Parallel:
    return Parallel(
        args.tensor_parallel_size or 1, args.pipeline_parallel_size or 1, args.decode_context_parallel_size or 1
    )


def refusal(subject: Subject) -> str | None:
    """Why the server does not start with these parallel sizes; None if it does, or if the model is unknown."""
    if subject.shape is None:
        return None
    try:
        kvbytes.refuse_parallel(subject.shape, _parallel(subject.args))
    except InputError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class Fits:
    """Requests that the KV cache holds: of full context length, and of the usual one."""

    capacity_tokens: int
    full_length: float
    stated: int | None

    @property
    def at_once(self) -> int:
        """Usual requests, else requests of full length."""
        return floor(self.full_length) if self.stated is None else self.stated


def fits(subject: Subject, most_utilization: float = 1.0) -> Fits | None:
    """Requests that memory allows, with ``gpu_memory_utilization`` in force or ``most_utilization`` if lower; None
    when model or GPU are unknown.
    """
    shape, gpu, length = subject.shape, subject.gpu, subject.limit("max_model_len")
    size = weights.estimated(shape) if shape is not None else None
    if shape is None or gpu is None or length is None or size is None:
        return None
    args = subject.args
    if subject.dialect.not_limits and args.gpu_memory_utilization is None:
        return None  # its default share is not known
    values = [subject.limit(name) for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")]
    default = plan.default_limits_for(gpu.memory_bytes, int(length), gpu.name)
    limits = plan.Limits(
        min(values[0] or default.gpu_memory_utilization, most_utilization),
        int(values[1] or default.max_num_seqs),
        int(values[2] or default.max_num_batched_tokens),
        int(length),
    )
    try:
        parallel = _parallel(args)
        layout = _layout(shape, args)
        audited = plan.audit(
            shape,
            parallel,
            gpu.memory_bytes,
            limits,
            plan.StatedMemory(size, "estimate", pool=args.kv_cache_memory_bytes),
        )
    except InputError:
        return None
    found = plan.fit(layout, audited, None)
    if found.max_concurrency < 1 and _OTHER_WEIGHTS & args.explicit:
        return None  # the estimate is of the weights as the configuration names them
    stated = (
        None if subject.context is None else found.usable_blocks // layout.blocks(min(subject.context, int(length)))
    )
    return Fits(found.capacity_tokens, found.max_concurrency, stated)


def _layout(shape: ModelShape, args: EngineArgs) -> kvbytes.CacheLayout:
    block = args.block_size or kvbytes.DEFAULT_BLOCK_SIZE
    return kvbytes.layout(shape, _parallel(args), args.kv_cache_dtype or "auto", block)


def request_bytes(subject: Subject) -> tuple[int, int] | None:
    """(tokens of a usual request, else of the longest; its KV bytes on all GPUs together); None if unknown."""
    length, parallel = subject.context or subject.limit("max_model_len"), _parallel(subject.args)
    if subject.shape is None or length is None:
        return None
    try:
        size = _layout(subject.shape, subject.args).request_bytes(int(length))
    except InputError:
        return None
    return int(length), size * parallel.tensor * parallel.pipeline


def shape_of(server: ServerContainer) -> ModelShape | None:
    """The model's shape by its published name; None for another name, which may be of a model of another size."""
    try:
        return models.named(server.args.model or "")
    except InputError:
        return None
