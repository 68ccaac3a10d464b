"""One jinja2 environment for rules, tests and documents, and what templates may use in it.

Delimiters are ``<< >>``, ``<% %>`` and ``<# #>``, because PromQL, Go templates and Grafana all own the braces.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jinja2

from kvpressure.bundle.spec import SUBJECTS
from kvpressure.bundle.text import duration, number, words
from kvpressure.signals.logevents import ALLOCATION_EVENTS
from kvpressure.thresholds import Thresholds


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The environment; an unknown name in a template is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kvpressure.bundle", "templates"),
        undefined=jinja2.StrictUndefined,
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is PromQL, YAML and Markdown, never HTML
    )


def per(subject: str, expr: str) -> str:
    """``expr`` aggregated to the identity labels of ``subject``, so that a restarted exporter keeps the alert."""
    return f"max by ({', '.join(SUBJECTS[subject])}) ({expr})"


def recommend(limit: str) -> str:
    """A sentence of an annotation: what to set ``limit`` to. Empty where the exporter recommends nothing."""
    own = ("cluster", "namespace", "pod", "model_name", "engine")  # an absent cluster is an empty one, to a matcher too
    query = (
        f'max by (limit) (kvpressure_limit_recommended{{limit=\\"{limit}\\",{",".join(f"{name}=%q" for name in own)}}})'
    )
    form = "%.2f" if limit == "gpu_memory_utilization" else "%.0f"
    return (
        '{{ with printf "' + query + '" ' + " ".join(f"$labels.{name}" for name in own) + " | query }}"
        f' Set {limit} to {{{{ . | first | value | printf "{form}" }}}}.{{{{ end }}}}'
    )


def grown(counter: str, window: str) -> str:
    """By how much a count that is never set back (the kubelet's restarts) grew within ``window``, without extrapolation. Unlike
    ``increase`` it says the same in MetricsQL, which takes the first sample of a series for growth from 0.
    """
    return f"{counter} - min_over_time({counter}[{window}])"


def rose(counter: str, window: str) -> str:
    """Whether ``grown`` is above 0. A comparison, because a difference makes a new series of each that did not grow."""
    return f"{counter} > min_over_time({counter}[{window}])"


def new_events(counter: str, by: str, window: str, seconds: str, job: str) -> str:
    """How often ``counter`` grew within ``window``, as an expression.

    ``increase`` alone misses the first event, which makes the series appear with 1. A first appearance counts when the same
    exporter was scraped before or has only just started (it counts from its start), so that neither a new Prometheus nor a node that
    is back after a gap raises what happened long ago. ``seconds`` is ``window`` as a number, ``job`` a part of the exporter's job.
    """
    grown = f"max by ({by}) (increase({counter}[{window}]))"
    return (
        f"{grown} > 0\n"
        f"or\n"
        f"(\n"
        f"  max by ({by}) (\n"
        f"    {counter}\n"
        f"    and on (cluster, job, instance)\n"
        f'    (kvpressure_build_info offset {window} or process_start_time_seconds{{job=~".*{job}.*"}} > time() - {seconds})\n'
        f"  )\n"
        f"  unless on ({by})\n"
        f"  max by ({by}) ({counter} offset {window})\n"
        f")\n"
        f"or\n"
        f"{grown}"
    )


def dcgm(expr: str) -> str:
    """A dcgm-exporter expression under the labels of ours: ``uuid`` and ``node`` from either spelling it has had."""
    for label, source in (("uuid", "UUID"), ("node", "Hostname"), ("node", "hostname")):
        expr = f'label_replace({expr}, "{label}", "$1", "{source}", "(.+)")'
    return expr


def context(thresholds: Thresholds, **more: Any) -> dict[str, Any]:
    """What every template sees: ``t`` number, ``d`` duration, ``w`` words of a threshold, and the helpers."""
    return {
        "t": lambda name: thresholds.entry(name).text,
        "d": lambda name: duration(thresholds[name]),
        "w": lambda name: words(thresholds.entry(name)),
        "n": lambda name: thresholds[name],
        "number": number,
        "grown": grown,
        "rose": rose,
        "new_events": new_events,
        "dcgm": dcgm,
        "per": per,
        "ids": lambda subject: ", ".join(SUBJECTS[subject]),
        "recommend": recommend,
        "engine": lambda expr: per("engine", expr),
        "allocation_events": "|".join(sorted({*ALLOCATION_EVENTS, "host_oom"})),  # device memory, and the host's
        **more,
    }


def render(name: str, variables: dict[str, Any]) -> str:
    """Template ``name`` with ``variables``."""
    return environment().get_template(name).render(variables)
