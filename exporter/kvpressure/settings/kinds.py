"""Kinds of setting values: how they are parsed, and what is allowed.

``parse`` takes a text (of a flag or variable) or a YAML value, and raises ``ValueError`` if it is invalid; an empty
message means "show the allowed form".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpressure.errors import InputError, nearest, shown
from kvpressure.settings.thresholds import load
from kvpressure.settings.yaml_lines import short_path
from kvpressure.sources.scrape.targets import parse_target

_DECIMAL: Final = r"\d{1,13}(?:\.\d+)?"
_WHOLE: Final = r"\d{1,13}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: what messages say is allowed, its parser, and its name in help."""

    allowed: str
    parse: Callable[[object], Any]
    metavar: str

    def checked(self, raw: object, where: str) -> Any:
        """The value of ``raw``, written at ``where``. Raises ``InputError``."""
        try:
            return self.parse(raw)
        except InputError as error:  # says itself what is allowed
            raise InputError(f"{where}: {error}") from error
        except ValueError as error:
            detail = " ".join(str(error).split()) or f"{shown(raw)} is not allowed"
            raise InputError(f"{where}: {detail}; allowed: {self.allowed}") from error


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen: ``host`` "" = all addresses, port 0 = any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError


def _texts(allowed: Callable[[str], object], convert: Callable[[str], Any] = str) -> Callable[[object], Any]:
    """Texts that are ``allowed``, converted."""

    def parse(raw: object) -> Any:
        if not isinstance(raw, str) or not allowed(raw):
            raise ValueError
        return convert(raw)

    return parse


def _matching(pattern: str, convert: Callable[[str], Any] = str) -> Callable[[object], Any]:
    """Texts of the form ``pattern``, converted."""
    return _texts(re.compile(pattern).fullmatch, convert)


def _number(digits: str, least: float, most: float, **units: float) -> Callable[[object], Any]:
    """Numbers from ``least`` to ``most``, written as ``digits`` with one of ``units`` behind them, or none."""
    form = re.compile(rf"({digits})({'|'.join(units)})?", re.ASCII)

    def parse(raw: object) -> float:
        match = None if isinstance(raw, bool) else form.fullmatch(str(raw).strip())
        value = float(match[1]) * units.get(match[2], 1) if match else math.nan
        if not least <= value <= most:
            raise ValueError
        return value if digits == _DECIMAL else int(value)

    return parse


def _existing(is_one: Callable[[str], bool], noun: str) -> Callable[[object], Path]:
    def parse(raw: object) -> Path:
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise ValueError
        if not is_one(raw):  # of os.path: Path raises where a name is too long to be one
            raise ValueError(f"{shown(short_path(raw))} is not a {noun}")
        return Path(raw)

    return parse


def _listen_address(raw: str) -> ListenAddress:
    host, colon, port = raw.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or re.search(r"[\s\[\]/]", host):
        raise ValueError
    return ListenAddress(host, int(port))


def _without_slash(address: str) -> str:
    return address.rstrip("/")


BOOL: Final = Kind("true or false", _bool, "BOOL")
TEXT: Final = Kind(
    "1 to 253 printable characters",
    _texts(lambda raw: raw.strip() and len(raw) <= 253 and raw.isprintable()),
    "TEXT",
)
WHOLE: Final = Kind("a whole number from 0 to 999999999", _number(_WHOLE, 0, 999_999_999), "N")
COUNT: Final = Kind("a whole number from 1 to 999999999", _number(_WHOLE, 1, 999_999_999), "N")
SECONDS: Final = Kind(
    "0.01 to 86400 seconds, or with ms, s, m or h",
    _number(_DECIMAL, 0.01, 86400, ms=0.001, s=1, m=60, h=3600),
    "SECONDS",
)
LOOK_BACK: Final = Kind(
    "a duration like 30m or 1h, up to 7d", _number(_DECIMAL, 0.01, 7 * 86400, s=1, m=60, h=3600, d=86400), "T"
)
SIZE: Final = Kind(
    "bytes from 64KiB to 1024GiB, or a number with KiB, MiB or GiB",
    _number(_WHOLE, 2**16, 2**40, KiB=2**10, MiB=2**20, GiB=2**30),
    "SIZE",
)
FILE: Final = Kind("an existing file", _existing(os.path.isfile, "file"), "FILE")
DIRECTORY: Final = Kind("an existing directory", _existing(os.path.isdir, "directory"), "DIRECTORY")
ANY_PATH: Final = Kind(
    "a path that starts with /; it need not exist",
    _texts(lambda raw: raw.startswith("/") and raw.isprintable(), Path),
    "PATH",
)
NAMESPACE: Final = Kind("the name of a namespace", _matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"), "NAMESPACE")
HOST_NAME: Final = Kind(
    "a host name, or a dot and a domain",
    _matching(r"(?!.{254})\.?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", str.lower),
    "NAME",
)
API_URL: Final = Kind(
    "http://HOST[:PORT] or https://HOST[:PORT]",
    _matching(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?/?", _without_slash),
    "URL",
)
PAGES_URL: Final = Kind(
    "an http:// or https:// address without spaces or quotes",
    _matching(r"https?://[^\s\"'<>]+", _without_slash),
    "URL",
)
JOB: Final = Kind("letters, digits and _ / -", _matching(r"[A-Za-z0-9_/-]+"), "NAME")
LISTEN_ADDRESS: Final = Kind(
    ":PORT, HOST:PORT or [IPV6]:PORT with a port from 0 to 65535", _texts(bool, _listen_address), "ADDRESS"
)
TARGET: Final = Kind(
    "an address of an engine, e.g. http://127.0.0.1:8000/metrics", _texts(lambda _: True, parse_target), "TARGET"
)
THRESHOLDS_FILE: Final = Kind('a file of lines "name: value"', _texts(bool, load), "FILE")


def one_of(*words: str) -> Kind:
    """One word of a closed list."""

    def parse(raw: object) -> str:
        if raw not in words:
            near = nearest(str(raw), words)
            raise ValueError(f"{shown(str(raw))} is not allowed; did you mean {near}?" if near else "")
        return str(raw)

    return Kind(", ".join(words[:-1]) + f" or {words[-1]}", parse, "|".join(words))
