"""The process's log: one line per record on stderr, as logfmt or JSON. Text from outside cannot break a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final


def configure(level: str, form: str) -> None:
    """Send every logger to stderr from ``level`` (debug, info, warning, error) up, as ``logfmt`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger("urllib3").setLevel(logging.WARNING)


_FIELDS: Final = "kvpressure_fields"


def with_fields(**fields: str | float) -> dict[str, dict[str, str | float]]:
    """``extra`` of a logging call: fields beside the message; empty ones are left out, numbers stay numbers in JSON."""
    return {_FIELDS: {name: value for name, value in fields.items() if value != ""}}


class LineFormatter(logging.Formatter):
    """A record as one line with ts, level, logger and msg, then the fields of ``with_fields``; a traceback
    becomes ``trace``.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields)
        return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())


def _quoted(value: str | float) -> str:
    if not isinstance(value, str):
        return str(value)
    plain = value and value.isprintable() and not any(char in value for char in ' "=\\')
    return value if plain else json.dumps(value)
