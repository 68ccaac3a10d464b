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
from kvpressure.settings.kinds import JOB, PAGES_URL, SECONDS, Kind, one_of

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
    return _values(_mapping(root.value, root.where, "the file"), str(path))


def _values(document: Mapping[str, Any], where: str) -> BundleValues:
    for key in document:
        if key not in _READERS:
            raise InputError(f"{where}: unknown key {shown(key)}; allowed: {', '.join(_READERS)}")
    return BundleValues(**{key: _READERS[key](value, where, key) for key, value in document.items()})


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key}: expected a mapping")
    return value


def _of(kind: Kind) -> Callable[[Any, str, str], Any]:
    """A reader of the values of a setting's kind."""

    def read(value: Any, where: str, key: str) -> Any:
        try:
            return kind.parse(value)
        except ValueError:
            raise InputError(f"{where}: {key}: {shown(value)} is not allowed; allowed: {kind.allowed}") from None

    return read


_URL: Final = _of(PAGES_URL)
_SEVERITY: Final = _of(one_of(*SEVERITIES))
_SECONDS: Final = _of(SECONDS)


def _durations(value: Any, where: str, key: str) -> dict[str, dict[str, float]]:
    return {
        str(name): {
            _SEVERITY(severity, where, f"{key}.{name}"): _SECONDS(text, where, f"{key}.{name}.{severity}")
            for severity, text in _mapping(levels, where, f"{key}.{name}").items()
        }
        for name, levels in _mapping(value, where, key).items()
    }


def _names(value: Any, where: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}: {key}: expected a list of alert names or families ({', '.join(FAMILIES)})")
    return tuple(value)


def _labels(value: Any, where: str, key: str) -> dict[str, str]:
    labels = _mapping(value, where, key)
    for name, text in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name in ("alertname", "kvpressure_family"):
            raise InputError(f"{where}: {key}: {shown(name)} is not a label that may be set")
        if not isinstance(text, str):
            raise InputError(f"{where}: {key}.{name}: {shown(text)} must be text (quote it)")
        if name == "severity":
            _SEVERITY(text, where, key)
    return dict(labels)


def _alert_labels(value: Any, where: str, key: str) -> dict[str, dict[str, str]]:
    return {str(name): _labels(body, where, f"{key}.{name}") for name, body in _mapping(value, where, key).items()}


_READERS: Final[Mapping[str, Callable[[Any, str, str], Any]]] = {
    "runbook_base_url": _URL,
    "dashboard_base_url": _URL,
    "exporter_job": _of(JOB),
    "engine_labels": _of(one_of("plain", "prefixed")),
    "durations": _durations,
    "exclude": _names,
    "labels": _labels,
    "alert_labels": _alert_labels,
}
"""Key of the file -> what checks its value."""
