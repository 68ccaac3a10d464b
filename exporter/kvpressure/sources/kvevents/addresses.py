"""Where engines publish KV events: ``kv-events`` of a target, or ``--kv-events-config`` of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpressure.model.arguments import EngineArgs
from kvpressure.parsed import json_of, mapping, text

_CONFIG: Final = "kv_events_config"
_ADDRESS: Final = re.compile(r"tcp://(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_ON: Final = (True, "true", "True", "1")

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class EventsEndpoint:
    """Where the first data-parallel rank publishes, and where it sends again what was lost (``None`` = nowhere). Host
    "" = that of the metrics.
    """

    events: Address
    replay: Address | None = None

    def of_rank(self, rank: int, host: str) -> tuple[Address, Address | None] | None:
        """Those of a rank, each of which has its own ports; ``host``: of the metrics. ``None`` = there is no such
        port.
        """
        listed = [(name or host, port + rank) for name, port in (self.events, self.replay or self.events)]
        return (listed[0], listed[1] if self.replay else None) if max(port for _, port in listed) < 65536 else None


def endpoint_of_option(value: str) -> EventsEndpoint | None:
    """``tcp://HOST:PORT``, or two of them with a comma; ``None`` = anything else."""
    events, comma, replay = value.partition(",")
    read = _address(events), _address(replay) if comma else None
    return None if read[0] is None or (comma and read[1] is None) else EventsEndpoint(read[0], read[1])


def endpoint_of(args: EngineArgs) -> EventsEndpoint | None:
    """The endpoint by the arguments, given as JSON or by field; ``None`` without one that the engine listens on."""
    config = _config(args)
    publisher, enabled = config.get("publisher"), config.get("enable_kv_cache_events")
    if publisher not in (None, "zmq") or (enabled not in _ON if enabled is not None else publisher is None):
        return None
    events = _address(text(config.get("endpoint", "tcp://*:5557")))
    replay = _address(text(config.get("replay_endpoint")))
    if events is None or events[0]:
        return None  # it connects to another host
    return EventsEndpoint(events, replay if replay is not None and not replay[0] else None)


def _config(args: EngineArgs) -> Mapping[str, Any]:
    prefix = f"{_CONFIG}."
    return {
        **mapping(json_of(args.values.get(_CONFIG) or "")),
        **{name.removeprefix(prefix): value for name, value in args.values.items() if name.startswith(prefix)},
    }


def _address(value: str) -> Address | None:
    found = _ADDRESS.fullmatch(value)
    if found is None or not 0 < int(found[2]) < 65536:
        return None
    return "" if found[1] in ("*", "0.0.0.0", "[::]") else found[1].strip("[]"), int(found[2])
