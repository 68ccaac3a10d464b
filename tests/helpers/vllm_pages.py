"""Recorded vLLM pages for tests, their translation into other dialects, and an independent reading of them.

The independent reading goes through ``prometheus_client``'s parser and spells out the names of the newest and the
older releases once more, so that a mistake in the scanner or in its alias table has nothing to hide behind.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import defaultdict
from pathlib import Path

from kvpressure.model.readings import Histogram

ROOT = Path(__file__).parents[1] / "fixtures" / "vllm"
CAPTURES = sorted(str(path.relative_to(ROOT))[: -len(".prom.gz")] for path in ROOT.rglob("*.prom.gz"))

GAUGES = {
    "running": ["vllm:num_requests_running"],
    "waiting": ["vllm:num_requests_waiting"],
    "swapped": ["vllm:num_requests_swapped"],
    "kv_usage": ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
}
COUNTERS = {
    "preemptions": ["vllm:num_preemptions_total"],
    "prompt_tokens": ["vllm:prompt_tokens_total"],
    "generation_tokens": ["vllm:generation_tokens_total"],
    "prefix_queries": ["vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"],
    "cached:external_unspecified": ["vllm:external_prefix_cache_hits_total"],
    "prefix_hits": ["vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"],
    "transfers": ["vllm:nixl_xfer_time_seconds_count"],
    "transfer_seconds": ["vllm:nixl_xfer_time_seconds_sum"],
    "transfer_bytes": ["vllm:nixl_bytes_transferred_sum"],
    "transfers_failed": ["vllm:nixl_num_failed_transfers_total"],
    "leases_expired": ["vllm:nixl_num_kv_expired_reqs_total"],
    "read_after_expiry": ["vllm:nixl_num_notifications_after_expiry_total"],
    "estimated_flops": ["vllm:estimated_flops_per_gpu_total"],
    "estimated_read_bytes": ["vllm:estimated_read_bytes_per_gpu_total"],
    "estimated_write_bytes": ["vllm:estimated_write_bytes_per_gpu_total"],
}
HISTOGRAMS = {
    "ttft": ["vllm:time_to_first_token_seconds"],
    "inter_token": ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
    "e2e": ["vllm:e2e_request_latency_seconds"],
    "queue": ["vllm:request_queue_time_seconds"],
    "prefill": ["vllm:request_prefill_time_seconds"],
    "inference": ["vllm:request_inference_time_seconds"],
    "iteration_tokens": ["vllm:iteration_tokens_total"],
    "request_prompt_tokens": ["vllm:request_prompt_tokens"],
    "request_generation_tokens": ["vllm:request_generation_tokens"],
    "request_params_max_tokens": ["vllm:request_params_max_tokens"],
}
CONFIG = {
    "block_size",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "gpu_memory_utilization",
    "cache_dtype",
    "sliding_window",
    "enable_prefix_caching",
    "effective_attention_block_size",
    "_block_size_resolved",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
}


def text_of(capture: str) -> str:
    """A recorded page, e.g. ``d_kv_pressure`` or ``versions/live_0.32.0``."""
    return gzip.decompress((ROOT / f"{capture}.prom.gz").read_bytes()).decode()


def to_openmetrics(text: str, *, underscores: bool = False) -> str:
    """The page as an OpenMetrics writer would have put it: counter families without ``_total``, ``# EOF``.

    ``underscores`` gives sample names without colons, as the Python client does on ``/metrics/``.
    """
    lines = []
    for line in text.splitlines():
        line = re.sub(r"^(# TYPE \S+?)_total counter$", r"\1 counter", line)
        if underscores and not line.startswith("#"):
            line = line.replace("vllm:", "vllm_", 1)
        lines.append(line)
    return "\n".join([*lines, "# EOF"]) + "\n"


def to_quoted(text: str) -> str:
    """The page with quoted names, as written with ``escaping=allow-utf-8``: ``{"vllm:x",engine="0"} 1``."""
    text = re.sub(r"^(vllm:\w+)\{", r'{"\1",', text, flags=re.M)
    return re.sub(r"^(vllm:\w+) ", r'{"\1"} ', text, flags=re.M)


def independent_reading(text: str) -> tuple[dict, dict, dict]:
    """Engines, page values and configurations by ``prometheus_client``.

    Engines: ``{(model, engine): {"gauges": ..., "counters": ..., "histograms": ...}}``.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append(sample)
    engines: dict = defaultdict(lambda: {"gauges": {}, "counters": {}, "histograms": {}})

    def engine(sample):
        return engines[sample.labels["model_name"], sample.labels.get("engine", "0")]

    for kind, table in (("gauges", GAUGES), ("counters", COUNTERS)):
        for canonical, names in table.items():
            for name in reversed(names):
                for sample in samples[name]:
                    engine(sample)[kind][canonical] = sample.value
    _split_families(samples, engine)
    for canonical, names in HISTOGRAMS.items():
        for name in reversed(names):
            for sample in samples[name + "_count"]:
                engine(sample)["histograms"][canonical] = _histogram(samples, name, sample)
    for sample in samples["vllm:admission_rejections_total"]:
        for (model, _), reading in engines.items():
            if model == sample.labels["model_name"]:
                reading["counters"]["rejected:" + sample.labels["reason"]] = sample.value
    configs = {
        s.labels.get("engine"): {k: v for k, v in s.labels.items() if k in CONFIG and v != "None"}
        for s in samples["vllm:cache_config_info"]
    }
    return dict(engines), _page(samples), configs


def _split_families(samples, engine) -> None:
    for sample in samples["vllm:num_requests_waiting_by_reason"]:
        engine(sample)["gauges"]["waiting_" + sample.labels["reason"]] = sample.value
    loads = {"in_progress": "loads", "waiting_to_start": "loads_to_start"}
    for sample in samples["vllm:num_requests_kv_fetch_by_stage"]:
        if sample.labels["stage"] in loads:
            engine(sample)["gauges"][loads[sample.labels["stage"]]] = sample.value
    for sample in samples["vllm:engine_sleep_state"]:
        if sample.labels["sleep_state"] != "awake":
            gauges = engine(sample)["gauges"]
            gauges["asleep"] = max(gauges.get("asleep", 0), sample.value)
    for sample in samples["vllm:prompt_tokens_by_source_total"]:
        if sample.labels["source"] == "local_compute":
            engine(sample)["counters"]["prompt_tokens_computed"] = sample.value
    for sample in samples["vllm:prompt_tokens_cached_by_source_total"]:
        engine(sample)["counters"]["cached:" + sample.labels["source"]] = sample.value
    for sample in samples["vllm:request_success_total"]:
        engine(sample)["counters"]["finished:" + sample.labels["finished_reason"]] = sample.value


def _histogram(samples, name, count) -> Histogram:
    buckets = sorted(
        (float(s.labels["le"]), s.value)
        for s in samples[name + "_bucket"]
        if {k: v for k, v in s.labels.items() if k != "le"} == count.labels
    )
    total = next(s.value for s in samples[name + "_sum"] if s.labels == count.labels)
    assert not buckets or buckets[-1][0] == math.inf
    return Histogram(tuple(b for b, _ in buckets), tuple(c for _, c in buckets), total, count.value)


def _page(samples) -> dict[str, float]:
    names = {
        "process_cpu_seconds": "process_cpu_seconds_total",
        "process_start_time_seconds": "process_start_time_seconds",
        "process_open_fds": "process_open_fds",
    }
    page = {canonical: samples[name][0].value for canonical, name in names.items() if samples[name]}
    for sample in samples["http_requests_total"]:
        answered = (sample.labels["status"], sample.labels.get("handler", "").endswith("completions")) == ("2xx", True)
        key = "http:" + sample.labels["status"] + ":generated" * answered
        page[key] = page.get(key, 0) + sample.value
    return page
