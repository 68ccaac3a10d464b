"""All dialects: one for each inference server that can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from kvpressure.engines.base import PAGE_SAMPLES, EngineDialect, SampleName
from kvpressure.engines.sglang.dialect import SGLANG
from kvpressure.engines.vllm.dialect import VLLM
from kvpressure.model.log_events import LogEvent
from kvpressure.model.readings import LogLine
from kvpressure.redaction import REDACTED

_DIALECTS: Final = {one.name: one for one in (VLLM, SGLANG)}  # the first is asked first


def dialects() -> tuple[EngineDialect, ...]:
    """Every dialect; the first takes precedence."""
    return tuple(_DIALECTS.values())


def titles() -> str:
    """Every engine that can be read, joined by "or" for a sentence."""
    return " or ".join(one.title for one in dialects())


def default() -> EngineDialect:
    """The dialect of an engine whose kind is unknown."""
    return VLLM


def dialect(name: str) -> EngineDialect:
    """The dialect of this name; the default one for "" and for names of older recordings that are not known here."""
    return _DIALECTS.get(name, VLLM)


def named_by(argv: Sequence[str]) -> EngineDialect:
    """The dialect whose server a command line starts, else the first that it may start, else the default one."""
    likely = [one for one in dialects() if one.may_start(argv, {})] or [default()]
    return next((one for one in likely if one.read_command(argv, {}).starts_server), likely[0])


# --- tables over all dialects, made once ---------------------------------------------------------------------------


@cache
def samples() -> Mapping[str, SampleName]:
    """Every sample name of every dialect; the first dialect takes precedence."""
    table: dict[str, SampleName] = {}
    for one in reversed(dialects()):
        table.update(one.samples)
    return {**table, **PAGE_SAMPLES}


@cache
def log_words() -> tuple[str, ...]:
    """Every line that some dialect recognises contains one of these."""
    return tuple(dict.fromkeys(word for one in dialects() for word in one.log_words))


@cache
def variable_prefixes() -> tuple[str, ...]:
    """Prefixes of the variables that any server reads."""
    return tuple(prefix for one in dialects() for prefix in one.environment)


def recognise(text: str, engine: str = "") -> tuple[str, LogEvent] | None:
    """(message, event) of a log line, by the dialect ``engine``, else by the first that recognises it; None for other
    lines.
    """
    for one in (dialect(engine),) if engine else dialects():
        if not _may_report(one, text):
            continue
        message = one.strip(text)
        event = one.recognise(message)
        if event is not None:
            return message, event
    return None


def _may_report(one: EngineDialect, text: str) -> bool:
    for word in one.log_words:  # noqa: SIM110 - asked of every line of every container, and a loop is twice as fast
        if word in text:
            return True
    return False


def log_line(namespace: str, pod: str, container: str, line: str, engine: str = "") -> LogLine:
    """A line of a container's log with the event that it reports, if any."""
    found = recognise(line, engine)
    message, event = found if found is not None else (dialect(engine).strip(line), None)
    return LogLine(namespace, pod, container, message, event)


# --- what may leave the node ---------------------------------------------------------------------------------------


def public_texts(argv: Sequence[str]) -> list[str]:
    """A command line as recorded, by the dialect whose server it names."""
    engine = named_by(argv)
    return list(engine.public_words(engine.read_command(argv, {}).args)) if argv else []


def public_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of every dialect, with public values."""
    return {name: value for one in dialects() for name, value in one.public_environment(env).items()}


def public_line(text: str) -> str:
    """The public part of a log line by the first dialect that recognises it; ``REDACTED`` for any other."""
    asked = (one for one in dialects() if _may_report(one, text))
    return next((kept for one in asked if (kept := one.public_line(text)) is not None), REDACTED)
