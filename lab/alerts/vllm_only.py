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


def scrapes(name: str, names: frozenset[str] | None = None) -> Series:
    """What is scraped of the servers of one recording, every ``SCRAPE_SECONDS``: what rules read, or ``names``."""
    series, names = Series(), wanted() if names is None else names
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

One file, no exporter: [alerts/kvpressure-vllm-only-rules.yaml](../alerts/kvpressure-vllm-only-rules.yaml). The file needs Prometheus 2.42 or newer and
a scrape job of vLLM's `/metrics` that adds the labels `namespace` and `pod`, as a PodMonitor does. kube-state-metrics is optional.

```yaml
rule_files:
  - kvpressure-vllm-only-rules.yaml
```

Load the file in place of `kvpressure-rules.yaml`, not beside it: the alerts have the same names. For thresholds of your own, take the
file that `kvpressure bundle --values site.yaml --out DIR` writes.
[alerts/kvpressure-vllm-only-dashboard.json](../alerts/kvpressure-vllm-only-dashboard.json) is a dashboard for vLLM's own metrics.

## Alerts

| alert | severity | the rule |
|---|---|---|
{alerts}

Both spellings of renamed metrics are read (`vllm:kv_cache_usage_perc` and `vllm:gpu_cache_usage_perc`; `vllm:inter_token_latency_seconds` and
`vllm:time_per_output_token_seconds`). Thresholds are those of [thresholds.md](reference/thresholds.md). The alerts link to the runbooks of the exporter's alerts; without the exporter, skip
steps that read `kvpressure_` metrics.

## What they cannot show

* The cause of a queue (`max_num_seqs`, prefill, host or GPU) is unknown. The only cause that the rules report is a full KV cache.
* GPU memory in real use is unknown: vLLM reserves its pool at start and publishes no device memory.
* Host starvation is not detected: vLLM's metrics do not include CPU throttling, memory limits or node pressure.
* The cause of a crash stays unknown, because the rules have no exit codes, XID errors or log lines. A restart is seen only when the new process publishes its counters.
* A stall is not detected if the server publishes no token counters. If scrapes fail, InferenceModelDown fires instead.
  A stall is reported only after 5 minutes with requests and without a token.
* The engine's limits are unknown, so the rules recommend no values for them.
* Engines have no baselines of their own, so latency alerts have only absolute thresholds, and do not page.
* Peaks of the KV cache between two scrapes are missed. Preemptions are visible only if vLLM counts them.
* If the metrics of a server freeze while requests are running, it still looks stalled after these requests have finished.

The [exporter](deploy.md) on each node closes these gaps.

## Measured on the recordings

`promtool` evaluates the rules file on the vLLM series of the recorded incidents, scraped every 15 s. The [proof of the alerts](reports/alert-proof.md) is about
the exporter's rules on the same incidents.

* of {paged} incidents on which the full rules page, an alert of this file fires on {fires} ({percent} %; goal: two thirds) and pages on {pages}
* missed: {missed}
* fires on incidents where nothing should: {wrong}
* recordings of servers without KV pressure on which something fires: {noise} of {quiet}

The series come from published reports of the incidents, so some incidents lack metrics that a real server always has. Many recordings stop at the crash, before InferenceModelDown can fire. No recording contains series of kube-state-metrics.
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
