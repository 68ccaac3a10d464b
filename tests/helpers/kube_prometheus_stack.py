"""What kube-prometheus-stack does by default: what mutes alerts."""

from __future__ import annotations

from typing import Any, Final

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
