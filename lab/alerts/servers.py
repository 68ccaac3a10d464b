"""The metrics endpoint of a vLLM server whose traffic a situation describes in steady blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from lab.demo.counters import FIRST_TOKEN, INTER_TOKEN, ITERATION, REQUEST_LATENCY, BucketCounts, token_bounds
from lab.demo.number_format import number
from lab.incidents.metrics import Names

Traffic = Mapping[str, Any]
"""Rates per second, gauges, and observed values; a value is a number or a range."""

_GOLDEN: Final = 0.618034  # multiples of it fill a range evenly, however many there are
_POINTS: Final = 8  # distinct values that a histogram takes in one step
_BLOCK_TOKENS: Final = 16
_REASONS: Final = ("stop", "length", "abort", "error")
_TOKENS: Final = token_bounds(131_072)
_HISTOGRAMS: Final = {
    "ttft": ("time_to_first_token_seconds", FIRST_TOKEN),
    "inter_token": ("", INTER_TOKEN),  # its name depends on the version
    "queue": ("request_queue_time_seconds", REQUEST_LATENCY),
    "e2e": ("e2e_request_latency_seconds", REQUEST_LATENCY),
    "prompt_tokens": ("request_prompt_tokens", _TOKENS),
    "output_tokens": ("request_generation_tokens", _TOKENS),
    "step": ("iteration_tokens_total", ITERATION),
}
_bound: Final = lru_cache(maxsize=256)(number)


def middle(value: Any) -> float:
    """The mean of a number or a range; 0 for ``None``."""
    return sum(value) / len(value) if isinstance(value, list) else float(value or 0)


class Server:
    """A vLLM process: its counters since its start, and the text of its metrics endpoint."""

    def __init__(self, version: str, model: str, started: float) -> None:
        self._names = Names(version)
        self._labels = f'engine="0",model_name="{model}"'
        self._started = started
        self._kv_blocks = 0
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._histograms = {name: BucketCounts(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._due: defaultdict[str, float] = defaultdict(float)  # parts of an observation that are left over
        self._draws = 0
        self._text, self._frozen = "", False

    def advance(self, traffic: Traffic, seconds: float) -> None:
        """Serve this traffic for a while."""
        if traffic.get("frozen"):
            self._text = self._text if self._frozen else ""  # the gauges as they stand still
            self._frozen = True
            return
        self._text, self._frozen = "", False
        finished = {reason: traffic.get("finished", {}).get(reason, 0.0) for reason in _REASONS}
        answered = finished["stop"] + finished["length"]
        tokens = middle(traffic.get("tokens", answered * middle(traffic.get("output_tokens"))))
        begun = answered + finished["abort"] if tokens or answered else 0.0
        prompt = begun * middle(traffic.get("prompt_tokens"))
        rates = {
            ("prompt_tokens", ""): prompt,
            ("generation_tokens", ""): tokens,
            ("num_preemptions", ""): middle(traffic.get("preemptions")),
            **{("request_success", f',finished_reason="{reason}"'): rate for reason, rate in finished.items()},
            **{("http", f"{str(status)[0]}xx"): rate for status, rate in traffic.get("http", {}).items()},
        }
        if "prefix_hit" in traffic:
            hits = prompt * middle(traffic["prefix_hit"])
            rates |= {("prefix_cache_queries", ""): prompt, ("prefix_cache_hits", ""): hits}
        for key, rate in rates.items():
            self._counts[key] += rate * seconds
        self._observe("ttft", traffic.get("ttft"), begun * seconds)
        self._observe("inter_token", traffic.get("inter_token"), tokens * seconds)
        for name in ("queue", "e2e", "prompt_tokens", "output_tokens"):
            self._observe(name, traffic.get(name), answered * seconds)
        if tokens and (step := middle(traffic.get("inter_token"))):
            self._observe("step", (tokens + prompt) * step, seconds / step)
        self._kv_blocks = self._kv_blocks or _kv_blocks(traffic)

    def text(self, traffic: Traffic) -> str:
        """The metrics now."""
        if not self._text:
            self._text = "\n".join((*self._gauges(traffic), *self._counters(), *self._distributions())) + "\n"
        return self._text

    def _draw(self, value: Any) -> float:
        """A number, or the next value of its range."""
        if not isinstance(value, list):
            return float(value or 0)
        self._draws += 1
        return float(value[0] + (value[-1] - value[0]) * (self._draws * _GOLDEN % 1))

    def _observe(self, name: str, value: Any, times: float) -> None:
        if value is None:
            return
        self._due[name] += times
        whole = int(self._due[name])
        self._due[name] -= whole
        for point in range(min(whole, _POINTS)):
            self._histograms[name].observe(self._draw(value), whole // _POINTS + (point < whole % _POINTS))

    def _gauges(self, traffic: Traffic) -> Iterator[str]:
        for name in ("running", "waiting"):
            yield f"vllm:num_requests_{name}{{{self._labels}}} {round(self._draw(traffic.get(name)))}"
        for name in self._names.usage:
            yield f"vllm:{name}{{{self._labels}}} {self._draw(traffic.get('kv')):.4f}"
        if self._names.since(0, 11):
            asleep = bool(traffic.get("asleep"))
            for state, value in (("awake", not asleep), ("weights_offloaded", asleep)):
                yield f'vllm:engine_sleep_state{{{self._labels},sleep_state="{state}"}} {int(value)}'
        cache = f'engine="0",block_size="{_BLOCK_TOKENS}",cache_dtype="auto",enable_prefix_caching="True"'
        yield f'vllm:cache_config_info{{{cache},num_gpu_blocks="{self._kv_blocks}"}} 1'
        yield f"process_start_time_seconds {self._started:.2f}"

    def _counters(self) -> Iterator[str]:
        for (name, more), value in self._counts.items():
            if name == "http":
                yield f'http_requests_total{{handler="/v1/completions",method="POST",status="{more}"}} {int(value)}'
            else:
                yield f"vllm:{name}_total{{{self._labels}{more}}} {int(value)}"

    def _distributions(self) -> Iterator[str]:
        for key, histogram in self._histograms.items():
            for name in self._names.token_time if key == "inter_token" else (_HISTOGRAMS[key][0],):
                below = 0
                for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                    below += count
                    yield f'vllm:{name}_bucket{{{self._labels},le="{_bound(bound)}"}} {below}'
                yield f"vllm:{name}_count{{{self._labels}}} {histogram.total}"
                yield f"vllm:{name}_sum{{{self._labels}}} {histogram.sum:.6f}"


def _kv_blocks(traffic: Traffic) -> int:
    """A KV cache of which the running requests take the given share, half of their output written on average."""
    length = middle(traffic.get("prompt_tokens")) + middle(traffic.get("output_tokens")) / 2
    used, share = middle(traffic.get("running")) * length, middle(traffic.get("kv"))
    return round(used / share / _BLOCK_TOKENS) if share else 0
