"""Links to this site's dashboards and runbooks, and which of them explains a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from kvpressure.diagnosis import findings
from kvpressure.model.readings import EngineKey

DASHBOARDS: Final = {"kvpressure-incident": "Incident", "kvpressure-detail": "Detail"}
VERDICT_RUNBOOKS: Final = {
    "kv_pressure": "InferenceKVCachePressure",
    "concurrency_limited": "InferenceConcurrencyNearLimit",
    "compute_bound": "InferenceSlow",
    "host_bound": "InferenceHostBound",
    "transfer_bound": "InferenceKVTransferFailing",
    "stalled": "InferenceStalled",
    "unknown": "InferenceCapacityLost",
}


RUNBOOK_FOLDER: Final = "docs/runbooks"  # of the bundle, with a page NAME.md for each alert


@dataclass(frozen=True, slots=True)
class Link:
    """A title and its URL; "" when the site's address is not configured."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Links:
    """Base URLs without a trailing slash; "" = not configured, names are then shown without links."""

    runbooks: str = ""
    dashboards: str = ""

    def runbook(self, alert: str) -> Link:
        """The runbook of an alert."""
        return Link(alert, f"{self.runbooks}/{alert}.md" if self.runbooks else "")

    def dashboard(self, uid: str, key: EngineKey | None = None) -> Link:
        """A dashboard, filtered to one engine's pod when ``key`` is given."""
        narrowed = (
            {} if key is None else {"var-namespace": key.namespace, "var-model": key.model_name, "var-pod": key.pod}
        )
        chosen = urlencode({name: value for name, value in narrowed.items() if value})
        url = f"{self.dashboards}/d/{uid}{'?' if chosen else ''}{chosen}" if self.dashboards else ""
        return Link(DASHBOARDS[uid], url)

    def runbooks_for(self, verdict: str, conditions: list[str]) -> list[Link]:
        """The runbooks of a verdict and of the conditions that hold, each once."""
        names = [VERDICT_RUNBOOKS.get(verdict), *(findings.of(name).runbook for name in conditions)]
        return [self.runbook(name) for name in dict.fromkeys(names) if name]
