"""What speaks for a verdict, as rows of a table: one fact a row, its present number before its words.

A fact is shown while its engine's verdict is one of ``verdicts`` and the named evidence of the diagnosis has the given
value, so the table says what the exporter's page says; the number beside it is read from the published metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpressure.bundle.dashboards.builder import BY_ENGINE, CONTAINER, ENGINE, GPU, BoardContext, engine
from kvpressure.bundle.dashboards.ranking import worst
from kvpressure.bundle.text import words

QUEUED: Final = ("kv_pressure", "concurrency_limited", "compute_bound", "host_bound")
NOT_THE_CACHE: Final = ("concurrency_limited", "compute_bound", "host_bound", "stalled")


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """One row. ``expr``: its number, one series an engine. ``words`` continue the number and may name thresholds in
    braces. ``evidence``: alternatives, of which one has to have the value ``holds``.
    """

    name: str
    verdicts: tuple[str, ...]
    evidence: tuple[str, ...]
    expr: str
    words: str
    holds: bool = True

    def query(self, place: int) -> str:
        """The row's number, labelled with its place and name."""
        verdict = f'kvpressure_verdict{{{ENGINE},verdict=~"{"|".join(self.verdicts)}"}} == 1'
        evidence = f'kvpressure_evidence{{{ENGINE},evidence=~"{"|".join(self.evidence)}"}} == {int(self.holds)}'
        return (
            f"label_replace({self.expr} and on ({BY_ENGINE}) {verdict} and on ({BY_ENGINE}) {evidence}, "
            f'"fact", "{self.key(place)}", "", "")'
        )

    def key(self, place: int) -> str:
        """Value of the label ``fact``; sorts by place."""
        return f"{chr(ord('a') + place)} {self.name}"

    def shown(self, site: BoardContext) -> str:
        """``words`` with their thresholds, written as everywhere in the bundle."""
        return self.words.format_map({entry.name: words(entry) for entry in site.thresholds.entries()})


def _of_pod(metric: str) -> str:
    """``metric`` of the fullest container in each engine's pod."""
    return (
        f"max by (cluster, namespace, pod) ({metric}{{{CONTAINER}}}) * on (cluster, namespace, pod) group_right () "
        f"max by ({BY_ENGINE}) (kvpressure_verdict{{{ENGINE}}})"
    )


def _of_gpu(metric: str) -> str:
    """``metric`` of the busiest GPU of each engine."""
    return (
        f'max by ({BY_ENGINE}) (kvpressure_engine_gpu_info{{{ENGINE},uuid=~"$gpu"}} * on (cluster, uuid) group_left () '
        f"max by (cluster, uuid) ({metric}{{{GPU}}}))"
    )


def _tokens(kind: str) -> str:
    return engine("tokens_per_second", f'kind="{kind}"')


FACTS: Final = (
    EvidenceRow(
        "throttled",
        ("host_bound",),
        ("cpu_throttled",),
        f"100 * {_of_pod('kvpressure_container_cpu_throttled_ratio')}",
        "% of CFS periods throttled (much from {cpu_throttled_ratio})",
    ),
    EvidenceRow(
        "cpu",
        ("host_bound",),
        ("cpu_saturated", "cpu_contended"),
        f"100 * {_of_pod('kvpressure_container_cpu_used_ratio')}",
        "% of the CPU limit used (saturated from {cpu_saturated_ratio})",
    ),
    EvidenceRow(
        "outside",
        ("host_bound",),
        ("outside_engine_time",),
        engine("outside_engine_seconds"),
        "seconds of a request pass outside the engine",
    ),
    EvidenceRow(
        "no_tokens",
        ("stalled",),
        ("no_progress",),
        f"sum by ({BY_ENGINE}) ({engine('tokens_per_second', by='kind')})",
        "tokens per second were produced in the last seconds",
    ),
    EvidenceRow(
        "stuck",
        ("stalled",),
        ("no_progress",),
        f"time() - {engine('verdict_since_timestamp_seconds')}",
        "seconds since it was called stalled ({stalled_seconds} without progress)",
    ),
    EvidenceRow("present", ("stalled",), ("work_present",), engine("requests_in_flight"), "requests in flight"),
    EvidenceRow(
        "prompts",
        ("compute_bound",),
        ("prefill_dominates",),
        _tokens("prompt"),
        "prompt tokens a second (dominate from {prefill_tokens_ratio} the generated)",
    ),
    EvidenceRow(
        "answers", ("compute_bound",), ("prefill_dominates",), _tokens("generation"), "generated tokens a second"
    ),
    EvidenceRow(
        "busy",
        ("compute_bound",),
        ("gpu_saturated",),
        f"100 * {_of_gpu('kvpressure_gpu_utilization_ratio')}",
        "% GPU utilization (saturated)",
    ),
    EvidenceRow(
        "limit",
        ("concurrency_limited",),
        ("running_at_limit",),
        engine("requests_running"),
        "requests run: max_num_seqs is reached",
    ),
    EvidenceRow(
        "kv",
        ("kv_pressure",),
        ("kv_full", "kv_near_full", "head_of_line_blocked"),
        f"100 * {engine('kv_cache_used_ratio_max')}",
        "% peak KV cache usage (full at {kv_full_ratio})",
    ),
    EvidenceRow(
        "waiting",
        QUEUED,
        ("queue_present", "queue_for_capacity"),
        engine("requests_waiting"),
        "requests wait",
    ),
    EvidenceRow(
        "preempted",
        ("kv_pressure",),
        ("preempting", "running_falls_waiting_rises"),
        f"60 * {engine('preemption_rate')}",
        "preemptions in the last minute (counted from {preemptions_min})",
    ),
    EvidenceRow(
        "room",
        ("kv_pressure",),
        ("head_of_line_blocked",),
        f"{engine('kv_cache_capacity_tokens')} - {engine('kv_cache_used_tokens')}",
        "tokens are free: the next prompt does not fit",
    ),
    EvidenceRow(
        "latency",
        ("kv_pressure", "host_bound"),
        ("latency_multiplied",),
        f"max by ({BY_ENGINE}) ({engine('latency_baseline_ratio', by='phase')})",
        "times the engine's normal p95 latency (multiplied from {latency_multiplied_ratio})",
    ),
    EvidenceRow(
        "fits",
        ("concurrency_limited",),
        ("running_at_limit",),
        engine("max_concurrent_requests", 'source="kv_capacity"'),
        "requests of the present length would fit into the cache",
    ),
    EvidenceRow(
        "gpu_waits",
        ("host_bound", "stalled"),
        ("gpu_starved", "gpu_utilization_low", "gpu_idle"),
        f"100 * {_of_gpu('kvpressure_gpu_utilization_ratio')}",
        "% GPU utilization: it waits (low below {host_queue_utilization_ratio})",
    ),
    EvidenceRow(
        "kv_room",
        NOT_THE_CACHE,
        ("kv_full",),
        f"100 * {engine('kv_cache_used_ratio_max')}",
        "% of the KV cache used at most: not the cause (full from {kv_full_ratio})",
        holds=False,
    ),
)


def facts_of_the_worst() -> str:
    """All facts that hold about the engine in most trouble."""
    rows = " or ".join(fact.query(place) for place, fact in enumerate(FACTS))
    return worst(f"({rows})", 1)


def fact_texts(site: BoardContext) -> dict[str, str]:
    """Value of the label ``fact`` -> words."""
    return {fact.key(place): fact.shown(site) for place, fact in enumerate(FACTS)}
