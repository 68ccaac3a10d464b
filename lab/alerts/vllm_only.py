"""The rules over vLLM's own metrics on the recordings: ``python -m lab.alerts.vllm_only`` writes
``docs/vllm-only.md``.

The recordings hold what the servers answered, so the series are theirs, under the names of their release. What a scrape
adds is added: namespace, pod, job and instance.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import yaml

from kvpressure.bundle.render import VLLM_ONLY
from kvpressure.bundle.rules import Options, load_groups
from kvpressure.bundle.spec import AlertLevel
from kvpressure.bundle.text import span
from kvpressure.model.readings import Scrape
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from lab.accuracy import data
from lab.alerts import recorded
from lab.alerts.engine import Episode, episodes, evaluate_each
from lab.alerts.series import ROOT, SCRAPE_SECONDS, Series

PAGE: Final = ROOT / "docs" / "vllm-only.md"
TABLE: Final = ROOT / "build" / "vllm-only.md"
RULES: Final = ROOT / VLLM_ONLY
GOAL: Final = 2 / 3
_SAMPLE: Final = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_METRIC: Final = re.compile(r"(?<![\w:])(?:vllm:|http_requests_)\w+")


@dataclass(frozen=True, slots=True)
class Row:
    """One incident: what the full rules page with, and what of these rules fires (pages among them)."""

    id: str
    label: str
    full: tuple[str, ...]
    fired: tuple[str, ...]
    paged: tuple[str, ...]


@lru_cache(maxsize=1)
def wanted() -> frozenset[str]:
    """Names of the metrics that some rule reads."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return frozenset(name for group in groups for rule in group["rules"] for name in _METRIC.findall(rule["expr"]))


def scraped(page: Scrape, names: frozenset[str]) -> Mapping[str, str]:
    """Series of one recorded answer, with the labels that a scrape adds; none if the server did not answer."""
    if page.error is not None:
        return {}
    target = f'namespace="{page.namespace}",pod="{page.pod}",job="vllm",instance="{page.target}"'
    found = {}
    for line in (page.exposition or "").splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample and sample[1] in names:
            own = f"{sample[2].rstrip(',')}," if sample[2] else ""
            found[f"{sample[1]}{{{own}{target}}}"] = sample[3]
    return found


def scrapes(name: str) -> Series:
    """What rules read of the servers of one recording, scraped every ``SCRAPE_SECONDS``."""
    series, names = Series(), wanted()
    last: Mapping[str, str] | None = None
    due: float | None = None
    with Reader(data.RECORDINGS / name, keep_exposition=True) as reader:
        for snapshot in reader:
            due = snapshot.time if due is None else due
            while last is not None and due < snapshot.time:
                series.add_samples(last)
                due += SCRAPE_SECONDS
            last = {key: value for page in snapshot.pages for key, value in scraped(page, names).items()}
    series.add_samples(last or {})
    return series


def play(names: Iterable[str]) -> dict[str, list[Episode]]:
    """What fires in each recording."""
    many = {name: scrapes(name) for name in names}
    return {name: episodes(active) for name, active in evaluate_each(many, rules=RULES).items()}


def rows(played: Sequence[recorded.Played]) -> list[Row]:
    """Every incident with what both sets of rules do on it."""
    found = play(item.incident.name for item in played)
    return [
        Row(
            item.incident.id,
            item.incident.page,
            tuple(page.alert for page in item.pages),
            tuple(sorted({one.name for one in found[item.incident.name]})),
            tuple(sorted({one.name for one in found[item.incident.name] if one.pages})),
        )
        for item in played
    ]


def share(found: Sequence[Row]) -> tuple[int, int]:
    """Incidents on which something fires, of those on which the full rules page."""
    paged = [row for row in found if row.full]
    return sum(bool(row.fired) for row in paged), len(paged)


def line(row: Row) -> str:
    """The row of the table of incidents."""
    fired = ", ".join(f"{name} (page)" if name in row.paged else name for name in row.fired)
    return f"| {row.id} | {row.label} | {', '.join(row.full) or '-'} | {fired or '-'} |"


def page(found: Sequence[Row], quiet: Mapping[str, Sequence[Episode]]) -> str:
    """The whole of ``docs/vllm-only.md``."""
    fires, paged = share(found)
    pages = sum(bool(row.full and row.paged) for row in found)
    missed = ", ".join(f"{row.id} ({', '.join(row.full)})" for row in found if row.full and not row.fired)
    wrong = [row for row in found if row.label == "no" and row.fired]
    noise = sum(bool(ones) for ones in quiet.values())
    return TEXT.format(
        alerts=alerts_table(),
        fires=fires,
        paged=paged,
        percent=round(100 * fires / paged),
        pages=pages,
        missed=missed,
        wrong=", ".join(f"{row.id} ({', '.join(row.fired)})" for row in wrong) or "none",
        quiet=len(quiet),
        noise=noise,
    )


def alerts_table() -> str:
    """Rows of the table of alerts, as the rules are generated today."""
    options = Options(builtin(), source="vllm")
    return "\n".join(
        f"| [{alert.name}](runbooks/{alert.name}.md) | {', '.join(map(_level, alert.levels))} | {alert.choice} |"
        for group in load_groups(options)
        for alert in group.alerts
    )


def _level(level: AlertLevel) -> str:
    waits = f"after {span(level.for_seconds)}" if level.for_seconds else "at once"
    return f"{level.severity} {waits}"


TEXT: Final = """\
# Alerts on vLLM's own metrics alone

Generated by `make alert-proof` (`python -m lab.alerts.vllm_only`).

Without the exporter: load these rules in place of the exporter's, not beside them, as the alerts have the same names. They need Prometheus 2.42
and the labels `namespace` and `pod` on vLLM's series; kube-state-metrics is optional. With kube-prometheus-stack, a PodMonitor adds the labels:

```yaml
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: vllm
  labels:
    release: kube-prometheus-stack   # the name of its Helm release
spec:
  selector:
    matchLabels:
      app: vllm
  podMetricsEndpoints:
    - port: http
```

```sh
kubectl apply -n inference -f podmonitor.yaml -f alerts/kvpressure-vllm-only-prometheusrule.yaml
```

Elsewhere: `rule_files: [kvpressure-vllm-only-rules.yaml]`, and both as `labels` of the target. Thresholds of your own: the files that
`kvpressure bundle --values site.yaml --out DIR` writes. Dashboards for these metrics come with vLLM (`examples/` in its repository).

## Alerts

| alert | severity | the rule |
|---|---|---|
{alerts}

Both spellings of renamed metrics are read. In the runbooks, skip steps that read `kvpressure_` metrics.

## What they cannot show

* Of causes, only a full KV cache: not `max_num_seqs`, prefill, host or GPU, not the reason of a crash, no recommended values.
* GPU memory in real use: vLLM reserves its pool at start and publishes no device memory.
* A stall before 5 minutes, or of a server without token counters. If metrics freeze while requests run, it still looks stalled after they have finished.
* Peaks of the KV cache between two scrapes; preemptions that vLLM does not count; a restart before the new process publishes its counters.

The [exporter](deploy.md) on each node closes these gaps.

## Measured on the recordings

`promtool` evaluates the rules on the vLLM series of the incidents of the [exporter's proof](reports/alert-proof.md), scraped every 15 s:

* of {paged} incidents on which the full rules page, an alert of this file fires on {fires} ({percent} %; goal: two thirds) and pages on {pages}
* missed: {missed}
* fires on incidents where nothing should: {wrong}
* recordings of servers without KV pressure on which something fires: {noise} of {quiet}

Many incidents lack metrics that a real server has or stop at the crash; none has kube-state-metrics.
"""  # noqa: E501


def main() -> int:
    """Measure, print the figures, write the page. Exit 1 when the goal is missed."""
    found = rows(recorded.incidents(timed=len(data.incidents())))
    PAGE.write_text(page(found, play(recorded.quiet_labels())), encoding="utf-8")
    rows_shown = [line(row) for row in found if row.full or row.fired]
    head = "| incident | label | full rules page with | this file fires |\n|---|---|---|---|\n"
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(head + "\n".join(rows_shown) + "\n", encoding="utf-8")
    fires, paged = share(found)
    print(f"fires on {fires} of {paged} incidents on which the full rules page")
    return 0 if fires >= GOAL * paged else 1


if __name__ == "__main__":
    sys.exit(main())
