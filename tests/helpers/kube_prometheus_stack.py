"""What kube-prometheus-stack does by default: which objects it selects, and what mutes alerts."""

from __future__ import annotations

from typing import Any, Final

DASHBOARD_LABEL: Final = {"grafana_dashboard": "1"}
"""``grafana.sidecar.dashboards.label`` and ``labelValue``: the ConfigMaps that become dashboards."""

INHIBITIONS: Final[list[dict[str, Any]]] = [
    {
        "source_matchers": ['severity="critical"'],
        "target_matchers": ['severity=~"warning|info"'],
        "equal": ["namespace", "alertname"],
    },
    {
        "source_matchers": ['severity="warning"'],
        "target_matchers": ['severity="info"'],
        "equal": ["namespace", "alertname"],
    },
    {
        "source_matchers": ['alertname="InfoInhibitor"'],
        "target_matchers": ['severity="info"'],
        "equal": ["namespace"],
    },
]
"""``alertmanager.config.inhibit_rules`` of the chart's values."""


def selector(release: str) -> dict[str, str]:
    """Labels of the monitors and rules that are taken: those of the stack's own release, as its
    ``*SelectorNilUsesHelmValues`` are true unless set.
    """
    return {"release": release}
