"""The few things annotations use of Go's template language, so that generated unit tests can state the expected text.

promtool is the referee: it renders the same annotation with Prometheus' own code and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from urllib.parse import quote_plus

_QUERY = re.compile(r'\{\{ with printf "[^{]*\{limit=\\"(?P<limit>\w+)\\".*?\| query \}\}(?P<body>.*?)\{\{ end \}\}')
_FIRST = re.compile(r'\{\{ \. \| first \| value \| printf "%\.(\d)f" \}\}')
_WITH = re.compile(r"\{\{ with \$labels\.(\w+) \}\}(?P<before>.*?)\{\{ \. \| urlquery \}\}\{\{ end \}\}")
_LABEL = re.compile(r"\{\{ \$labels\.(\w+)(?P<escape> \| urlquery)? \}\}")
_VALUE = re.compile(r"\{\{ \$value \| (\w+) \}\}")
_PRINTF = re.compile(r'\{\{ printf "%\.(\d)f" \$value \}\}')


def expand(text: str, labels: Mapping[str, str], value: float, recommended: Mapping[str, float]) -> str:
    """``text`` as Prometheus expands it. ``recommended`` is what the query for a recommended limit finds."""
    text = _QUERY.sub(lambda match: _recommended(match, recommended), text)
    text = _WITH.sub(lambda match: match["before"] + quote_plus(labels[match[1]]) if labels.get(match[1]) else "", text)
    text = _LABEL.sub(lambda match: _label(match, labels), text)
    text = _VALUE.sub(lambda match: _FORMATS[match[1]](value), text)
    return _PRINTF.sub(lambda match: f"{value:.{int(match[1])}f}", text)


def _recommended(match: re.Match[str], recommended: Mapping[str, float]) -> str:
    value = recommended.get(match["limit"])
    return "" if value is None else _FIRST.sub(lambda first: f"{value:.{int(first[1])}f}", match["body"])


def _label(match: re.Match[str], labels: Mapping[str, str]) -> str:
    text = labels.get(match[1], "")
    return quote_plus(text) if match["escape"] else text


def _general(value: float) -> str:
    """Go's ``%.4g``."""
    text = f"{value:.4g}"
    return text if "e" in text else format(Decimal(text).normalize(), "f")


def _humanize(value: float) -> str:
    """SI prefixes, as Prometheus' ``humanize``."""
    if value == 0 or value != value:
        return _general(value)
    if abs(value) >= 1:
        for prefix in ("", "k", "M", "G", "T", "P"):
            if abs(value) < 1000:
                return _general(value) + prefix
            value /= 1000
        return _general(value) + "E"
    for prefix in ("", "m", "u", "n"):
        if abs(value) >= 1:
            return _general(value) + prefix
        value *= 1000
    return _general(value) + "p"


def _humanize_percentage(value: float) -> str:
    return _general(value * 100) + "%"


def _humanize_duration(value: float) -> str:
    """``1m 30s``, and SI prefixes below a second, as Prometheus' ``humanizeDuration``."""
    if abs(value) < 1:
        return _humanize(value) + "s"
    total = int(value)
    parts = ((total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "m"))
    shown = [index for index, (count, _) in enumerate(parts) if count]
    if not shown:
        return _general(value) + "s"
    return " ".join(f"{count}{unit}" for count, unit in parts[shown[0] :]) + f" {total % 60}s"


_FORMATS = {"humanize": _humanize, "humanizePercentage": _humanize_percentage, "humanizeDuration": _humanize_duration}
