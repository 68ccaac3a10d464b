"""The jinja2 environment of rules and documents, and the helpers of templates.

Delimiters are ``<< >>``, ``<% %>`` and ``<# #>``, because PromQL, Go templates and Grafana use braces.
"""

from __future__ import annotations

from functools import lru_cache, partial
from textwrap import indent
from typing import Any, Final

import jinja2

from kvpressure.bundle.spec import EVALUATION_INTERVALS, POOL, SUBJECTS
from kvpressure.bundle.text import duration, span, words
from kvpressure.bundle.verdicts_page import because
from kvpressure.model.state import REMOVED, UNREADY, VANISHED
from kvpressure.settings.thresholds import Thresholds, plain

_WHERE: Final = "{{ with $labels.namespace }}{{ . }}/{{ end }}{{ $labels.pod }}"  # none on a bare host
_HEADLINE: Final = '{{ or (reReplaceAll "[.] .*" "" $labels.__name__) "An engine is in trouble" }}'
_SAID: Final = '{{ or $labels.__name__ "Cause: unknown, no words are published for this engine." }}'
_WORKLOAD_POD: Final = "(.+?)(-[a-z0-9]{8,10}-[a-z0-9]{5}|-[0-9]+)?"


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


def per(subject: str, expr: str, *more: str) -> str:
    """``expr`` aggregated to the identity labels of ``subject`` (and ``more``), so that an alert survives a restart of
    the exporter.
    """
    return f"max by ({', '.join((*SUBJECTS[subject], *more))}) ({expr})"


def looked_up(series: str, words: str, form: str = "%.0f") -> str:
    """Part of an annotation with the value of ``series`` for the alert's engine in the place of ``{}``; "" at run time
    where there is none.
    """
    metric, _, matchers = series.rstrip("}").partition("{")
    query = asked(f"{metric}{{{','.join(filter(None, (matchers, 'OWN')))}}}")
    before, _, after = words.partition("{}")
    return f'{{{{ with {query} }}}}{before}{{{{ . | first | value | printf "{form}" }}}}{after}{{{{ end }}}}'


def recommend(limit: str) -> str:
    """Annotation sentence with the recommended value of ``limit``; "" at run time where there is none."""
    form = "%.2f" if limit == "gpu_memory_utilization" else "%.0f"
    return looked_up(f'kvpressure_limit_recommended{{limit="{limit}"}}', f" Set {limit} to {{}}.", form)


def opted_out(*alerts: str) -> str:
    """The pods that opted out of these alerts: ``off`` = all, ``ticket`` = those that wake somebody."""
    return f'kvpressure_container_alerts_info{{alerts=~"{"|".join(alerts)}"}}'


def documented(name: str, test: str, measured: str, *, literal: bool = False) -> str:
    """The engines whose number of the guides passes ``test``, with the labels pool and role. The exporter publishes the
    number where the alert's other conditions hold, so few engines have it. ``literal``: any engine's ``measured``.
    """
    if not literal:
        return per("engine", f'kvpressure_documented_number{{number="{name}"}} {test}', *POOL)
    by = ", ".join(SUBJECTS["engine"])
    pools = f"max by ({by}, {', '.join(POOL)}) (\n  kvpressure_engine_up == 1\n  and on ({by})\n  {measured} {test}\n)"
    return f"0 * {pools}\n+ on ({by}) group_left ()\n{per('engine', f'{measured} {test}')}"


def owned(expr: str, *more: str) -> str:
    """``expr``, a series for each GPU (and ``more``), with the labels of an engine on it, if there is one."""
    series = per("gpu", expr, *more)
    labels = ", ".join(name for name in SUBJECTS["owner"] if name != "cluster")
    engine = f"max by (cluster, uuid, {labels}) (gpu:kvpressure_engine:info)"  # a federated copy counts once
    return f"{series}\n* on (cluster, uuid) group_left ({labels})\n{engine}\nor on (cluster, uuid)\n{series}"


def finding(name: str) -> str:
    """The engines for which a published finding holds, with the labels pool and role."""
    return per("engine", f'kvpressure_finding{{finding="{name}"}} == 1', *POOL)


def harm(name: str, level: str, lasting: int = 0) -> str:
    """The engines with this harm, with its value, the labels pool and role, and what to say as ``__name__``: the one
    label that every evaluator of rules shows to texts and drops from the alert. Only they have a series, so a calm
    fleet costs these rules nothing; of several exporters that see an engine, any speaks. ``lasting``: for so many
    seconds without a gap, 0 = at all.
    """
    series = f'kvpressure_harm{{harm="{name}",level="{level}"}}'
    by = ", ".join((*SUBJECTS["engine"], *POOL))
    chosen = _lasted(series, lasting) if lasting else series
    spoken = indent(f'label_join({chosen}, "__name__", "", "said")', " " * 4)
    return f"topk by ({by}) (1,\n  max by (__name__, {by}) (\n{spoken}\n  )\n)"


def _lasted(series: str, seconds: int) -> str:
    """What has lasted ``seconds`` now or half a minute ago, looked at each half minute: harm that comes and goes each
    minute has not. Evaluated each minute, it misses as little as ``for`` does each half minute, and the texts of an
    active alert, which cost more than anything else, are rendered half as often.
    """
    joined, half = f"on ({', '.join((*SUBJECTS['engine'], *POOL))})", EVALUATION_INTERVALS["steady"] // 2
    return f"\nor {joined}\n".join(
        f"\nand {joined}\n".join(
            f"{series} offset {duration(since)}" if since else series
            for since in range(until, until + seconds + 1, half)
        )
        for until in (0, half)
    )


def asked(query: str, *arguments: str) -> str:
    """A query of an annotation about the alert's engine: ``OWN`` in it stands for the engine's matchers; ``arguments``
    fill each ``%q`` before them.
    """
    own = SUBJECTS["engine"]  # a matcher treats an absent cluster as ""
    text = query.replace("OWN", ",".join(f"{name}=%q" for name in own)).replace('"', r"\"")
    return f'printf "{text}" {" ".join((*arguments, *(f"$labels.{name}" for name in own)))} | query'


def workload(expr: str) -> str:
    """``expr`` with the label workload: the Deployment or StatefulSet, derived from the pod's name."""
    return f'label_replace({expr}, "workload", "$1", "pod", "{_WORKLOAD_POD}")'


def kube(expr: str, *labels: str) -> str:
    """A kube-state-metrics expression with ``labels`` (default: those of a pod), also where scraped without
    honor_labels.
    """
    for label in labels or ("pod", "namespace"):
        expr = f'label_replace({expr}, "{label}", "$1", "exported_{label}", "(.+)")'
    return expr


def grown(counter: str, window: str) -> str:
    """Growth within ``window`` of a counter that is never reset, without extrapolation. Unlike ``increase``, the same
    in MetricsQL, which counts the first sample of a series as growth from 0.
    """
    return f"{counter} - min_over_time({counter}[{window}])"


def new_events(counter: str, by: str, window: str, seconds: str) -> str:
    """Number of events of ``counter`` within ``window``, as an expression; ``seconds`` is ``window`` as a number.

    ``increase`` alone misses the first event, which creates the series with value 1. A first appearance counts when
    the same exporter was scraped before, or has only just started (by its own ticks, because clocks differ), so that
    neither a new Prometheus nor a node that is back after a gap reports old events.
    """
    grown = f"max by ({by}) (increase({counter}[{window}]))"
    return (
        f"{grown} > 0\n"
        f"or\n"
        f"(\n"
        f"  max by ({by}) (\n"
        f"    {counter}\n"
        f"    and on (cluster, job, instance)\n"
        f"    (kvpressure_build_info offset {window} or kvpressure_ticks_total < {seconds})\n"
        f"  )\n"
        f"  unless on ({by})\n"
        f"  max by ({by}) ({counter} offset {window})\n"
        f")\n"
        f"or\n"
        f"{grown}"
    )


def context(thresholds: Thresholds, *, literal: bool = False, **more: Any) -> dict[str, Any]:
    """Names in every template: ``t`` number, ``d`` duration, ``w`` words of a threshold, ``o`` its origin, and the
    helpers.
    """
    return {
        "t": lambda name: plain(thresholds[name]),
        "d": lambda name: duration(thresholds[name]),
        "w": lambda name: words(thresholds.entry(name)),
        "because": lambda verdict: because(verdict, thresholds),
        "o": lambda name: thresholds.entry(name).origin,
        "n": lambda name: thresholds[name],
        "number": plain,
        "span": span,
        "duration": duration,
        "interval": EVALUATION_INTERVALS,
        "workload": workload,
        "kube": kube,
        "grown": grown,
        "new_events": new_events,
        "per": per,
        "ids": lambda subject: ", ".join(SUBJECTS[subject]),
        "recommend": recommend,
        "looked_up": looked_up,
        "documented": partial(documented, literal=literal),
        "owned": owned,
        "opted_out": opted_out,
        "where": _WHERE,
        "finding": finding,
        "harm": harm,
        "headline": _HEADLINE,
        "said": _SAID,
        "asked": asked,
        "text_of": lambda name, **parts: " ".join(
            render(f"texts/{name}.j2", {"asked": asked, "confident": thresholds["confident"], **parts}).split()
        ),
        "engine": lambda expr: per("engine", expr),
        "vanished": VANISHED,
        "removed": REMOVED,
        "literal": literal,
        "unready": UNREADY,
        **more,
    }


def render(name: str, variables: dict[str, Any]) -> str:
    """Template ``name`` with ``variables``."""
    return environment().get_template(name).render(variables)
