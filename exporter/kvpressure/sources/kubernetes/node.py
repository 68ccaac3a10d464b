"""The source of this node's conditions (``MemoryPressure``, ``DiskPressure``, ``Ready`` ...)."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from kvpressure.model.readings import NodeCondition
from kvpressure.sources.base import Reading, SourceError, SourceSettings
from kvpressure.sources.kubernetes.api import REASONS as REASONS
from kvpressure.sources.kubernetes.api import KubeApi
from kvpressure.sources.kubernetes.pods import api_of

MAX_CONDITIONS: Final = 64
_STATUS: Final = {"True": True, "False": False}


class NodeSource:
    """One GET of this node per read; needs only ``get`` on nodes."""

    name = "node"

    def __init__(self, settings: SourceSettings, api: KubeApi | None = None) -> None:
        self._api = api or api_of(settings)
        self._path = f"/api/v1/nodes/{quote(settings.node_name, safe='')}"

    def read(self) -> Reading:
        """The conditions now; "Unknown" is neither true nor false. Raises ``SourceError``."""
        status = self._api.get(self._path).get("status")
        conditions = status.get("conditions") if isinstance(status, dict) else None
        if not isinstance(conditions, list):
            raise SourceError("api_bad_answer", "no node status")
        found = {
            item["type"]: _STATUS.get(str(item.get("status")))
            for item in conditions[:MAX_CONDITIONS]
            if isinstance(item, dict) and isinstance(item.get("type"), str)
        }
        return Reading(node_conditions=tuple(NodeCondition(name, value) for name, value in found.items()))

    def close(self) -> None:
        """Does nothing; no resource is held."""
