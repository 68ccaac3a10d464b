"""New values in an existing vLLM command line, and as Helm values. Nothing is applied."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvpressure.args import option, value_text
from kvpressure.cli import UsageError
from kvpressure.commandline import parse

_START: Final = re.compile(r"(\bvllm[ \t]+serve(?:[ \t]+[^\s;&|-][^\s;&|]*)?|\bvllm\.entrypoints\.[\w.]+)")
_HELM_NAMES: Final = {
    "max_num_seqs": "maxNumSeqs",
    "gpu_memory_utilization": "gpuMemoryUtilization",
    "max_model_len": "maxModelLen",
}


def with_values(
    argv: Sequence[str], values: Mapping[str, float], env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """``argv`` with these arguments set; everything else stays as it is. ``env`` are the container's literal variables. Raises
    ``UsageError`` when the command line cannot be changed with certainty: a script that starts vLLM in a way that is not
    understood, an option that a variable brings in behind the changed ones.
    """
    words = list(argv)
    script = next((index for index, word in enumerate(words) if " " in word and _START.search(word)), None)
    if script is not None:
        words[script] = _in_script(words[script], values)
    else:
        for name, value in values.items():
            words = _in_words(words, name, value_text(value))
    before, seen = parse(argv, env).values, parse(words, env).values
    wanted = {**before, **{name: value_text(value) for name, value in values.items()}}
    wrong = [option(name) for name in {*wanted, *seen} if seen.get(name) != wanted.get(name)]
    if wrong:
        raise UsageError(
            f"the command line {shlex.join(argv)[:120]!r} cannot be changed with certainty ({', '.join(wrong)}); "
            "allowed: edit it by hand"
        )
    return tuple(words)


def _in_words(words: Sequence[str], name: str, value: str) -> list[str]:
    """The option's words replaced in place, or added at the end."""
    result: list[str] = []
    placed, skip = False, False
    for word in words:
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = False
        head, equals, _ = word.partition("=")
        if head.startswith("--") and head[2:].replace("-", "_") == name:
            if not placed:
                result += [f"{head}={value}"] if equals else [head, value]
            placed, skip = True, not equals
            continue
        result.append(word)
    return result if placed else [*result, option(name), value]


def _in_script(script: str, values: Mapping[str, float]) -> str:
    for name, value in values.items():
        pattern = re.compile(rf"--{name.replace('_', '[-_]')}([= ]+)(\"[^\"]*\"|'[^']*'|[^\s;&|\\]+)")
        if pattern.search(script):
            script = pattern.sub(rf"{option(name)}\g<1>{value_text(value)}", script)
        else:
            script = _START.sub(rf"\g<0> {option(name)} {value_text(value)}", script, count=1)
    return script


def helm_values(values: Mapping[str, float]) -> dict[str, Any]:
    """``vllmConfig`` of one entry of ``servingEngineSpec.modelSpec`` in the chart of vLLM's production stack."""
    named = {
        _HELM_NAMES[name]: int(value) if value == int(value) else value
        for name, value in values.items()
        if name in _HELM_NAMES
    }
    extra = [
        word for name, value in values.items() if name not in _HELM_NAMES for word in (option(name), value_text(value))
    ]
    return {**named, **({"extraArgs": extra} if extra else {})}


def as_words(values: Mapping[str, float]) -> list[str]:
    """The arguments one by one, for charts that take a list."""
    return [word for name, value in values.items() for word in (option(name), value_text(value))]
