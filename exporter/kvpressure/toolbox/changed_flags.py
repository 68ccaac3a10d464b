"""Changes values in an engine's command line; nothing is applied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvpressure.engines.registry import dialect, public_texts
from kvpressure.errors import InputError, shown
from kvpressure.model.arguments import value_text
from kvpressure.printable import command


def with_values(
    argv: Sequence[str], values: Mapping[str, float], env: Mapping[str, str] | None = None, engine: str = ""
) -> tuple[str, ...]:
    """``argv`` with these arguments set; everything else stays. ``env``: the container's literal variables.

    Raises ``InputError`` when the command line cannot be changed with certainty: the script's start of the server is
    not understood, or a variable may add options after the changed ones.
    """
    words, one = list(argv), dialect(engine)
    start = one.start_words
    script = next((index for index, word in enumerate(words) if start and " " in word and start.search(word)), None)
    if script is not None and start is not None:
        words[script] = _in_script(words[script], {one.flag(name): value for name, value in values.items()}, start)
    else:
        for name, value in values.items():
            words = _in_words(words, one.flag(name), value_text(value))
    before, seen = one.read_command(argv, env).args.values, one.read_command(words, env).args.values
    wanted = {**before, **{name: value_text(value) for name, value in values.items()}}
    wrong = [one.flag(name) or name for name in {*wanted, *seen} if seen.get(name) != wanted.get(name)]
    if wrong:
        raise InputError(
            f"the command line {shown(command(*public_texts(argv)))} is too complex to change"
            f" {', '.join(wrong)} safely; edit the manifest by hand"
        )
    return tuple(words)


def _in_words(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with the flag replaced in place, or appended."""
    result: list[str] = []
    placed, skip = False, False
    for word in words:
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = False
        head, equals, _ = word.partition("=")
        if head.startswith("--") and head.replace("_", "-") == flag:
            if not placed:
                result += [f"{head}={value}"] if equals else [head, value]
            placed, skip = True, not equals
            continue
        result.append(word)
    return result if placed else [*result, flag, value]


def _in_script(script: str, values: Mapping[str, float], start: re.Pattern[str]) -> str:
    for flag, value in values.items():
        name = flag[2:].replace("-", "[-_]")
        pattern = re.compile(rf"--{name}([= ]+)(\"[^\"]*\"|'[^']*'|[^\s;&|\\]+)")
        if pattern.search(script):
            script = pattern.sub(rf"{flag}\g<1>{value_text(value)}", script)
        else:
            script = start.sub(rf"\g<0> {flag} {value_text(value)}", script, count=1)
    return script


def as_words(values: Mapping[str, float], engine: str = "") -> list[str]:
    """The arguments as separate words."""
    flag = dialect(engine).flag
    return [word for name, value in values.items() if flag(name) for word in (flag(name), value_text(value))]
