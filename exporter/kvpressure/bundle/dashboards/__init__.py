"""Grafana dashboards, one file each, built from plain dictionaries.

schemaVersion 39 loads on Grafana 10.4 to 13 (older JSON is migrated on load, JSON newer than the server is refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvpressure.bundle.dashboards import detail, fleet, incident
from kvpressure.bundle.dashboards.builder import Dashboard, DashboardContext

DASHBOARDS: Final[dict[str, Callable[[DashboardContext], Dashboard]]] = {
    "kvpressure-fleet": fleet.build,
    "kvpressure-incident": incident.build,
    "kvpressure-detail": detail.build,
}


def render_dashboards(site: DashboardContext) -> dict[str, dict[str, Any]]:
    """Every dashboard: file name without suffix (which is the uid) -> Grafana's JSON model."""
    return {uid: build(site).model(uid) for uid, build in DASHBOARDS.items()}


def optional_queries(site: DashboardContext) -> dict[tuple[str, str, str], str]:
    """Queries that may return nothing on a healthy system: (uid, panel title, refId) -> why."""
    return {(uid, *where): why for uid, build in DASHBOARDS.items() for where, why in build(site).optional.items()}
