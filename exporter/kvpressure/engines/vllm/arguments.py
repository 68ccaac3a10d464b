"""Arguments of a vLLM server and the limits that follow from them.

Pure. ``max_num_seqs`` and its neighbours stand in no metric, so they come from the pod's command line
(``commandline.parse``) or from the line that vLLM logs at start (``from_log``); what nobody set follows from the
version and the card (``default_limits``). A value that cannot be read is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

GIB: Final = 2**30
MAX_TEXT: Final = 65536  # characters of a command line or logged line that are looked at


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Arguments by name (underscores, as in vLLM's own ``EngineArgs``).

    ``values``: the text given, None when it is given but not visible (an environment variable from a secret, a shell
    substitution). ``explicit``: the names that somebody set. ``complete``: the whole command line was seen, so that a
    name missing from ``explicit`` was left at its default. ``env``: the ``VLLM_*`` variables.
    """

    values: Mapping[str, str | None] = field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    complete: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def is_explicit(self, name: str) -> bool | None:
        """True = set, False = left at its default, None = not known."""
        if name in self.explicit:
            return True
        return False if self.complete else None

    def integer(self, name: str) -> int | None:
        """The value as vLLM reads integers, ``8k`` = 8000 and ``8K`` = 8192; None when absent, bad or below 0."""
        return human_int(self.values.get(name))

    def number(self, name: str) -> float | None:
        """The value as a finite number, else None."""
        return _float(self.values.get(name))

    def merged(self, other: EngineArgs) -> EngineArgs:
        """Both together, ``other`` (e.g. the logged arguments, which include a config file) on top."""
        return EngineArgs(
            {**self.values, **other.values},
            self.explicit | other.explicit,
            self.complete or other.complete,
            {**self.env, **other.env},
        )

    @property
    def max_num_seqs(self) -> int | None:
        """Most requests in the running batch."""
        return _positive(self.integer("max_num_seqs"))

    @property
    def max_num_active_seqs(self) -> int | None:
        """Most requests in the running batch where that is fewer than ``max_num_seqs`` (vLLM 0.31 and later)."""
        return _positive(self.integer("max_num_active_seqs"))

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Token budget of one engine step."""
        return _positive(self.integer("max_num_batched_tokens"))

    @property
    def max_model_len(self) -> int | None:
        """Context limit in tokens; ``auto`` and -1 mean "not known yet" and give None."""
        return _positive(self.integer("max_model_len"))

    @property
    def gpu_memory_utilization(self) -> float | None:
        """Share of device memory vLLM may take, above 0 and at most 1."""
        value = self.number("gpu_memory_utilization")
        return value if value is not None and 0 < value <= 1 else None

    @property
    def watermark(self) -> float | None:
        """Share of KV blocks kept free on admission, 0-1."""
        value = self.number("watermark")
        return value if value is not None and 0 <= value <= 1 else None

    @property
    def kv_cache_memory_bytes(self) -> int | None:
        """Size of the KV pool of one GPU where it was set outright."""
        return _positive(self.integer("kv_cache_memory_bytes"))

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block."""
        return _positive(self.integer("block_size"))

    @property
    def num_gpu_blocks_override(self) -> int | None:
        """KV blocks where they were set outright."""
        return _positive(self.integer("num_gpu_blocks_override"))

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
        """GPUs of one engine; None where the arguments do not tell."""
        if not self.complete and not {"tensor_parallel_size", "pipeline_parallel_size"} & self.explicit:
            return None
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)

    @property
    def decode_context_parallel_size(self) -> int | None:
        """Ranks that each hold a part of the tokens."""
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
        """The first served name, which is the ``model_name`` label; the model's own name when none is set."""
        return self.values.get("served_model_name") or self.model


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


def _float(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and isfinite(value) else None


_SUFFIX: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_INT = re.compile(r"(\d{1,18})(\.\d{1,9})?([kKmMgGtT])?")


def human_int(text: str | None) -> int | None:
    """An integer as vLLM's command line takes it: plain, ``25.6k`` = 25600 (decimal), ``8K`` = 8192 (binary, whole
    numbers only). Anything else, negative numbers included, is None.
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


def option(name: str) -> str:
    """``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + name.replace("_", "-")


def value_text(value: float) -> str:
    """A value as it stands on a command line."""
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


# --- the logged line --------------------------------------------------------------------------------------


def parse_logged(line: str) -> tuple[str | None, dict[str, str | None]]:
    """Arguments from a start-up line: ``non-default args: {...}`` (0.9.1+) or ``args: Namespace(...)``.

    Returns the form ("non_default", "all" or None when the line is neither) and the values; a list gives its first
    element, ``None`` gives None.
    """
    for marker, form, opening in (("non-default args: ", "non_default", "{"), ("args: Namespace", "all", "(")):
        at = line.find(marker + opening)
        if at >= 0:
            body = line[at + len(marker) + 1 : at + MAX_TEXT]
            return form, dict(_items(body, ":" if form == "non_default" else "="))
    return None, {}


def from_log(line: str) -> EngineArgs | None:
    """``EngineArgs`` of a start-up line, None when the line is none. The older form prints defaults too and therefore
    does not tell what was set.
    """
    form, values = parse_logged(line)
    if form is None:
        return None
    given = {name: value for name, value in values.items() if value is not None}
    explicit = frozenset(values) if form == "non_default" else frozenset[str]()
    return EngineArgs(given, explicit, complete=form == "non_default")


def _items(body: str, separator: str) -> Iterator[tuple[str, str | None]]:
    """Top-level ``key: value`` items of a printed dict or Namespace, up to its closing bracket."""
    for item in _split(body):
        key, found, value = item.partition(separator)
        key = key.strip().strip("'\"")
        if found and key.isidentifier():
            yield key, _plain(value.strip())


def _split(body: str) -> Iterator[str]:
    """Split at commas outside quotes and brackets; ends where the outermost bracket closes."""
    depth, quote, start, escaped = 0, "", 0, False
    for position, char in enumerate(body):
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                yield body[start:position]
                return
        elif char == "," and depth == 0:
            yield body[start:position]
            start = position + 1


def _plain(text: str) -> str | None:
    if text == "None":
        return None
    if text.startswith("["):
        text = next(_split(text[1:]), "").strip()
    if len(text) >= 2 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    return text


# --- defaults ---------------------------------------------------------------------------------------------
#
# Source: the releases 0.5.5 to 0.33 (``vllm/engine/arg_utils.py``, ``vllm/config/*.py``). Where a change is only known
# to lie between two releases, a version in between gets no value.

Version = tuple[int, int, int]


def parse_version(text: str | None) -> Version | None:
    """``0.9.1``, ``v0.6.3.post1``, ``0.27.0+cpu`` ... as three numbers; None for anything else."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text.strip()) if text else None
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def default_limits(
    version: str | None,
    card_name: str | None,
    card_memory_bytes: float | None,
    context: str = "server",
    *,
    flavour: str | None = None,
    world_size: int = 1,
) -> Mapping[str, float]:
    """Defaults of ``gpu_memory_utilization``, ``max_num_seqs`` and ``max_num_batched_tokens`` (missing = not known).

    ``context``: "server", "llm" (offline ``LLM``) or "batch" (``vllm run-batch``). ``flavour`` ("v0" or "v1") where
    the engine tells, else it follows from the version. ``card_name`` "cpu" stands for the CPU backend.
    """
    number = parse_version(version)
    if number is None or number < (0, 5, 5):
        return {}
    limits: dict[str, float] = {"gpu_memory_utilization": 0.92 if number >= (0, 20, 0) else 0.90}
    name = (card_name or "").lower()
    if flavour == "v0" or (flavour is None and number < (0, 8, 0)):
        limits["max_num_seqs"] = 256  # the token budget depends on max_model_len there
        return limits
    if number < (0, 8, 5):
        tokens, seqs = _early_v1(number, name, context)
    elif name == "cpu":
        tokens, seqs = _cpu(number, context, world_size)
    elif context == "batch":
        tokens, seqs = 2048, 128
    elif card_memory_bytes is None:
        tokens, seqs = None, None
    else:
        tokens, seqs = _tier(number, name, card_memory_bytes / GIB, server=context == "server")
    if tokens is not None:
        limits["max_num_batched_tokens"] = tokens
    if seqs is not None:
        limits["max_num_seqs"] = seqs
    return limits


_Pair = tuple[int | None, int | None]  # tokens, seqs
_UNKNOWN_PAIR: Final[_Pair] = (None, None)


def _early_v1(number: Version, name: str, context: str) -> _Pair:
    """V1 as an option of 0.6.6 to 0.7.3; 0.8.0 to 0.8.4 were not compared."""
    if number >= (0, 8, 0) or context != "server":
        return _UNKNOWN_PAIR
    return 8192 if re.search(r"\bh[12]00\b", name) else 2048, 1024


def _cpu(number: Version, context: str, world_size: int) -> _Pair:
    if number < (0, 33, 0) or context == "batch":
        return _UNKNOWN_PAIR
    return (2048 * world_size, 128 * world_size) if context == "server" else (4096 * world_size, 256 * world_size)


def _tier(number: Version, name: str, gib: float, server: bool) -> _Pair:
    """Tiers by device memory from 0.8.5 on."""
    small: _Pair = (2048 if server else 8192, 256)
    large: _Pair = (8192 if server else 16384, 1024)
    if gib < 70:
        return small
    if "a100" in name:
        if number == (0, 8, 5):
            return large
        return small if number >= (0, 9, 1) else _UNKNOWN_PAIR
    if "gb10" in name and number >= (0, 33, 0):
        return small
    if gib >= 160 and number > (0, 26, 0):
        if number >= (0, 29, 0):
            return 16384, 1024
        return (None if server else 16384), 1024
    return large


def limits_in_force(
    args: EngineArgs, defaults: Mapping[str, float], max_model_len: float | None = None
) -> Mapping[str, float]:
    """Set values over defaults, with the adjustments vLLM makes to those that nobody set.

    ``max_model_len`` is the context limit in force where it is known otherwise (e.g. from the metrics).
    """
    limits = dict(defaults)
    if args.values.get("performance_mode") == "throughput":
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if name in limits:
                limits[name] *= 2
    for name, value in (
        ("gpu_memory_utilization", args.gpu_memory_utilization),
        ("max_num_seqs", args.max_num_seqs),
        ("max_num_batched_tokens", args.max_num_batched_tokens),
        ("max_model_len", args.max_model_len or max_model_len),
    ):
        if value is not None:
            limits[name] = value
        elif name in args.explicit:
            limits.pop(name, None)  # set to something that cannot be read
    seqs, tokens = limits.get("max_num_seqs"), limits.get("max_num_batched_tokens")
    length = limits.get("max_model_len")
    if "max_num_batched_tokens" not in args.explicit and tokens is not None and length is not None:
        if args.values.get("enable_chunked_prefill") == "False":
            tokens = max(tokens, length)
        if seqs is not None:
            tokens = min(tokens, seqs * length)
        limits["max_num_batched_tokens"] = tokens
    if "max_num_seqs" not in args.explicit and seqs is not None and tokens is not None:
        limits["max_num_seqs"] = min(seqs, tokens)
    return limits
