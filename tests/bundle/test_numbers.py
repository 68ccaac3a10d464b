"""No number without a source: render twice, the second time with every threshold moved, and whatever number stayed is
not from the model. What stays has to be in the lists below, each with its reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from kvpressure.bundle.render import render
from kvpressure.bundle.rules import PROFILES, SOURCES, Options, load_groups
from kvpressure.publish.metrics import METRICS
from kvpressure.publish.reference import first_sentence
from kvpressure.settings.thresholds import Thresholds, builtin

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")

# The windows of burn rates are the method's own; their steps are those of the subqueries that read them. A workload is
# its pod's name without the hashes of Kubernetes. Groups have intervals and limits; what is counted is multiplied by
# the interval. Percent are divided by 100; quantiles, status classes and the driver's XID numbers are names; format
# strings are formats.
STRUCTURE = re.compile(
    r"""interval: \d+[ms]|limit: \d+|\) \* (?:60|150)\b|rate5m\[\d+[mhd](?::\d+m)?\](?:\) \* (?:300|600)\b)?|burn_rate:\d+[mhd]|over (?:both )?\d+[mhd] and \d+[mhd]|\(\.\+\?\)\(-\[a-z0-9\]\{8,10\}-\[a-z0-9\]\{5\}\|-\[0-9\]\+\)\?|/ 100\) <|quantile="0\.\d+"|quantile=\\"0\.\d+\\"|\b[45]xx|xid!?=?~"[\d|]+"|XID_ERRORS == \d+|"\$1"|quantile\(0\.\d+|quantile_over_time\(0\.\d+|%\.\df"""  # noqa: E501
)

# Nothing, one and the whole are no thresholds.
ALLOWED = {"0", "1", "1.0"}

# Facts that no setting changes, in prose: HTTP status codes, the exit code of SIGKILL, ports, kubectl's arguments.
PROSE = {"400", "413", "503", "137", "2", "50", "8000", "9846"}
PROSE_TEXT = re.compile(
    r"Operator below 0\.66|Prometheus below 2\.42|503s|about 1-"
    r"|XIDs [\d, ]+ are|--since=2h|tail -n 50|^\d+\. |Prometheus"
    r" 2\.42|Grafana 10\.4"
    r"|over (?:both )?\d+[mhd] and \d+[mhd]|spent, over \d+[mhd]\b|burn_rate:\d+[mhd]",
    re.MULTILINE,
)
# The example of a values file, a version of VictoriaMetrics, and figures that were measured.
ALERT_PAGE = re.compile(
    r"```yaml\n.*?```|1\.112|The tests found [\d.]+ of [\d.]+ faults[^\n]*|\| (?:promtool|vmalert)[^\n]*|growth from 0"
    r"|\| \d+ \| \d+ \|$|moved 10 %|^\| `[\w:]+` \| \d+ \| [^|\n]*\|$",
    re.DOTALL | re.MULTILINE,
)

# The pages of the verdicts: grades, the recordings that show a row, the place of a question, and made-up examples.
VERDICT_PAGE = re.compile(
    r"^\| \d+ \||^\| [^|]*\| `\w+` \| \w+ \| [^|]*\|$"
    r"|\b(?:certain|strong|likely|doubtful|guess) 0\.\d+|(?:real|incidents): [^|]*?(?=[|;\n])|and \d+ more|last 30 s"
    r"|\d grades lower",
    re.MULTILINE,
)

# Rows of tables of the worst, what the batch and overcommit ratios mean, the one fullest GPU of an engine, per second
# to per minute, ratios to per cent, the steps of the mitigation, none counted as 0, what 1 and 0 mean,
# and the fixed window of the slope of the KV cache (``QUARTER_MINUTE``).
DASHBOARD_TEXT = re.compile(
    r"\(1, |60 \* (?:sum|max) by|100 \* max by|\"step\", \"\d\"|vector\(0\)|1 is"
    r" normal|never 0|topk\(20, |^The 20 |1 minus p95 batch|Above 1, |last 15 s"
)

# Keys of a dashboard that are layout and behaviour, not judgement.
LAYOUT_KEYS = {
    "id",
    "x",
    "y",
    "w",
    "h",
    "schemaVersion",
    "version",
    "graphTooltip",
    "refresh",
    "hide",
    "sort",
    "min",
    "max",
    "decimals",
    "lineWidth",
    "fillOpacity",
    "rowHeight",
    "perPage",
    "index",
    "from",
    "to",
    "step",
    "fiscalYearStartMonth",
    "minWidth",
    "custom.width",
    "custom.fillOpacity",
    "dash",
    "cellGap",
    "exponent",
    "steps",
    "le",
}


def moved() -> Thresholds:
    """Every threshold at another value of the same kind."""
    base = builtin()
    return Thresholds({entry.name: replace(entry, value=_other(entry.value, entry.unit)) for entry in base.entries()})


def _other(value: float, unit: str) -> float:
    return round(value * 0.93, 9) if unit in ("ratio", "score", "per_second") else value + 7


def stayed(before: str, after: str) -> list[str]:
    """Numbers that are the same in both texts, with some of what stands around them."""
    first, second = list(NUMBER.finditer(before)), list(NUMBER.finditer(after))
    assert len(first) == len(second), "the thresholds changed the structure"
    return [
        before[max(0, a.start() - 30) : a.end() + 10].replace("\n", " ")
        for a, b in zip(first, second, strict=True)
        if a[0] == b[0] and a[0] not in PROSE | ALLOWED
    ]


@pytest.fixture(scope="module", params=[(source, profile) for source in SOURCES for profile in PROFILES], ids="-".join)
def renderings(request: pytest.FixtureRequest) -> tuple[dict[str, str], dict[str, str]]:
    source, profile = request.param
    before, after = (render(Options(thresholds, profile=profile, source=source)) for thresholds in (builtin(), moved()))
    return before, after


def test_rules(renderings: tuple[dict[str, str], dict[str, str]]) -> None:
    before, after = (STRUCTURE.sub("", version["alerts/kvpressure-rules.yaml"]) for version in renderings)
    assert stayed(before, after) == []


def test_pages(renderings: tuple[dict[str, str], dict[str, str]]) -> None:
    before, after = renderings
    checked = 0
    for path, text in before.items():
        if not path.endswith(".md") or path in (
            "docs/reference/failure-reasons.md",
            "docs/reference/metrics.md",
            "docs/reference/settings.md",
            "docs/reference/thresholds.md",
        ):
            continue  # references of other parts; the threshold page has its own test
        left = stayed(
            *(
                reduce(
                    lambda page, known: known.sub("", page),
                    (ALERT_PAGE, VERDICT_PAGE, STRUCTURE, PROSE_TEXT),
                    version,
                )
                for version in (text, after[path])
            )
        )
        assert left == [], f"{path}: {left}"
        checked += 1
    assert checked > 5


def test_threshold_page_lists_what_a_site_may_change(renderings: tuple[dict[str, str], dict[str, str]]) -> None:
    before, _ = renderings
    for entry in builtin().settable():
        row = next(
            line
            for line in before["docs/reference/thresholds.md"].splitlines()
            if line.startswith(f"| `{entry.name}` |")
        )
        assert entry.documented or first_sentence(entry.reason) in row
        assert NUMBER.search(row.split("|")[2])


def test_a_documented_number_is_where_its_row_says() -> None:
    metrics = {metric.full_name for metric in METRICS}
    alerts = {alert.name for group in load_groups(Options(builtin())) for alert in group.alerts}
    dashboards = "".join(text for path, text in render(Options(builtin())).items() if path.startswith("dashboards/"))
    for entry in (entry for entry in builtin().settable() if entry.documented):
        assert entry.metric in metrics, entry.name
        assert set(filter(None, entry.rule.split(", "))) <= alerts, entry.name
        assert f'"title": "{entry.panel}"' in dashboards or not entry.panel, entry.name


def test_dashboards(renderings: tuple[dict[str, str], dict[str, str]]) -> None:
    before, after = renderings
    for path in (path for path in before if path.startswith("dashboards/") and path.endswith(".json")):
        left = list(_same(json.loads(before[path]), json.loads(after[path]), ""))
        assert left == [], f"{path}: {left}"


def _same(before: Any, after: Any, key: str) -> list[str]:
    if isinstance(before, dict):
        names = {name: before["id"] if name == "value" and "id" in before else name for name in before}  # an override
        return [
            item
            for name in before
            if name != "indexByName"  # order of columns
            for item in _same(before[name], after[name], names[name])
        ]
    if isinstance(before, list):
        return [item for a, b in zip(before, after, strict=True) for item in _same(a, b, key)]
    if key in LAYOUT_KEYS or isinstance(before, bool):
        return []
    if isinstance(before, int | float):
        return [f"{key}: {before}"] if before == after and str(before) not in ALLOWED else []
    if isinstance(before, str) and key in ("expr", "title", "description"):
        return stayed(*(DASHBOARD_TEXT.sub("", STRUCTURE.sub("", version)) for version in (before, after)))
    return []
