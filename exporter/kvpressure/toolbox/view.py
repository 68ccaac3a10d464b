"""One engine of a diagnosis document, read with care: the document may come from an exporter of another version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from kvpressure.state import VERDICTS

FINE: Final = ("healthy", "idle")
"""Verdicts with nothing to do."""


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit as published: in force, set by somebody, where it was read, what to set."""

    value: float | None = None
    explicit: bool | None = None
    source: str | None = None
    recommended: float | None = None


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: ``data`` is its entry under ``engines``, ``document`` the whole answer."""

    data: Mapping[str, Any]
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Namespace, pod and model as far as they are known."""
        pod = "/".join(part for part in (self.text("namespace"), self.text("pod")) if part)
        rank = self.text("engine")
        return (
            " ".join(part for part in (pod, self.text("model_name"), f"engine {rank}" if rank else "") if part)
            or "engine"
        )

    @property
    def identity(self) -> dict[str, str]:
        """The labels of its series."""
        return {key: self.text(key) for key in ("namespace", "pod", "model_name", "engine")}

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``; anything else counts as unknown."""
        verdict = self.text("verdict")
        return verdict if verdict in VERDICTS else "unknown"

    @property
    def confidence(self) -> float:
        """0-1."""
        return number(self.data.get("confidence")) or 0.0

    @property
    def stage(self) -> str | None:
        """Stage of KV pressure, if there is one."""
        return self.text("stage") or None

    @property
    def version(self) -> str | None:
        """Version of vLLM."""
        return self.text("version") or None

    @property
    def address(self) -> str:
        """Of its server; empty when it was not read over HTTP."""
        target = self.text("target").removesuffix("/metrics")
        return target if target.startswith("http") else ""

    def gpu_bytes(self) -> list[float]:
        """Memory of each of its GPUs."""
        return [size for gpu in self.gpus() if (size := number(gpu.get("memory_total_bytes"))) is not None]

    def text(self, key: str) -> str:
        """A text of the entry; empty when missing."""
        value = self.data.get(key)
        return value if isinstance(value, str) else ""

    def sentences(self, key: str) -> tuple[str, ...]:
        """``supporting``, ``opposing`` or ``missing``."""
        return tuple(item for item in items(self.data.get(key)) if isinstance(item, str))

    def signal(self, name: str) -> float | None:
        """A signal by its flat name, e.g. ``kv_used_ratio`` or ``prompt_quantiles:0.95``."""
        return number(mapping(self.data.get("signals")).get(name))

    def shape(self, name: str) -> float | None:
        """A signal of request shape; where no request finished in the window, its value since the server started."""
        value = self.signal(name)
        return value if value is not None else number(mapping(self.data.get("since_start")).get(name))

    def evidence(self, name: str) -> bool | None:
        """Named evidence."""
        return flag(mapping(mapping(self.data.get("evidence")).get(name)).get("value"))

    def evidence_text(self, name: str) -> str:
        """What is said about named evidence, with the numbers; empty if it is not there."""
        text = mapping(mapping(self.data.get("evidence")).get(name)).get("text")
        return text if isinstance(text, str) else ""

    def condition(self, name: str) -> bool | None:
        """A condition that stands beside the verdict."""
        return flag(mapping(self.data.get("conditions")).get(name))

    def signature(self) -> tuple[bool | None, Mapping[str, bool | None], str]:
        """The documented signature: met, its conditions, and why it differs from the verdict."""
        found = mapping(self.data.get("documented_signature"))
        conditions = {name: flag(value) for name, value in mapping(found.get("conditions")).items()}
        note = found.get("note")
        return flag(found.get("met")), conditions, note if isinstance(note, str) else ""

    def limit(self, name: str) -> LimitView:
        """A limit; all None when it is not known."""
        found = mapping(mapping(self.data.get("limits")).get(name))
        source = found.get("source")
        return LimitView(
            number(found.get("value")),
            flag(found.get("explicit")),
            source if isinstance(source, str) else None,
            number(found.get("recommended")),
        )

    def containers(self) -> list[Mapping[str, Any]]:
        """The pod's containers in the document; the engine's own where it is named."""
        own = [
            found
            for item in items(self.document.get("containers"))
            if (found := mapping(item)).get("namespace") == self.data.get("namespace")
            and found.get("pod") == self.data.get("pod")
        ]
        named = [item for item in own if item.get("container") == self.data.get("container")]
        return named or own

    def gpus(self) -> list[Mapping[str, Any]]:
        """The GPUs of this engine in the document."""
        wanted = items(self.data.get("gpus"))
        return [found for item in items(self.document.get("gpus")) if (found := mapping(item)).get("uuid") in wanted]


def engines(document: Mapping[str, Any]) -> list[EngineView]:
    """All engines of a document."""
    return [EngineView(mapping(item), document) for item in items(document.get("engines")) if isinstance(item, Mapping)]


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def number(value: object) -> float | None:
    """A finite number, else None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else None


def flag(value: object) -> bool | None:
    """True, False, else None."""
    return value if isinstance(value, bool) else None
