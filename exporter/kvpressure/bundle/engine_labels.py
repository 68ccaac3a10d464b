"""The bundle for scrapers that own the labels ``namespace`` and ``pod``: the engine's are ``engine_namespace`` and
``engine_pod``, as the exporter publishes them with ``--web.engine-labels=prefixed``.

Series that are not about engines keep the scraper's labels, and are given the engine's names where rules join them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvpressure.publish.metrics import PREFIXED

_NAMES: Final = "|".join(PREFIXED)
_TOKEN: Final = re.compile(
    rf'"(?P<text>(?:[^"\\]|\\.)*)"'
    rf"|(?P<foreign>(?<![:\w])(?:kube_(?!node)\w+|kvpressure_build_info)(?![:\w])(?:\{{[^}}]*\}})?(?!\s*(?:\[|offset)))"
    rf"|\b(?P<label>{_NAMES})\b(?!:)"
)
_ACTION: Final = re.compile(r"\{\{.*?\}\}")
_LABEL: Final = re.compile(rf"(?<![-\w$])({_NAMES})(?![-\w])")
_FIELD: Final = re.compile(rf"(?<=labels\.)({_NAMES})\b")


def expression(text: str) -> str:
    """A PromQL expression with the engine's names."""
    return _TOKEN.sub(_renamed, text)


def _renamed(match: re.Match[str]) -> str:
    if match["label"]:
        return PREFIXED[match["label"]]
    if match["text"] is not None:
        return f'"{PREFIXED.get(match["text"], match["text"])}"'
    found = match["foreign"]
    for theirs, engines in PREFIXED.items():
        found = f'label_replace({found}, "{engines}", "$1", "{theirs}", "(.+)")'
    return found


def template(text: str) -> str:
    """A text of an alert, or a legend, with the engine's names in what it prints and asks for."""
    return _ACTION.sub(lambda action: _LABEL.sub(lambda label: PREFIXED[label[1]], action[0]), text)


def routes(document: Any) -> Any:
    """Routes and inhibitions of Alertmanager with the engine's names."""
    if isinstance(document, Mapping):
        return {key: routes(value) for key, value in document.items()}
    if isinstance(document, list):
        return [routes(value) for value in document]
    return (
        re.sub(rf"^({_NAMES})\b", lambda label: PREFIXED[label[1]], document) if isinstance(document, str) else document
    )


def dashboard(model: Any, key: str = "") -> Any:
    """A dashboard with the engine's names in queries, legends, columns and links."""
    if isinstance(model, Mapping):
        columns = key.endswith("ByName")
        return {PREFIXED.get(name, name) if columns else name: dashboard(value, name) for name, value in model.items()}
    if isinstance(model, list):
        return [dashboard(value, key) for value in model]
    if not isinstance(model, str):
        return model
    if key in ("expr", "query", "definition"):
        return expression(model)
    return template(_FIELD.sub(lambda label: PREFIXED[label[1]], model))
