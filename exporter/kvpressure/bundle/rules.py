"""Rule templates to Prometheus rules: parsed, completed with labels and links, written again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import yaml

from kvpressure.bundle.spec import PACES, Alert, Group, Level, parse_groups
from kvpressure.bundle.templating import context, environment, render
from kvpressure.bundle.text import duration
from kvpressure.bundle.values import Values, ValuesError
from kvpressure.thresholds import Thresholds

PREFIX: Final = "kvpressure-"  # of group names
PROFILES: Final = ("default", "literal")
SOURCES: Final = ("kvpressure", "dcgm")
_BOARD_VARIABLES: Final = {"namespace": "namespace", "model_name": "model", "pod": "pod", "uuid": "gpu"}
_CLUSTER_VARIABLE: Final = (
    "{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}"  # not every Prometheus has that label
)


@dataclass(frozen=True, slots=True)
class Options:
    """What to render. ``profile``: ``default``, or ``literal`` = the guides' thresholds without our gates. ``source``:
    ``kvpressure`` reads this exporter, ``dcgm`` dcgm-exporter and vLLM's own metrics.
    """

    thresholds: Thresholds
    values: Values = field(default_factory=Values)
    profile: str = "default"
    source: str = "kvpressure"


def load_groups(options: Options) -> tuple[Group, ...]:
    """All rule groups, recordings first, exclusions and durations of the values file applied.

    Raises ``ValuesError`` when the values file names an alert that does not exist.
    """
    folder = "rules" if options.source == "kvpressure" else f"rules-{options.source}"
    variables = context(
        options.thresholds, literal=options.profile == "literal", exporter_job=options.values.exporter_job
    )
    names = sorted(name for name in environment().list_templates() if name.startswith(f"{folder}/"))
    intervals = {pace: options.thresholds[f"rules_{pace}_interval_seconds"] for pace in PACES}
    groups = [group for name in names for group in parse_groups(yaml.safe_load(render(name, variables)), intervals)]
    groups.sort(key=lambda group: group.family != "recordings")
    _check_names(groups, options.values)
    patched = (_patched(group, options.values) for group in groups)
    return tuple(group for group in patched if group.alerts or group.recordings)


def _check_names(groups: Iterable[Group], values: Values) -> None:
    names = {alert.name for group in groups for alert in group.alerts}
    families = {group.family for group in groups} - {"recordings"}
    for key, wanted, known in (
        ("exclude", values.exclude, names | families),
        ("durations", values.durations, names),
        ("alert_labels", values.alert_labels, names),
    ):
        for name in wanted:
            if name not in known:
                raise ValuesError(f"values: {key}: no alert is called {name!r}; allowed: {', '.join(sorted(known))}")


def _patched(group: Group, values: Values) -> Group:
    if group.family in values.exclude:
        return replace(group, alerts=())
    alerts = tuple(_with_durations(alert, values) for alert in group.alerts if alert.name not in values.exclude)
    return replace(group, alerts=alerts)


def _with_durations(alert: Alert, values: Values) -> Alert:
    wanted = values.durations.get(alert.name, {})
    levels = tuple(replace(level, for_seconds=wanted.get(level.severity, level.for_seconds)) for level in alert.levels)
    return replace(alert, levels=levels)


def labels_of(alert: Alert, level: Level, values: Values) -> dict[str, str]:
    """The labels the rule adds."""
    return {
        "severity": level.severity,
        "page": "true" if level.page else "false",
        "kvpressure_family": alert.family,
        **values.labels,
        **values.alert_labels.get(alert.name, {}),
    }


def annotations_of(alert: Alert, level: Level, values: Values) -> dict[str, str]:
    """Texts and links of one rule; the links carry the alert's own namespace, model, pod and GPU."""
    annotations = {
        "summary": level.summary,
        "description": level.description,
        "runbook_url": f"{values.runbook_base_url}/{alert.name}.md",
    }
    if not alert.board:
        return annotations
    shown = [label for label in _result_labels(level) if label in _BOARD_VARIABLES]
    query = "&".join(f"var-{_BOARD_VARIABLES[label]}={{{{ $labels.{label} | urlquery }}}}" for label in shown)
    link = f"{values.dashboard_base_url}/d/kvpressure-incident"
    return {**annotations, "dashboard_url": f"{link}?{query}{_CLUSTER_VARIABLE}" if query else link}


def _result_labels(level: Level) -> list[str]:
    """Identity labels that every way to fire returns."""
    common = set(level.cases[0].labels).intersection(*(case.labels for case in level.cases if case.fires))
    return [label for label in _BOARD_VARIABLES if label in common]


def _rules(group: Group, values: Values) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [{"record": item.name, "expr": item.expr} for item in group.recordings]
    for alert in group.alerts:
        for level in alert.levels:
            rule: dict[str, Any] = {"alert": alert.name, "expr": level.full_expr()}
            if level.for_seconds:
                rule["for"] = duration(level.for_seconds)
            if level.keep_seconds:
                rule["keep_firing_for"] = duration(level.keep_seconds)
            rules.append(
                {**rule, "labels": labels_of(alert, level, values), "annotations": annotations_of(alert, level, values)}
            )
    return rules


def rule_file(groups: Iterable[Group], values: Values) -> dict[str, Any]:
    """The plain rule file: what ``rule_files`` of Prometheus, Thanos Ruler, Mimir and vmalert read."""
    return {
        "groups": [
            {
                "name": PREFIX + group.name,
                "interval": duration(group.interval),
                "limit": group.limit,
                "rules": _rules(group, values),
            }
            for group in groups
        ]
    }


def mimir_namespace(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The same object as a rule namespace for ``mimirtool rules load`` (Mimir, Grafana Cloud, Cortex)."""
    return {"namespace": "kvpressure", **rules}


def prometheus_rule(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The same object as a PrometheusRule of the Prometheus Operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvpressure", "labels": {"app.kubernetes.io/name": "kvpressure", "role": "alert-rules"}},
        "spec": dict(rules),
    }
