"""One bounded GET of JSON or text, for single requests: an exporter's document, a server's version and models."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, Final

from kvpressure.advice.wording import reason_text
from kvpressure.errors import InputError
from kvpressure.model import ceilings
from kvpressure.printable import visible_all
from kvpressure.sources.base import SourceError
from kvpressure.sources.scrape.fetch import Fetcher
from kvpressure.sources.scrape.targets import Target, parse_target

TIMEOUT_SECONDS: Final = 5.0
DIAGNOSIS_PATH: Final = "/api/v1/diagnosis"
EXPORTER_PORT: Final = 9846


class NoExporterError(InputError):
    """No exporter answers. ``problem``: the address and why; ``advice``: what to check, or what is allowed."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"--exporter: {problem}; {advice}")
        self.problem = problem


def get_text(target: Target, path: str, timeout: float = TIMEOUT_SECONDS) -> str:
    """The body at ``path`` of the target's server. Raises ``SourceError``."""
    fetcher = Fetcher(replace(target, path=path), timeout)
    try:
        return fetcher.fetch().decode(errors="replace")
    finally:
        fetcher.close()


def why(error: SourceError) -> str:
    """Why a request failed, in words: ``connection refused``, ``HTTP status 404``."""
    return f"HTTP {error.detail}" if error.detail.startswith("status ") else reason_text(error.reason)


def get_json(target: Target, path: str, timeout: float = TIMEOUT_SECONDS) -> Any:
    """JSON at ``path``; None without any."""
    try:
        return _document(get_text(target, path, timeout))
    except (SourceError, ValueError, RecursionError):
        return None


def _document(text: str) -> Any:
    """JSON with its names on one line; what it has as NaN or infinity is null."""
    finite = partial(ceilings.number_in, most=ceilings.FINITE, least=-ceilings.FINITE)
    return visible_all(json.loads(text, parse_float=finite, parse_constant=lambda _: None))


def target_of(text: str, option: str) -> Target:
    """A target from the command line. Raises ``InputError`` with the option's name."""
    try:
        return parse_target(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


def exporter_document(address: str, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """The document of a running exporter. Raises ``InputError`` if there is none."""
    target = target_of(address if "://" in address or ":" in address else f"{address}:{EXPORTER_PORT}", "--exporter")
    where = f"{target.scheme}://{target.address}{DIAGNOSIS_PATH}"
    try:
        document = _document(get_text(target, DIAGNOSIS_PATH, timeout))
    except SourceError as error:
        raise NoExporterError(f"{where}: {why(error)}", "is an exporter running there?") from error
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("engines"), list):
        raise NoExporterError(
            f"{where}: the answer is not from a kvpressure exporter", "allowed: the address of a running exporter"
        )
    return document
