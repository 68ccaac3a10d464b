"""No number without a source: render twice, the second time with every threshold moved, and whatever number stayed is
not from the model. What stays has to be in the lists below, each with its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import promql_parser as pp
import pytest

from kvpressure.bundle.render import render
from kvpressure.bundle.rules import PROFILES, Options, load_groups, rule_file
from kvpressure.publish.metrics import METRICS
from kvpressure.settings.thresholds import Thresholds, builtin
from tests.bundle.promql import walk

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")

ALLOWED = {"0", "1", "1.0"}  # nothing, one and the whole are no thresholds

# 0 and 1 are states, what is counted is multiplied by the interval of its group, percent are divided by 100, windows of
# burn rates and their steps are the method's own.
OF_THE_METHOD = {0, 1, 60, 100, 120, 300, 600}
QUANTILES = re.compile(r"(?:quantile|quantile_over_time|histogram_quantile)\(0\.\d+")

# Quantiles and windows are names; states are 0 and 1; rows of tables of the worst, per second to per minute, seconds to
# milliseconds, what a burn rate of 2 means, and the bands of the order of engines and pools (``harm.py``).
OF_DASHBOARDS = re.compile(
    r"quantile=\"0\.\d+\"|burn_rate:\d+[mhd]|\[2m\]|[<>=]=? [01]\b|\(1, |60 \* sum by|\* 1000\b|\"step\", \"\d\""
    r"|vector\(0\)|never 0|topk\(20, |At 2, |20 \* \(1 - |\(10 \* group|or 10 \* group|\+ 20 or|>= 20\)"
    r"|> 0\) \+ 1 or|\$\d"
)


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
        if a[0] == b[0] and a[0] not in ALLOWED
    ]


def numbers(expr: str) -> list[float]:
    """What the expression compares or calculates with: no window, no quantile."""
    tree = pp.parse(QUANTILES.sub(lambda found: found[0].rsplit("(", 1)[0] + "(0", expr))
    return [node.val for node in walk(tree) if isinstance(node, pp.NumberLiteral)]


@pytest.fixture(scope="module")
def renderings() -> tuple[dict[str, str], dict[str, str]]:
    return render(Options(builtin())), render(Options(moved()))


@pytest.mark.parametrize("source", ["kvpressure", "vllm"])
@pytest.mark.parametrize("profile", PROFILES)
def test_rules(source: str, profile: str) -> None:
    before, after = (
        [rule for group in rule_file(load_groups(options), options.values)["groups"] for rule in group["rules"]]
        for options in (Options(thresholds, profile=profile, source=source) for thresholds in (builtin(), moved()))
    )
    for rule, other in zip(before, after, strict=True):
        pairs = zip(numbers(rule["expr"]), numbers(other["expr"]), strict=True)
        left = {one for one, moved_to in pairs if one == moved_to} - OF_THE_METHOD
        assert left == set(), f"{rule.get('alert') or rule['record']}: {left}"


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
        pairs = zip(texts(json.loads(before[path])), texts(json.loads(after[path])), strict=True)
        left = [number for pair in pairs for number in stayed(*(OF_DASHBOARDS.sub("", text) for text in pair))]
        assert left == [], f"{path}: {left}"


def texts(model: Any) -> Iterator[str]:
    """Queries, titles, descriptions and the marks of panels."""
    if isinstance(model, dict):
        if model.get("color") and isinstance(mark := model.get("value"), float | int):
            yield f"{mark}"
        yield from (text for key in ("expr", "title", "description") if isinstance(text := model.get(key), str))
        model = list(model.values())
    if isinstance(model, list):
        yield from (text for item in model for text in texts(item))
