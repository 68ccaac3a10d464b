"""Arguments of a vLLM server and the limits that follow from them.

Pure. ``max_num_seqs`` and similar limits are in no metric, so they come from the pod's command line
(``command_line.read``) or from vLLM's start-up log (``from_log``); unset ones follow from version and GPU
(``default_limits``). An unreadable value is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from kvpressure.model.arguments import GIB, EngineArgs, Version, parse_version

REFERENCE_VERSION: Final = "0.33.0"  # its defaults are assumed where no version is given
MAX_TEXT: Final = 65536  # characters read of a logged line
_SIGN: Final = re.compile(r"'(?:[^'\\]++|\\.)*+(?:'|\Z)|\"(?:[^\"\\]++|\\.)*+(?:\"|\Z)|[,()\[\]{}]", re.DOTALL)


# --- the logged line --------------------------------------------------------------------------------------


def parse_logged(line: str) -> tuple[str | None, dict[str, str | None]]:
    """(form, arguments) of a start-up line: ``non-default args: {...}`` (0.9.1 and later) or ``args:
    Namespace(...)``.

    The form is "non_default", "all" or None for other lines. A list gives its first element, ``None`` gives None.
    """
    for marker, form, opening in (("non-default args: ", "non_default", "{"), ("args: Namespace", "all", "(")):
        at = line.find(marker + opening)
        if at >= 0:
            body = line[at + len(marker) + 1 : at + MAX_TEXT]
            return form, dict(_items(body, ":" if form == "non_default" else "="))
    return None, {}


def from_log(line: str) -> EngineArgs | None:
    """``EngineArgs`` of a start-up line, None for other lines. The older form includes defaults, so it does not show
    which were set.
    """
    form, values = parse_logged(line)
    if form is None:
        return None
    given = {name: value for name, value in values.items() if value is not None}
    explicit = frozenset(values) if form == "non_default" else frozenset[str]()
    return EngineArgs(given, explicit, complete=form == "non_default")


def _items(body: str, separator: str) -> Iterator[tuple[str, str | None]]:
    """Top-level ``key: value`` items of a printed dict or Namespace."""
    for item in _split(body):
        key, found, value = item.partition(separator)
        key = key.strip().strip("'\"")
        if found and key.isidentifier():
            yield key, _plain(value.strip())


def _split(body: str) -> Iterator[str]:
    """Split at commas outside quotes and brackets, up to the end of the outermost bracket."""
    depth, start = 0, 0
    for found in _SIGN.finditer(body):
        sign = found[0]
        if sign in "([{":
            depth += 1
        elif sign in ")]}" or (sign == "," and depth == 0):
            depth -= sign != ","
            if depth < 0 or sign == ",":
                yield body[start : found.start()]
                start = found.end()
            if depth < 0:
                return


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


def default_limits(
    version: str | None, gpu_name: str | None, gpu_memory_bytes: float | None, flavour: str | None = None
) -> Mapping[str, float]:
    """A server's defaults of ``gpu_memory_utilization``, ``max_num_seqs`` and ``max_num_batched_tokens`` (missing =
    unknown).

    ``flavour``: "v0" or "v1", None = by version. ``gpu_name`` "cpu": the CPU backend.
    """
    number = parse_version(version)
    if number is None or number < (0, 5, 5):
        return {}
    utilization = 0.92 if number >= (0, 20, 0) else 0.90
    name = (gpu_name or "").lower()
    tokens, seqs = _UNKNOWN_PAIR
    if flavour == "v0" or (flavour is None and number < (0, 8, 0)):
        seqs = 256  # the token budget depends on max_model_len there
    elif number < (0, 8, 0):  # V1 as an option of 0.6.6 to 0.7.3
        tokens, seqs = 8192 if re.search(r"\bh[12]00\b", name) else 2048, 1024
    elif number < (0, 8, 5):
        pass  # was not compared
    elif name == "cpu":
        tokens, seqs = (2048, 128) if number >= (0, 33, 0) else _UNKNOWN_PAIR
    elif gpu_memory_bytes is not None:
        tokens, seqs = _tier(number, name, gpu_memory_bytes / GIB)
    limits = {"gpu_memory_utilization": utilization, "max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    return {limit: float(value) for limit, value in limits.items() if value is not None}


_Pair = tuple[int | None, int | None]  # tokens, seqs
_UNKNOWN_PAIR: Final[_Pair] = (None, None)
_SMALL: Final[_Pair] = (2048, 256)
_LARGE: Final[_Pair] = (8192, 1024)


def _tier(number: Version, name: str, gib: float) -> _Pair:
    """Tiers by device memory (0.8.5 and later)."""
    if gib < 70:
        return _SMALL
    if "a100" in name:
        return _LARGE if number == (0, 8, 5) else _SMALL if number >= (0, 9, 1) else _UNKNOWN_PAIR
    if "gb10" in name and number >= (0, 33, 0):
        return _SMALL
    if gib >= 160 and number > (0, 26, 0):
        return 16384 if number >= (0, 29, 0) else None, 1024
    return _LARGE


def limits_in_force(
    args: EngineArgs, defaults: Mapping[str, float], max_model_len: float | None = None
) -> Mapping[str, float]:
    """Set values over defaults, with the adjustments that vLLM makes to defaults.

    ``max_model_len``: the context limit if known otherwise (e.g. from the metrics).
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
