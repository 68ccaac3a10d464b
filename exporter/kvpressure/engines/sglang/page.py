"""Which half of a prefill/decode pair published metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpressure.engines.base import PageKind
from kvpressure.model.readings import EngineReading, PageText


def kind(text: PageText, _engines: Sequence[EngineReading], _page: Mapping[str, float]) -> PageKind:
    """The flavour by the label ``engine_type``: unified, prefill or decode (0.4.6 and later)."""
    for flavour in ("prefill", "decode", "unified"):
        if b'engine_type="%b"' % flavour.encode() in text:
            return PageKind(flavour)
    return PageKind()
