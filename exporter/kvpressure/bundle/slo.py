"""The objectives that are set, as input of Sloth and Pyrra, for sites that generate their burn-rate rules with one of
them. All read the exporter's counters, so they judge requests by the same bounds as its own rules.
"""

from __future__ import annotations

from typing import Any, Final

from kvpressure.bundle.spec import SUBJECTS
from kvpressure.bundle.text import number
from kvpressure.bundle.values import BundleValues
from kvpressure.settings.thresholds import Thresholds

OBJECTIVES: Final = {
    "ttft": "time to first token",
    "inter_token": "time between tokens",
    "e2e": "end-to-end latency",
    "availability": "answered without a server error",
}
_WINDOW: Final = "4w"  # Pyrra's; Sloth has its own default of 30 days
_MISSED: Final = "kvpressure_objective_missed_requests_total"
_TOTAL: Final = "kvpressure_objective_requests_total"


def objectives_set(thresholds: Thresholds) -> dict[str, float]:
    """Objective -> required share of requests, 0-1; only those that are set."""
    targets = {name: float(thresholds[f"objective_{name}_ratio"]) for name in OBJECTIVES}
    return {name: target for name, target in targets.items() if target > 0}


def sloth(thresholds: Thresholds, values: BundleValues) -> dict[str, Any]:
    """A PrometheusServiceLevel with every objective that is set, for Sloth's command line and controller. One figure
    per objective over all models, because Sloth keeps no labels.
    """
    return {
        "apiVersion": "sloth.slok.dev/v1",
        "kind": "PrometheusServiceLevel",
        "metadata": {"name": "kvpressure", "labels": {"app.kubernetes.io/name": "kvpressure"}},
        "spec": {
            "service": "inference",
            "slos": [_sloth(name, target, thresholds, values) for name, target in objectives_set(thresholds).items()],
        },
    }


def _sloth(name: str, target: float, thresholds: Thresholds, values: BundleValues) -> dict[str, Any]:
    runbook = values.runbook("InferenceObjectiveBurn")
    return {
        "name": name.replace("_", "-"),
        "objective": _percent(target),
        "description": _described(name, thresholds),
        "sli": {"events": {"errorQuery": _rate(_MISSED, name), "totalQuery": _rate(_TOTAL, name)}},
        "alerting": {
            "name": "InferenceObjectiveBurn",
            "annotations": {"runbook_url": runbook} if runbook else {},
            "pageAlert": {"labels": _labels("critical")},
            "ticketAlert": {"labels": _labels("warning")},
        },
    }


def pyrra(name: str, target: float, thresholds: Thresholds) -> dict[str, Any]:
    """A Pyrra ServiceLevelObjective for one objective, evaluated per namespace and model."""
    selector = f'{{objective="{name}"}}'
    return {
        "apiVersion": "pyrra.dev/v1alpha1",
        "kind": "ServiceLevelObjective",
        "metadata": {
            "name": f"kvpressure-{name.replace('_', '-')}",
            "labels": {"app.kubernetes.io/name": "kvpressure", "pyrra.dev/kvpressure_family": "objectives"},
        },
        "spec": {
            "target": number(_percent(target)),
            "window": _WINDOW,
            "description": _described(name, thresholds),
            "alerting": {"name": "InferenceObjectiveBurn"},
            "indicator": {
                "ratio": {
                    "errors": {"metric": f"{_MISSED}{selector}"},
                    "total": {"metric": f"{_TOTAL}{selector}"},
                    "grouping": ["namespace", "model_name"],
                }
            },
        },
    }


def _percent(target: float) -> float:
    return round(100 * target, 6)


def _described(name: str, thresholds: Thresholds) -> str:
    share = f"{number(_percent(thresholds[f'objective_{name}_ratio']))} % of the requests"
    if name == "availability":
        return f"{share} are {OBJECTIVES[name]}."
    within = number(thresholds[f"objective_{name}_seconds"])
    return f"{share} stay within {within} s of {OBJECTIVES[name]}."


def _rate(counter: str, name: str) -> str:
    """Events per second over Sloth's window; an engine that two exporters report counts once."""
    by = ", ".join(SUBJECTS["engine"])
    return f'sum(max by ({by}) (rate({counter}{{objective="{name}"}}[{{{{.window}}}}])))'


def _labels(severity: str) -> dict[str, str]:
    return {"severity": severity, "kvpressure_family": "objectives"}
