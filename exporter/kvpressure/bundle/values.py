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
from kvpressure.settings.kinds import JOB, PAGES_URL, SECONDS, one_of

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class BundleValues:
    """Settings of a site. ``runbook_base_url``: where the runbooks are served; ``dashboard_base_url``: Grafana's URL;
    "": alerts have no such link, because the project has no public address.
    ``durations``: alert -> severity -> ``for`` in seconds. ``exclude``: alerts or families to leave
    out. ``labels``: added to every alert; ``alert_labels``: alert -> labels set on it (also severity).
    ``exporter_job``: part of the name of the exporter's scrape job. ``engine_labels``: plain or prefixed, as the
    exporter's ``--web.engine-labels``.
    """

    runbook_base_url: str = ""
    dashboard_base_url: str = ""
    exporter_job: str = "kvpressure"
    engine_labels: str = "plain"
    durations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    alert_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def runbook(self, alert: str) -> str:
        """URL of the alert's runbook; "" where no address is configured."""
        return f"{self.runbook_base_url}/{alert}.md" if self.runbook_base_url else ""


def load(path: str | Path | None) -> BundleValues:
    """The values file, or the defaults for ``None``. Raises ``InputError``."""
    if path is None:
        return BundleValues()
    root = yaml_nodes.read(path)
    document = _mapping(root.value, f"{root.where}: the file")
    for key in document:
        if key not in _READERS:
            raise InputError(f"{path}: unknown key {shown(key)}; allowed: {', '.join(_READERS)}")
    return BundleValues(**{key: _READERS[key](value, f"{path}: {key}") for key, value in document.items()})


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected a mapping")
    return value


_SEVERITY: Final = one_of(*SEVERITIES)


def _durations(value: Any, where: str) -> dict[str, dict[str, float]]:
    return {
        str(name): {
            _SEVERITY.checked(severity, f"{where}.{name}"): SECONDS.checked(text, f"{where}.{name}.{severity}")
            for severity, text in _mapping(levels, f"{where}.{name}").items()
        }
        for name, levels in _mapping(value, where).items()
    }


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}: expected a list of alert names or families ({', '.join(FAMILIES)})")
    return tuple(value)


def _labels(value: Any, where: str) -> dict[str, str]:
    labels = _mapping(value, where)
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name in ("alertname", "kvpressure_family"):
            raise InputError(f"{where}: {shown(name)} is not a label that may be set")
        if not isinstance(text, str):
            raise InputError(f"{where}.{name}: {shown(text)} must be text (quote it)")
        if name == "severity":
            _SEVERITY.checked(text, where)
    return dict(labels)


def _alert_labels(value: Any, where: str) -> dict[str, dict[str, str]]:
    return {str(name): _labels(body, f"{where}.{name}") for name, body in _mapping(value, where).items()}


_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "runbook_base_url": PAGES_URL.checked,
    "dashboard_base_url": PAGES_URL.checked,
    "exporter_job": JOB.checked,
    "engine_labels": one_of("plain", "prefixed").checked,
    "durations": _durations,
    "exclude": _names,
    "labels": _labels,
    "alert_labels": _alert_labels,
}
"""Key of the file -> what checks its value."""
