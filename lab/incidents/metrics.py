"""What the metrics endpoint of a vLLM server returns under the names of its version: only what is quoted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from lab.demo.counters import FIRST_TOKEN, INTER_TOKEN
from lab.incidents.curves import TICK, Noise, curve, lognormal, share_below

_WARM_SECONDS: Final = 3600  # a server with traffic from the start has counted for an hour


class Names:
    """Which names a version has. ``v0-`` before the version means the first engine."""

    def __init__(self, version: str) -> None:
        self.v0 = version.startswith("v0-")
        self._version = tuple(int(part) for part in version.removeprefix("v0-").split("."))

    def since(self, *version: int) -> bool:
        """Whether the version is this one or a later one."""
        return self._version >= version

    @property
    def usage(self) -> tuple[str, ...]:
        """Names of the cache usage."""
        if self.v0 or not self.since(0, 9, 2):
            return ("gpu_cache_usage_perc",)
        return ("kv_cache_usage_perc",) if self.since(0, 11) else ("gpu_cache_usage_perc", "kv_cache_usage_perc")

    @property
    def token_time(self) -> tuple[str, ...]:
        """Names of the time per output token."""
        if self.v0 or not self.since(0, 10, 2):
            return ("time_per_output_token_seconds",)
        new = "inter_token_latency_seconds"
        return (new,) if self.since(0, 12) else ("time_per_output_token_seconds", new)

    @property
    def throughput_gauges(self) -> bool:
        """Whether the throughput gauges of the first engine are there."""
        return self.v0 and not self.since(0, 7, 3)


class Engine:
    """One engine's series: advanced tick by tick, written as exposition text."""

    def __init__(self, recording: str, number: int, spec: Mapping[str, Any], quoted: Mapping[str, Any]) -> None:
        self._names = Names(str(spec["names"]))
        self._quoted = quoted
        self._exact = set(spec.get("exact", ()))
        self._labels = "" if self._names.v0 else f'engine="{number}",'
        self._model = f'model_name="{spec.get("model", "model")}"'
        before = spec.get("before", {})
        shape = (float(spec.get("start", 300)), float(spec.get("every", 10)), bool(spec.get("repeat", False)))
        self._curves = {
            name: curve(_mean(value), _first(before.get(name)), *shape)
            for name, value in quoted.items()
            if name not in ("cache", "counters")
        }
        self._extra = {name: curve(value, 0.0, *shape) for name, value in quoted.get("counters", {}).items()}
        self._noise = {name: Noise(recording, f"{number}/{name}") for name in (*self._curves, *self._extra)}
        self._totals: dict[str, float] = {}
        self._warm = True

    def restart(self) -> None:
        """Counters begin again at 0."""
        self._totals.clear()
        self._warm = False

    def families(self, t: float) -> list[tuple[str, str, list[str]]]:
        """Name, type and samples of every metric at second ``t``; advances the counters by one tick."""
        self._advance(t)
        return [*self._gauges(t), *self._counters(), *self._histograms()]

    def _advance(self, t: float) -> None:
        rates: dict[str, float] = {
            name: self._rate(name, t)
            for name in ("prompt", "gen", "preempt", "success", "requests", "queued", "process_cpu", "steps")
            if name in self._curves
        }
        rates |= {name: self._noise[name].scale(at(t)) for name, at in self._extra.items()}
        if "hit" in self._curves and "prompt" in rates and not self._names.v0:
            rates |= {
                "prefix_queries": rates["prompt"],
                "prefix_hits": rates["prompt"] * self._curves["hit"](t) / 100,
            }
        for name, of in (("ttft", "requests"), ("queue", "queued")):
            if name in self._curves:
                rates[f"{name}_sum"] = rates[of] * self._value(name, t)
        if "itl" in self._curves and "gen" in rates:
            rates["itl_sum"] = rates["gen"] * self._value("itl", t)
        for name, rate in rates.items():
            if name not in self._totals:
                self._totals[name] = rate * _WARM_SECONDS if self._warm and name != "preempt" else 0.0
            self._totals[name] += rate * TICK

    def _rate(self, name: str, t: float) -> float:
        value = self._curves[name](t)
        return value if name in self._exact else self._noise[name].scale(value)

    def _value(self, name: str, t: float) -> float:
        return self._noise[name].scale(self._curves[name](t))

    def _requests(self, name: str, t: float) -> int:
        value = self._curves[name](t)
        return round(value) if name in self._exact else self._noise[name].count(value)

    def _gauges(self, t: float) -> list[tuple[str, str, list[str]]]:
        found: list[tuple[str, str, list[str]]] = []
        if "cache" in self._quoted:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(self._quoted["cache"].items()))
            found.append(("cache_config_info", "gauge", [f"{{{self._labels}{labels}}} 1.0"]))
        for name, gauge in (
            ("running", "num_requests_running"),
            ("swapped", "num_requests_swapped"),
            ("waiting", "num_requests_waiting"),
        ):
            if name in self._curves:
                found.append((gauge, "gauge", [self._sample(self._requests(name, t))]))
        reasons = [
            self._sample(self._requests(reason, t), f',reason="{reason}"')
            for reason in ("capacity", "deferred")
            if reason in self._curves
        ]
        if reasons:
            found.append(("num_requests_waiting_by_reason", "gauge", reasons))
        if "kv" in self._curves:
            ratio = self._curves["kv"](t) / 100
            ratio = ratio if "kv" in self._exact else self._noise["kv"].usage(ratio)
            found += [(name, "gauge", [self._sample(ratio)]) for name in self._names.usage]
        if "hit" in self._curves and self._names.v0:
            found.append(("gpu_prefix_cache_hit_rate", "gauge", [self._sample(self._curves["hit"](t) / 100)]))
        if self._names.throughput_gauges:
            found += [
                (f"avg_{word}_throughput_toks_per_s", "gauge", [self._sample(self._value(name, t))])
                for name, word in (("prompt", "prompt"), ("gen", "generation"))
                if name in self._curves
            ]
        return found

    def _counters(self) -> list[tuple[str, str, list[str]]]:
        names = {
            "preempt": "num_preemptions",
            "prompt": "prompt_tokens",
            "gen": "generation_tokens",
            "prefix_queries": "prefix_cache_queries",
            "prefix_hits": "prefix_cache_hits",
            **{name: name for name in self._extra},
        }
        found = [
            (f"{counter}_total", "counter", [self._sample(math.floor(self._totals[name]))])
            for name, counter in names.items()
            if name in self._totals
        ]
        if "success" in self._totals:
            found.append(
                (
                    "request_success_total",
                    "counter",
                    [self._sample(math.floor(self._totals["success"]), ',finished_reason="stop"')],
                )
            )
        return found

    def _histograms(self) -> list[tuple[str, str, list[str]]]:
        found = []
        if "steps" in self._totals:
            found.append(
                (
                    "iteration_tokens_total",
                    "histogram",
                    ["_count" + self._sample(math.floor(self._totals["steps"]))],
                )
            )
        if "ttft" in self._curves:
            found.append(
                (
                    "time_to_first_token_seconds",
                    "histogram",
                    self._histogram("ttft", "requests", FIRST_TOKEN),
                )
            )
        if "itl" in self._curves:
            samples = self._histogram("itl", "gen", INTER_TOKEN)
            found += [(name, "histogram", samples) for name in self._names.token_time]
        if "queue" in self._curves:
            found.append(("request_queue_time_seconds", "histogram", self._histogram("queue", "queued", ())))
        return found

    def _histogram(self, name: str, of: str, bounds: tuple[float, ...]) -> list[str]:
        count = math.floor(self._totals[of])
        samples = []
        if isinstance(self._quoted[name], Mapping) and "p50" in self._quoted[name]:
            shape = lognormal(self._quoted[name])
            samples = [
                "_bucket" + self._sample(math.floor(count * share_below(bound, *shape)), f',le="{float(bound)}"')
                for bound in bounds
            ]
            samples.append("_bucket" + self._sample(count, ',le="+Inf"'))
        return [*samples, "_sum" + self._sample(self._totals[f"{name}_sum"]), "_count" + self._sample(count)]

    def _sample(self, value: float, more: str = "") -> str:
        number = f"{value:.1f}" if float(value).is_integer() else repr(round(value, 6))
        return f"{{{self._labels}{self._model}{more}}} {number}"

    def process(self) -> str | None:
        """CPU seconds of the API server process, if quoted."""
        total = self._totals.get("process_cpu")
        return (
            None
            if total is None
            else f"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total {total:.2f}\n"
        )


def _first(value: Any) -> float | None:
    return None if value is None else float(value)


def _mean(value: Any) -> Any:
    """A latency quoted by percentiles as its mean; everything else as it is."""
    if isinstance(value, Mapping) and "p50" in value:
        location, spread = lognormal(value)
        return math.exp(location + spread**2 / 2)
    return value


def exposition(engines: list[Engine], t: float) -> str:
    """The exposition text of all engines of a server at second ``t``."""
    merged: dict[str, tuple[str, list[str]]] = {}
    for engine in engines:
        for name, kind, samples in engine.families(t):
            merged.setdefault(name, (kind, []))[1].extend(samples)
    lines = []
    for name, (kind, samples) in merged.items():
        lines.append(f"# TYPE vllm:{name} {kind}\n")
        lines += [f"vllm:{name}{sample}\n" for sample in samples]
    return "".join(lines) + (engines[0].process() or "")
