"""A site's changes to the bundle, in one file: ``kvpressure bundle --values FILE``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpressure.bundle.spec import FAMILIES, SEVERITIES
from kvpressure.errors import InputError, shown
from kvpressure.publish.links import RUNBOOK_FOLDER
from kvpressure.settings import yaml_lines as yaml_nodes

_DURATION = re.compile(r"(\d+)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_JOB = re.compile(r"[\w/-]+", re.ASCII)
_URL = re.compile(r"https?://[^\s\"'<>]+")


class ValuesError(InputError):
    """The values file is wrong; one line with file, key and what is allowed."""


@dataclass(frozen=True, slots=True)
class BundleValues:
    """Settings of a site. ``runbook_base_url``: where the runbooks are served; "": alerts name the runbook's file.
    ``dashboard_base_url``: Grafana's URL; "": alerts have no ``dashboard_url``. The project has no public address, and
    a placeholder would be a dead link. ``thresholds``: name -> number, as ``--thresholds``. ``durations``: alert ->
    severity -> ``for`` in seconds. ``exclude``: alerts or families to leave out; ``include``: alerts that are off by
    default. ``labels``: added to every alert; ``alert_labels``: alert -> labels set on it (also severity and page).
    ``exporter_job``: part of the name of the exporter's scrape job.
    """

    runbook_base_url: str = ""
    dashboard_base_url: str = ""
    exporter_job: str = "kvpressure"
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    durations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    alert_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def runbook(self, alert: str) -> str:
        """URL of the alert's runbook, or its path in the bundle where no address is configured."""
        return f"{self.runbook_base_url or RUNBOOK_FOLDER}/{alert}.md"


def load(path: str | Path | None) -> BundleValues:
    """The values file, or the defaults for ``None``. Raises ``ValuesError``."""
    if path is None:
        return BundleValues()
    try:
        root = yaml_nodes.read(path)
    except yaml_nodes.YamlError as error:
        raise ValuesError(str(error)) from error
    return _values(_mapping(root.value, root.where, "the file"), str(path))


def threshold_lines(path: str | Path) -> dict[str, str]:
    """``file:line`` of each threshold of a valid values file, for messages."""
    thresholds = (yaml_nodes.read(path).children or {}).get("thresholds")
    return {name: node.where for name, node in ((thresholds.children if thresholds else None) or {}).items()}


def _values(document: Mapping[str, Any], where: str) -> BundleValues:
    allowed = [item.name for item in fields(BundleValues)]
    for key in document:
        if key not in allowed:
            raise ValuesError(f"{where}: unknown key {shown(key)}; allowed: {', '.join(allowed)}")
    found: dict[str, Any] = {}
    for key in ("runbook_base_url", "dashboard_base_url"):
        if key in document:
            found[key] = _url(document[key], where, key)
    if "exporter_job" in document:
        found["exporter_job"] = _job(document["exporter_job"], where)
    if "thresholds" in document:
        found["thresholds"] = _mapping(document["thresholds"], where, "thresholds")
    if "durations" in document:
        found["durations"] = _durations(_mapping(document["durations"], where, "durations"), where)
    if "exclude" in document:
        found["exclude"] = _names(document["exclude"], where, "exclude")
    if "include" in document:
        found["include"] = _names(document["include"], where, "include")
    if "labels" in document:
        found["labels"] = _labels(document["labels"], where, "labels")
    if "alert_labels" in document:
        patches = _mapping(document["alert_labels"], where, "alert_labels")
        found["alert_labels"] = {
            str(name): _labels(body, where, f"alert_labels.{name}") for name, body in patches.items()
        }
    return BundleValues(**found)


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValuesError(f"{where}: {key}: expected a mapping")
    return value


def _url(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not _URL.fullmatch(value):
        raise ValuesError(f"{where}: {key}: {shown(value)} is not an http or https URL")
    return value.rstrip("/")


def _job(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _JOB.fullmatch(value):
        raise ValuesError(f"{where}: exporter_job: {shown(value)} is not a name of letters, digits, '_', '-' and '/'")
    return value


def _durations(body: Mapping[str, Any], where: str) -> dict[str, dict[str, float]]:
    return {
        str(name): {
            _severity(severity, where, f"durations.{name}"): _seconds(text, where, f"durations.{name}.{severity}")
            for severity, text in _mapping(levels, where, f"durations.{name}").items()
        }
        for name, levels in body.items()
    }


def _severity(value: Any, where: str, key: str) -> str:
    if value not in SEVERITIES:
        raise ValuesError(f"{where}: {key}: {shown(value)} is not one of {', '.join(SEVERITIES)}")
    return str(value)


def _seconds(value: Any, where: str, key: str) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValuesError(f"{where}: {key}: {shown(value)} is not a duration such as 90s, 5m, 1h or 1d")
    return float(int(match[1]) * _SECONDS[match[2]])


def _names(value: Any, where: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValuesError(f"{where}: {key}: expected a list of alert names or families ({', '.join(FAMILIES)})")
    return tuple(value)


def _labels(value: Any, where: str, key: str) -> dict[str, str]:
    labels = _mapping(value, where, key)
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name in ("alertname", "kvpressure_family"):
            raise ValuesError(f"{where}: {key}: {shown(name)} is not a label that may be set")
        if not isinstance(text, str):
            raise ValuesError(f"{where}: {key}.{name}: {shown(text)} must be text (quote it)")
        if name == "severity":
            _severity(text, where, key)
        if name == "page" and text not in ("true", "false"):
            raise ValuesError(f'{where}: {key}: page must be "true" or "false", not {shown(text)}')
    return dict(labels)
