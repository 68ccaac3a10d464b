"""Rule templates to Prometheus rules: parsed, completed with labels and links."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import yaml

from kvpressure.bundle import engine_labels
from kvpressure.bundle.spec import (
    SUBJECTS,
    Alert,
    AlertLevel,
    RuleGroup,
    SideCondition,
    parse_groups,
)
from kvpressure.bundle.templating import context, environment, opted_out, render
from kvpressure.bundle.text import duration
from kvpressure.bundle.values import BundleValues
from kvpressure.errors import InputError, shown
from kvpressure.printable import MARKUP
from kvpressure.settings.thresholds import Thresholds

PREFIX: Final = "kvpressure-"  # of group names
_METRIC: Final = re.compile(r"(?<![:\w])kvpressure_\w+(?![:\w])")  # no recording
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same documents, ten times as fast
PROFILES: Final = ("default", "literal")
_CAMEL: Final = {
    "group_by": "groupBy",
    "group_wait": "groupWait",
    "group_interval": "groupInterval",
    "repeat_interval": "repeatInterval",
    "send_resolved": "sendResolved",
}
_PRINTED_NAME: Final = re.compile(  # that of a label, a variable, or what stands for it within `with`
    r'(\{\{-? )(\.(?: \| first \| label "\w+"|Labels\.\w+)?|\$\w+(?:\.\w+)?)( -?\}\})'
)
_OF_CLUSTER: Final = "{{ with $labels.cluster }}, cluster {{ . }}{{ end }}"
_VARIABLES: Final = (
    ("cluster", "cluster"),
    ("gpu", "uuid"),
    ("model", "model_name"),
    ("namespace", "namespace"),
    ("pod", "pod"),
    ("pool", "pool"),
)
"""Variables of the incident dashboard, and the labels of an alert that choose them."""
_CHOSEN: Final = "".join(
    f"{{{{ with $labels.{label} }}}}&var-{name}={{{{ . | urlquery }}}}{{{{ end }}}}" for name, label in _VARIABLES
)


@dataclass(frozen=True, slots=True)
class Options:
    """What to render. ``profile``: ``default``, or ``literal`` = the guides' thresholds and severities alone.
    ``source``: what the rules read, ``kvpressure`` = this exporter, ``vllm`` = vLLM's own metrics alone.
    """

    thresholds: Thresholds
    values: BundleValues = field(default_factory=BundleValues)
    profile: str = "default"
    source: str = "kvpressure"


def load_groups(options: Options) -> tuple[RuleGroup, ...]:
    """All rule groups, recordings first, with exclusions and durations of the values file applied.

    Raises ``InputError`` when the values file names an unknown alert.
    """
    folder = "rules" if options.source == "kvpressure" else f"rules-{options.source}"
    variables = context(
        options.thresholds, literal=options.profile == "literal", exporter_job=options.values.exporter_job
    )
    names = sorted(name for name in environment().list_templates() if name.startswith(f"{folder}/"))
    groups = [group for name in names for group in parse_groups(yaml.load(render(name, variables), _LOADER))]
    groups.sort(key=lambda group: group.family != "recordings")
    if options.source == "kvpressure":  # the same values are for the rules over vLLM's metrics, which are fewer
        _check_names(groups, options.values)
    changed = _literal if options.profile == "literal" else _with_opt_out
    if options.source == "kvpressure":
        groups = [replace(group, alerts=tuple(map(changed, group.alerts))) for group in groups]
    patched = (_patched(group, options.values) for group in groups)
    return tuple(group for group in patched if group.alerts or group.recordings)


def _check_names(groups: Iterable[RuleGroup], values: BundleValues) -> None:
    names = {alert.name for group in groups for alert in group.alerts}
    families = {group.family for group in groups} - {"recordings"}
    for key, wanted, known in (
        ("exclude", values.exclude, names | families),
        ("durations", values.durations, names),
        ("alert_labels", values.alert_labels, names),
    ):
        for name in wanted:
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise InputError(f"values: {key}: no alert is called {shown(name)}; allowed: {allowed}")


def _patched(group: RuleGroup, values: BundleValues) -> RuleGroup:
    if group.family in values.exclude:
        return replace(group, alerts=())
    wanted = (alert for alert in group.alerts if alert.name not in values.exclude)
    return replace(group, alerts=tuple(_with_durations(alert, values) for alert in wanted))


def _literal(alert: Alert) -> Alert:
    """The alert with the guides' severities."""
    levels = tuple(replace(level, severity=level.name) for level in alert.levels)
    return replace(alert, levels=levels)


def _with_opt_out(alert: Alert) -> Alert:
    """The alert, silent for pods that opted out of all alerts or of pages."""
    if "pod" not in {*SUBJECTS[alert.subject], *alert.labels}:
        return alert
    return replace(alert, levels=tuple(_opted_out(level) for level in alert.levels))


def _opted_out(level: AlertLevel) -> AlertLevel:
    which = opted_out("off", "ticket") if level.wakes else opted_out("off")
    condition = SideCondition("opt_out", "unless", which, ("cluster", "namespace", "pod"))
    return replace(level, conditions=(*level.conditions, condition))


def _with_durations(alert: Alert, values: BundleValues) -> Alert:
    wanted = values.durations.get(alert.name, {})
    for level in alert.levels:
        if wanted.get(level.severity, level.lasted_seconds) < level.lasted_seconds:
            where = f"values: durations: {alert.name}: {level.severity}"
            raise InputError(f"{where}: its expression waits longer; allowed: {level.lasted_seconds:g} seconds or more")
    levels = tuple(replace(level, for_seconds=wanted.get(level.severity, level.for_seconds)) for level in alert.levels)
    return replace(alert, levels=levels)


def labels_of(alert: Alert, level: AlertLevel, values: BundleValues) -> dict[str, str]:
    """The labels the rule adds."""
    return {
        "severity": level.severity,
        **({"documented_level": level.documented} if level.documented else {}),
        "kvpressure_family": alert.family,
        **values.labels,
        **values.alert_labels.get(alert.name, {}),
    }


def annotations_of(alert: Alert, level: AlertLevel, values: BundleValues) -> dict[str, str]:
    """Texts of one rule, and links where their addresses are set; the dashboard shows what the alert is about."""
    runbook, dashboard = values.runbook(alert.name), values.dashboard_base_url if alert.dashboard else ""
    return {
        "summary": _without_markup(level.summary + _OF_CLUSTER * ("cluster" in alert.labels)),
        "description": _without_markup(level.description),
        **({"runbook_url": runbook} if runbook else {}),
        **({"dashboard_url": f"{dashboard}/d/kvpressure-incident?from=now-1h{_CHOSEN}"} if dashboard else {}),
    }


def _without_markup(text: str) -> str:
    """``text`` whose labels have ``_`` for the signs with which a name mentions people or hides a link in a chat."""
    quoted = MARKUP.replace("\\", r"\\\\")
    return _PRINTED_NAME.sub(rf'\1\2 | reReplaceAll "{quoted}" "_$1"\3', text)


def _rules(group: RuleGroup, values: BundleValues) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [{"record": item.name, "expr": item.expr} for item in group.recordings]
    for alert in group.alerts:
        for level in alert.levels:
            rule: dict[str, Any] = {"alert": alert.name, "expr": level.full_expr()}
            if level.for_seconds > level.lasted_seconds:
                rule["for"] = duration(level.for_seconds - level.lasted_seconds)
            if level.keep_seconds:
                rule["keep_firing_for"] = duration(level.keep_seconds)
            rules.append(
                {**rule, "labels": labels_of(alert, level, values), "annotations": annotations_of(alert, level, values)}
            )
    return rules


def _prefixed(rule: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: engine_labels.template(text) for name, text in rule.get("annotations", {}).items()}
    return {**rule, "expr": engine_labels.expression(rule["expr"]), **({"annotations": texts} if texts else {})}


def metrics_read(rules: Mapping[str, Any]) -> list[str]:
    """Names of the exporter's metrics that the rules of a file, and the queries in their texts, read."""
    every = [rule for group in rules["groups"] for rule in group["rules"]]
    texts = [text for rule in every for text in (rule["expr"], *rule.get("annotations", {}).values())]
    return sorted({name for text in texts for name in _METRIC.findall(text)})


def rule_file(groups: Iterable[RuleGroup], values: BundleValues) -> dict[str, Any]:
    """The plain rule file, as ``rule_files`` of Prometheus, Thanos Ruler, Mimir and vmalert read it."""
    prefixed = values.engine_labels == "prefixed"
    return {
        "groups": [
            {
                "name": PREFIX + group.name,
                "interval": duration(group.interval),
                "limit": group.limit,
                "rules": [_prefixed(rule) if prefixed else rule for rule in _rules(group, values)],
            }
            for group in groups
        ]
    }


def alertmanager_config(alertmanager: Mapping[str, Any]) -> dict[str, Any]:
    """The example routes as an AlertmanagerConfig of the Prometheus Operator, which kube-prometheus-stack reads.

    It belongs in the namespace of the alerts, unless alertmanagerConfigMatcherStrategy is None: the operator adds a
    matcher on namespace to every route and inhibition.
    """

    def matchers(texts: Iterable[str]) -> list[dict[str, str]]:
        found = []
        for text in texts:
            name, kind, value = re.findall(r"^(\w+)(=~|!~|!=|=)\"(.*)\"$", text)[0]
            found.append({"name": name, "matchType": kind, "value": value})
        return found

    def route(body: Mapping[str, Any]) -> dict[str, Any]:
        named = {_CAMEL.get(name, name): value for name, value in body.items() if name not in ("routes", "matchers")}
        return {
            **named,
            **({"matchers": matchers(body["matchers"])} if "matchers" in body else {}),
            **({"routes": [route(child) for child in body["routes"]]} if "routes" in body else {}),
        }

    receivers = [
        {
            "name": item["name"],
            **(
                {"webhookConfigs": [{_CAMEL.get(k, k): v for k, v in hook.items()} for hook in item["webhook_configs"]]}
                if "webhook_configs" in item
                else {}
            ),
        }
        for item in alertmanager["receivers"]
    ]
    inhibitions = [
        {
            "sourceMatch": matchers(rule["source_matchers"]),
            "targetMatch": matchers(rule["target_matchers"]),
            "equal": rule["equal"],
        }
        for rule in alertmanager["inhibit_rules"]
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1alpha1",
        "kind": "AlertmanagerConfig",
        "metadata": {"name": "kvpressure", "labels": {"app.kubernetes.io/name": "kvpressure"}},
        "spec": {"route": route(alertmanager["route"]), "inhibitRules": inhibitions, "receivers": receivers},
    }


def prometheus_rule(rules: Mapping[str, Any], name: str = "kvpressure") -> dict[str, Any]:
    """The rules as a PrometheusRule of the Prometheus Operator.

    kube-prometheus-stack selects by the label ``release`` when installed under its own name.
    """
    labels = {"app.kubernetes.io/name": "kvpressure", "role": "alert-rules", "release": "kube-prometheus-stack"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": labels},
        "spec": dict(rules),
    }


class _Watched(Thresholds):
    """Thresholds that remember which numbers were asked for."""

    __slots__ = ("asked",)

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__({entry.name: entry for entry in thresholds.entries()})
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.asked.add(name)
        return super().__getitem__(name)


def thresholds_in_rules(options: Options) -> list[str]:
    """Names of the settable thresholds whose numbers stand in the rules."""
    watched = _Watched(options.thresholds)
    load_groups(replace(options, thresholds=watched))
    return sorted(entry.name for entry in watched.settable() if entry.name in watched.asked)
