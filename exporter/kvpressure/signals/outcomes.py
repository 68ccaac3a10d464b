"""How requests ended: which counts of an engine are requests answered, and which are failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model import readings as r

_ERROR: Final = r.FINISHED_PREFIX + "error"
_UNANSWERED: Final = (_ERROR, r.FINISHED_PREFIX + "abort")
_HTTP_5XX: Final = r.HTTP_PREFIX + "5xx"
FAILURES: Final = (_ERROR, _HTTP_5XX, r.REJECTED_PREFIX)  # how the names of counts of failures begin


def answered(counts: Mapping[str, float]) -> float:
    """Requests that finished with any reason but abort and error; engines without reasons count under one."""
    return sum([n for name, n in counts.items() if name.startswith(r.FINISHED_PREFIX) and name not in _UNANSWERED])


def failed(counts: Mapping[str, float]) -> float:
    """Failed requests: the largest of errors, 5xx responses and refusals, because they may count the same requests.
    Refusals of different reasons are different requests.
    """
    refused = sum(count for name, count in counts.items() if name.startswith(r.REJECTED_PREFIX))
    return max(counts.get(_ERROR, 0.0), counts.get(_HTTP_5XX, 0.0), refused)
