"""The source of this node's conditions (``MemoryPressure``, ``DiskPressure``, ``Ready`` ...)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvpressure.model.readings import NodeCondition
from kvpressure.parsed import mapping, mappings, text
from kvpressure.sources.base import Reading, SourceError, SourceSettings
from kvpressure.sources.kubernetes.api import BACKOFF_SECONDS, KubeApi, Watcher
from kvpressure.sources.kubernetes.api import REASONS as REASONS
from kvpressure.sources.kubernetes.pods import api_of

MAX_CONDITIONS: Final = 64
_STATUS: Final = {"True": True, "False": False}


class NodeSource:
    """One list and watch of this node."""

    name = "node"

    def __init__(
        self,
        settings: SourceSettings,
        api: KubeApi | None = None,
        backoff_seconds: tuple[float, float] = BACKOFF_SECONDS,
    ) -> None:
        self._conditions: tuple[NodeCondition, ...] = ()
        self._watcher = Watcher(
            api or api_of(settings),
            "/api/v1/nodes",
            {"fieldSelector": f"metadata.name={settings.node_name}"},
            self._replace,
            self._change,
            backoff_seconds,
        )

    def read(self) -> Reading:
        """The conditions now; "Unknown" is neither true nor false. Raises ``SourceError``."""
        self._watcher.wait()
        errors, reason = self._watcher.new_errors(), self._watcher.error
        if reason is not None:
            raise SourceError(reason, "the view of this node is out of date", errors)
        if not self._conditions:
            raise SourceError("api_not_found", "no such node, or one without conditions")
        return Reading(node_conditions=self._conditions, errors=errors)

    def close(self) -> None:
        """End the watch."""
        self._watcher.close()

    def _replace(self, items: Iterator[dict[str, Any]]) -> None:
        self._conditions = next(iter([_conditions(item) for item in items]), ())

    def _change(self, kind: str, item: dict[str, Any]) -> None:
        self._conditions = () if kind == "DELETED" else _conditions(item)


def _conditions(node: Mapping[str, Any]) -> tuple[NodeCondition, ...]:
    found = {
        text(item.get("type")): _STATUS.get(str(item.get("status")))
        for item in mappings(mapping(node.get("status")).get("conditions"))[:MAX_CONDITIONS]
    }
    return tuple(NodeCondition(name, value) for name, value in found.items() if name)
