"""A site's changes to the bundle, in one file: ``kvpressure bundle --values FILE``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvpressure.bundle.spec import FAMILIES, SEVERITIES
from kvpressure.errors import InputError, shown
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
    """Settings of a site. ``runbook_base_url``: where the runbooks are served; ``dashboard_base_url``: Grafana's URL;
    "": alerts have no such link, because the project has no public address. ``thresholds``: name -> number, as
    ``--thresholds``. ``durations``: alert -> severity -> ``for`` in seconds. ``exclude``: alerts or families to leave
    out. ``labels``: added to every alert; ``alert_labels``: alert -> labels set on it (also severity).
    ``exporter_job``: part of the name of the exporter's scrape job. ``engine_labels``: plain or prefixed, as the
    exporter's ``--web.engine-labels``.
    """

    runbook_base_url: str = ""
    dashboard_base_url: str = ""
    exporter_job: str = "kvpressure"
    engine_labels: str = "plain"
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    durations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    alert_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def runbook(self, alert: str) -> str:
        """URL of the alert's runbook; "" where no address is configured."""
        return f"{self.runbook_base_url}/{alert}.md" if self.runbook_base_url else ""


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
    for key in document:
        if key not in _READERS:
            raise ValuesError(f"{where}: unknown key {shown(key)}; allowed: {', '.join(_READERS)}")
    return BundleValues(**{key: _READERS[key](value, where, key) for key, value in document.items()})


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValuesError(f"{where}: {key}: expected a mapping")
    return value


def _url(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not _URL.fullmatch(value):
        raise ValuesError(f"{where}: {key}: {shown(value)} is not an http or https URL")
    return value.rstrip("/")


def _job(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not _JOB.fullmatch(value):
        raise ValuesError(f"{where}: {key}: {shown(value)} is not a name of letters, digits, '_', '-' and '/'")
    return value


def _engine_labels(value: Any, where: str, key: str) -> str:
    if value not in ("plain", "prefixed"):
        raise ValuesError(f"{where}: {key}: {shown(value)} is not plain or prefixed")
    return str(value)


def _durations(value: Any, where: str, key: str) -> dict[str, dict[str, float]]:
    return {
        str(name): {
            _severity(severity, where, f"{key}.{name}"): _seconds(text, where, f"{key}.{name}.{severity}")
            for severity, text in _mapping(levels, where, f"{key}.{name}").items()
        }
        for name, levels in _mapping(value, where, key).items()
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
    return dict(labels)


def _alert_labels(value: Any, where: str, key: str) -> dict[str, dict[str, str]]:
    return {str(name): _labels(body, where, f"{key}.{name}") for name, body in _mapping(value, where, key).items()}


_READERS: Final[Mapping[str, Callable[[Any, str, str], Any]]] = {
    "runbook_base_url": _url,
    "dashboard_base_url": _url,
    "exporter_job": _job,
    "engine_labels": _engine_labels,
    "thresholds": _mapping,
    "durations": _durations,
    "exclude": _names,
    "labels": _labels,
    "alert_labels": _alert_labels,
}
"""Key of the file -> what checks its value."""
