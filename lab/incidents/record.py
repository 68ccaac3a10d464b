"""The ticks of one recording: metrics, GPUs, container and log lines at every fifth second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from lab.incidents.curves import TICK, Noise, curve
from lab.incidents.metrics import Engine, exposition

_EPOCH: Final = 1_700_000_000
_GIB: Final = 1024**3


class Recording:
    """One incident as a recording, from its spec; a tick is a JSON object of the recording format."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._pod = f"vllm-{name.lower()}"
        self._frozen_text: str | None = None
        self._down = [(float(a), float(b)) for a, b in spec.get("down", ())]
        self._was_down = False
        series = spec.get("engines") or ([spec["engine"]] if "engine" in spec else [])
        self._engines = [Engine(name, number, spec, quoted) for number, quoted in enumerate(series)]
        self._gpu = _Gpus(name, spec) if "gpu" in spec else None
        self._container = _Container(name, spec) if "container" in spec else None

    def ticks(self) -> Iterator[dict[str, Any]]:
        """Every tick, oldest first."""
        for t in range(0, int(self._spec.get("seconds", 895)) + 1, TICK):
            tick: dict[str, Any] = {
                "t": float(_EPOCH + t),
                "gpus": self._gpu.at(t) if self._gpu else [],
                "engines": [self._engine(t)],
            }
            if self._container:
                tick["containers"] = [{**self._owner(), **self._container.at(t)}]
            lines = [line for second, line in self._spec.get("logs", ()) if t <= second < t + TICK]
            if lines:
                tick["logs"] = [{**self._owner(), "line": line} for line in lines]
            yield tick

    def _owner(self) -> dict[str, str]:
        return {"namespace": "inference", "pod": self._pod, "container": "vllm"}

    def _engine(self, t: float) -> dict[str, Any]:
        text = self._text(t)
        return {
            "target": "http://10.0.0.5:8000/metrics",
            **self._owner(),
            "gpus": self._gpu.uuids if self._gpu else [],
            "args": [str(arg) for arg in self._spec.get("args", ())],
            "exposition": text,
            "error": None if text is not None else "connection refused",
            "duration_seconds": 0.004,
        }

    def _text(self, t: float) -> str | None:
        if not self._engines or any(a <= t < b for a, b in self._down):
            self._was_down = True
            return None
        if self._was_down:
            for engine in self._engines:
                engine.restart()
            self._was_down = False
        if self._frozen_text is None:
            text = exposition(self._engines, t)
            if t >= float(self._spec.get("frozen", "inf")):
                self._frozen_text = text
            return text
        return self._frozen_text


class _Gpus:
    """The GPUs of the server: all alike, null where nothing is quoted."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self._gpu = spec["gpu"]
        self.uuids = [
            f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(1, int(self._gpu.get("count", 1)) + 1)
        ]
        shape = (float(spec.get("start", 300)), float(spec.get("every", 10)), False)
        before = self._gpu.get("before", {})
        self._curves = {
            key: curve(self._gpu[key], before.get(key), *shape)
            for key in ("used_gib", "utilization", "sm_activity", "power_watts")
            if key in self._gpu
        }
        self._noise = Noise(name, "gpu")

    def at(self, t: float) -> list[dict[str, Any]]:
        dark = t >= float(self._gpu.get("dark", "inf"))
        return [self._one(t, index, uuid, dark) for index, uuid in enumerate(self.uuids)]

    def _one(self, t: float, index: int, uuid: str, dark: bool) -> dict[str, Any]:
        total = self._gpu.get("total_gib")
        used = self._curves["used_gib"](t) * _GIB if "used_gib" in self._curves else None
        found = {
            "uuid": uuid,
            "index": index,
            "vendor": self._gpu.get("vendor", "nvidia"),
            "name": self._gpu.get("name", "not stated"),
            "memory_total_bytes": None if total is None else round(total * _GIB),
            "memory_used_bytes": None if used is None else round(used),
            "memory_reserved_bytes": None,  # of recordings before it went
            "utilization_ratio": None if dark else self._ratio("utilization", t),
            "sm_activity_ratio": None if dark else self._ratio("sm_activity", t),
            "tensor_activity_ratio": None,
            "dram_activity_ratio": None,
            "power_watts": None if dark else self._level("power_watts", t),
            "power_limit_watts": None,
            "processes": [],
            "error": None,
        }
        xids = {
            str(xid): sum(t >= moment for moment in moments)
            for xid, moments in self._gpu.get("xid", {}).items()
            if t >= moments[0]
        }
        if "xid" in self._gpu:
            found["xid_errors"] = xids
        return found

    def _ratio(self, key: str, t: float) -> float | None:
        value = self._level(key, t)
        return None if value is None else round(min(1.0, value), 4)

    def _level(self, key: str, t: float) -> float | None:
        if key not in self._curves:
            return None
        value = self._curves[key](t)
        return round(value if value in (0, 1) else self._noise.scale(value), 4)


class _Container:
    """The container of the server, as far as quoted."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self._container = spec["container"]
        shape = (float(spec.get("start", 300)), float(spec.get("every", 10)), False)
        before = self._container.get("before", {})
        self._curves = {
            key: curve(self._container[key], before.get(key), *shape)
            for key in ("cpu_cores", "throttled", "memory_gib")
            if key in self._container
        }
        self._noise = Noise(name, "container")
        self._cpu = self._throttled = 0.0

    def at(self, t: float) -> dict[str, Any]:
        quoted = self._container
        found: dict[str, Any] = {}
        if "terminations" in quoted:
            past = [(second, reason, code) for second, reason, code in quoted["terminations"] if second <= t]
            found |= {"restarts": len(past), "last_termination": _termination(*past[-1]) if past else None}
        if "ready" in quoted:
            found["ready"] = (
                not any(a <= t < b for a, b in quoted["ready"]["not"])
                if isinstance(quoted["ready"], Mapping)
                else quoted["ready"]
            )
        if "cpu_cores" in self._curves:
            self._cpu += self._noise.scale(self._curves["cpu_cores"](t)) * TICK
            found["cpu_usage_seconds"] = round(self._cpu, 2)
        if "cpu_limit" in quoted:
            found["cpu_limit_cores"] = float(quoted["cpu_limit"])
        if "throttled" in self._curves:
            self._throttled += self._curves["throttled"](t) * TICK * 10
            found |= {"cpu_periods": int(t + TICK) * 10, "cpu_throttled_periods": round(self._throttled)}
        if "memory_gib" in self._curves:
            found["memory_working_set_bytes"] = round(self._curves["memory_gib"](t) * _GIB)
        if "memory_limit_gib" in quoted:
            found["memory_limit_bytes"] = round(quoted["memory_limit_gib"] * _GIB)
        return found


def _termination(second: float, reason: str, code: int | None) -> dict[str, Any]:
    ended = datetime.fromtimestamp(_EPOCH + second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"reason": reason, "exit_code": code, "finished_at": ended}
