"""Port, path and scheme of a container's metrics: from annotations, the command line, declared ports, the default.
Pure.

``kvpressure.io`` annotations are explicit and override everything else. Those of Prometheus and KServe are hints that
other software writes too (Istio and Linkerd for their sidecars), so they count only for a port that the container
declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpressure.model.arguments import EngineArgs

EXPLICIT: Final = "kvpressure.io/"
HINTS: Final = ("prometheus.io/", "prometheus.kserve.io/")
PREFIXES: Final = (EXPLICIT, *HINTS)

SIDECAR_PORTS: Final = frozenset({15020, 15021, 15090, 4143, 4191})  # Istio, Linkerd
_SSH: Final = 22
NODE_PORTS: Final = frozenset({2379, 2380, 2381, 6443, 9100, 10248, 10249, 10250, 10255, 10256, 10257, 10259})

UNIX_SOCKET: Final = "unix_socket"
LOOPBACK: Final = "loopback_of_container"
METRICS_OFF: Final = "metrics_off"
REFUSALS: Final = (
    "port_not_declared",
    "port_of_the_node",
    "port_of_a_sidecar",
    "port_unknown",
    "bad_port",
    UNIX_SOCKET,
    LOOPBACK,
    METRICS_OFF,
)

_METRICS_NAMES: Final = ("metrics", "http-metrics")
_SERVER_NAMES: Final = ("http", "api", "openai", "serve", "server")
_OTHER_NAMES: Final = frozenset({"ssh", "grpc", "nixl", "gcs", "client", "dashboard"})


@dataclass(frozen=True, slots=True)
class ServerPort:
    """What a pod shows about one server's port. ``asked``: the command line's port; ``asked_unknown``: it sets one
    that is not visible. ``default``: without either, None = no metrics endpoint. ``names``: port names of this
    engine.
    """

    declared: Sequence[tuple[int, str]]
    asked: int | None
    asked_unknown: bool
    default: int | None
    names: tuple[str, ...]
    on_host: bool
    unreachable: str | None = None  # why nobody outside its container reaches it


def unreachable(args: EngineArgs) -> str | None:
    """Why nobody outside its container reaches a server with these arguments; None = it may be reached."""
    if "uds" in args.explicit:
        return UNIX_SOCKET
    return LOOPBACK if args.values.get("host") in ("localhost", "127.0.0.1", "::1") else None


def annotation(annotations: Mapping[str, Any], name: str) -> str:
    """The stripped text of an annotation; "" when absent or not a text."""
    found = annotations.get(name)
    return found.strip() if isinstance(found, str) else ""


def port(server: ServerPort, annotations: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """(port of the metrics, None) or (None, reason)."""
    explicit = annotation(annotations, EXPLICIT + "port")
    found, refusal = _explicit(server, explicit) if explicit else _found(server, annotations)
    if found in SIDECAR_PORTS:
        return None, "port_of_a_sidecar"
    return (None, "port_of_the_node") if server.on_host and found in NODE_PORTS else (found, refusal)


def _explicit(server: ServerPort, text: str) -> tuple[int | None, str | None]:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        return None, "bad_port"
    number = int(text)
    if server.on_host and number not in NODE_PORTS and number not in _numbers(server):
        return None, "port_not_declared"
    return number, None


def _found(server: ServerPort, annotations: Mapping[str, Any]) -> tuple[int | None, str | None]:
    hinted = _hinted(server, annotations)
    if hinted is not None:
        return hinted, None
    if server.unreachable is not None:
        return None, server.unreachable
    numbers = _numbers(server)
    if server.asked is not None and (server.asked in numbers or not server.on_host):
        return server.asked, None
    if server.default is None:
        return None, METRICS_OFF
    by_name = {name: number for number, name in reversed(server.declared) if number not in SIDECAR_PORTS}
    silent = not server.asked_unknown and not server.on_host
    found = next(
        (
            number
            for number in (
                server.default if server.default in numbers and not server.asked_unknown else None,
                *(by_name.get(name) for name in (*_METRICS_NAMES, *server.names, *_SERVER_NAMES)),
                *(
                    number
                    for number, name in server.declared
                    if number not in (*SIDECAR_PORTS, _SSH) and name not in _OTHER_NAMES
                ),
                server.default if silent else None,
            )
            if number is not None
        ),
        None,
    )
    if found is not None:
        return found, None
    return None, "port_unknown" if server.asked_unknown else "port_not_declared"


def _hinted(server: ServerPort, annotations: Mapping[str, Any]) -> int | None:
    """The declared port that an annotation of Prometheus or KServe names, or None."""
    numbers = _numbers(server)
    for prefix in HINTS:
        text = annotation(annotations, prefix + "port")
        hinted = next((number for number in numbers if str(number) == text), None)
        if hinted is not None and hinted not in SIDECAR_PORTS:
            return hinted
    return None


def _numbers(server: ServerPort) -> list[int]:
    return [number for number, _ in server.declared]


def beside_port(annotations: Mapping[str, Any], name: str, port: int) -> str:
    """The annotated path or scheme (``name``) of the metrics, "" = none. It counts only for the port that the same
    annotation prefix names, if any.
    """
    for prefix in PREFIXES:
        text = annotation(annotations, prefix + name)
        if text and annotation(annotations, prefix + "port") in ("", str(port)):
            return text
    return ""
