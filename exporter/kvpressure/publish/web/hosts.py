"""The host names under which a browser may read the exporter.

Any web page can let its own host name resolve to a pod's address and then read the pod's answers as its own (DNS
rebinding). Such requests carry the page's name in ``Host``; a cluster addresses a pod by address, by a name without a
dot, or below ``svc`` or ``cluster.local``. Only browsers can be misled, so other clients (Prometheus, curl) may use
any name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from typing import Final

ALLOWED: Final = (".svc", ".cluster.local", ".localhost")
# At least one of these is in every request of a browser, and no script of a page can remove it.
_OF_BROWSERS: Final = ("accept-language", "sec-fetch-mode", "sec-fetch-site", "origin", "referer")


class Hosts:
    """The allowed names beside the built-in ones; one with a leading dot allows all names below it."""

    def __init__(self, more: Collection[str] = ()) -> None:
        lower = {name.lower().rstrip(".") for name in more if name}
        self._names = frozenset(name for name in lower if not name.startswith("."))
        self._below = (*ALLOWED, *sorted(name for name in lower if name.startswith(".")))

    def refuses(self, headers: Mapping[str, str]) -> str | None:
        """The host name if a browser's request must be refused, else None; header names in lower case."""
        if not _is_browser(headers):
            return None
        name = host_name(headers.get("host", ""))
        return None if self._knows(name) else name

    def _knows(self, name: str) -> bool:
        if "." not in name and ":" not in name:
            return True
        return name in self._names or name.endswith(self._below) or _is_address(name)


def host_name(host: str) -> str:
    """The name in a ``Host`` header: without port and trailing dot, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower().removesuffix(".")


def _is_browser(headers: Mapping[str, str]) -> bool:
    return any(name in headers for name in _OF_BROWSERS) or headers.get("user-agent", "").startswith("Mozilla/")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
