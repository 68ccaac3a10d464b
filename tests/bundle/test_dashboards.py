"""Dashboards: the rules of Grafana's dashboard linter, and those it lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import promql_parser as pp
import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.bundle.dashboards import builder, render_dashboards
from kvpressure.bundle.dashboards.builder import BundleValues, DashboardContext
from kvpressure.bundle.dashboards.first_screen import (
    FIRST_ACTIONS,
    LOOK_FIRST,
    MITIGATION_ORDER,
    SCREEN,
    UNSURE,
    VERDICTS,
)
from kvpressure.bundle.rules import Options, load_groups
from kvpressure.diagnosis import findings
from kvpressure.diagnosis.finding import Recent, View, names_in
from kvpressure.diagnosis.findings import Gathered, Values
from kvpressure.diagnosis.rules import TABLES
from kvpressure.model.state import ACTIONABLE, CALM, LIMITS, Diagnosis
from kvpressure.publish.collector import ORDER, RANKS
from kvpressure.publish.links import VERDICT_RUNBOOKS
from kvpressure.publish.metrics import BY_NAME, METRICS, PREFIX
from kvpressure.settings.thresholds import builtin
from tests.bundle.promql import EXTERNAL, selectors, walk
from tests.publish.states import full_engine, full_signals

ALERTS = frozenset(alert.name for group in load_groups(Options(builtin())) for alert in group.alerts)
NAMED = re.compile(r"The alert on these values is (\w+)\.")
UNITS = {
    "percentunit",
    "short",
    "none",
    "s",
    "reqps",
    "decbytes",
    "bytes",
    "watt",
    "celsius",
    "suffix:MHz",
    "cpm",
    "dateTimeFromNow",
}
SYNTHETIC = {
    "ALERTS",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}  # Prometheus' own, every Python exporter's
VLLM = {
    f"vllm:request_{name}_bucket"
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "params_max_tokens",
        "prefill_time_seconds",
        "decode_time_seconds",
    )
}
BUCKETS = {f"{metric.full_name}_bucket" for metric in METRICS if metric.kind == "histogram"}
SITE = DashboardContext(builtin(), BundleValues(), ALERTS)
DASHBOARDS = render_dashboards(SITE)
ADDRESS = "https://runbooks.internal"
LINKED = render_dashboards(DashboardContext(builtin(), BundleValues(runbook_base_url=ADDRESS), ALERTS))

every_dashboard = pytest.mark.parametrize("uid", sorted(DASHBOARDS))


def panels(uid: str, dashboards: Mapping[str, Any] = DASHBOARDS) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboards[uid]["panels"] if panel["type"] != "row")


def expand(expr: str) -> str:
    """Variables replaced by something of their kind, so that the expression parses."""
    return re.sub(r"\$\w+", "x", expr.replace("$__rate_interval", "5m"))


def expressions(uid: str) -> Iterator[tuple[str, str]]:
    return ((panel["title"], target["expr"]) for panel in panels(uid) for target in panel["targets"])


@every_dashboard
def test_ids_are_unique_and_refids_too(uid: str) -> None:
    ids = [panel["id"] for panel in DASHBOARDS[uid]["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(uid):
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)), panel["title"]


@every_dashboard
def test_nothing_overlaps_or_leaves_the_grid(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[uid]["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] >= 0
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for cell in (
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        ):
            assert cell not in taken, f"{panel['title']} over {taken.get(cell)}"
            taken[cell] = panel["title"]


@every_dashboard
def test_variables(uid: str) -> None:
    variables = DASHBOARDS[uid]["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "cluster", "namespace", "model", "pod", "gpu"]
    assert variables[0]["label"] == "Data source"
    for variable in variables[1:]:
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["refresh"] == 2, "reload on time change"
        assert variable["multi"]
        assert variable["includeAll"]
        assert (variable["current"], variable["options"]) == ({}, [])
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert match is not None
        selector = pp.parse(expand(match[1]))
        assert isinstance(selector, pp.VectorSelector)
        assert match[2] == "cluster" or match[2] in BY_NAME[str(selector.name).removeprefix(PREFIX)].labels


@every_dashboard
def test_every_variable_is_used(uid: str) -> None:
    text = json.dumps([panel["targets"] for panel in panels(uid)])
    for variable in DASHBOARDS[uid]["templating"]["list"][1:]:
        assert f"${variable['name']}" in text, variable["name"]


@every_dashboard
def test_panels_have_title_description_unit_datasource_targets(uid: str) -> None:
    for panel in panels(uid):
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]


@every_dashboard
def test_expressions_parse_and_rates_follow_the_resolution(uid: str) -> None:
    for title, expr in expressions(uid):
        tree = pp.parse(expand(expr))
        for node in walk(tree):
            if isinstance(node, pp.Call) and node.func.name in ("rate", "irate", "increase"):
                assert "[$__rate_interval]" in expr, title


@every_dashboard
def test_counters_are_only_read_as_rates_or_states(uid: str) -> None:
    for title, expr in expressions(uid):
        rated = {
            str(s.name)
            for node in walk(pp.parse(expand(expr)))
            if isinstance(node, pp.Call) and node.func.name in ("rate", "irate", "increase")
            for s in walk(node)
            if isinstance(s, pp.VectorSelector)
        }
        for selector in selectors(expand(expr)):
            name = str(selector.name)
            if name.endswith("_total") and name != "kvpressure_container_restarts_total":  # the level is the message
                assert name in rated, f"{title}: {name}"


@every_dashboard
def test_every_metric_and_label_exists(uid: str) -> None:
    recorded = {item.name for group in load_groups(Options(builtin())) for item in group.recordings}
    known = {metric.full_name for metric in METRICS} | recorded | set(EXTERNAL) | SYNTHETIC | VLLM | BUCKETS
    for title, expr in expressions(uid):
        for selector in selectors(expand(expr)):
            assert str(selector.name) in known, f"{title}: {selector.name}"
            metric = BY_NAME.get(str(selector.name).removeprefix(PREFIX))
            for matcher in selector.matchers.matchers if metric else ():
                assert matcher.name in {*metric.labels, "cluster"}, f"{title}: {selector.name}{{{matcher.name}}}"


@every_dashboard
def test_every_query_is_narrowed_by_the_chosen_variables(uid: str) -> None:
    for title, expr in expressions(uid):
        assert "$" in expr, f"{title}: {expr}"


@every_dashboard
def test_threshold_steps_are_thresholds(uid: str) -> None:
    values = set(builtin().values())
    found = re.findall(r'"steps": (\[.*?\])', json.dumps(DASHBOARDS[uid]))
    marks = [step["value"] for steps in found for step in json.loads(steps) if step["value"] is not None]
    assert marks
    assert set(marks) <= values


@every_dashboard
def test_runbooks_are_linked_where_their_address_is_known_and_named_everywhere(uid: str) -> None:
    linked = LINKED[uid]["panels"]
    assert len(linked) == len(DASHBOARDS[uid]["panels"])
    for without, panel in zip(DASHBOARDS[uid]["panels"], linked, strict=True):
        named = NAMED.findall(panel.get("description", ""))
        assert [link["url"] for link in panel.get("links", [])] == [f"{ADDRESS}/{name}.md" for name in named]
        assert set(named) <= ALERTS
        assert without.get("links", []) == [], panel["title"]
    assert [one["url"] for one in LINKED[uid]["links"] if one["type"] == "link"] == [f"{ADDRESS}/README.md"]


@every_dashboard
def test_links_inside_tables_lead_to_dashboards_and_keep_time_and_variables(uid: str) -> None:
    text = json.dumps(DASHBOARDS[uid])
    for url in re.findall(r'"url": "(/d/[^"]+)"', text):
        target, _, query = url.removeprefix("/d/").partition("?")
        assert target in DASHBOARDS
        assert "${__url_time_range}" in query
        for name in builder.VARIABLES:
            assert f"${{{name}:queryparam}}" in query or f"var-{name}=" in query, name


def first_screen(dashboards: Mapping[str, Any] = DASHBOARDS) -> dict[str, dict[str, Any]]:
    shown = panels("kvpressure-incident", dashboards)
    return {panel["title"]: panel for panel in shown if panel["gridPos"]["y"] < SCREEN}


def test_panels_name_every_alert_but_those_that_many_panels_show() -> None:
    named = set(NAMED.findall(" ".join(panel["description"] for uid in DASHBOARDS for panel in panels(uid))))
    unnamed = {"InferenceEngineStalled", "InferenceRequestsWaitTooLong", "InferenceSlow", "KvpressureWatchdog"}
    assert ALERTS - named == unnamed, "a panel's description (bundle/dashboards/) names the alert that it explains"


@every_dashboard
def test_the_heartbeat_which_always_fires_is_in_no_list_of_firing_alerts(uid: str) -> None:
    for selector in re.findall(r"ALERTS\{[^}]*\}", "\n".join(expr for _, expr in expressions(uid))):
        operator, pattern = re.search(r'severity(=~|!~|=|!=)"([^"]*)"', selector).groups()  # type: ignore[union-attr]  # each has one
        assert bool(re.fullmatch(pattern, "none")) == operator.startswith("!"), selector


def test_the_first_action_is_the_pages_first_action_and_leads_to_the_runbook_of_its_verdict() -> None:
    assert set(FIRST_ACTIONS) == set(VERDICTS) - set(CALM) == set(VERDICT_RUNBOOKS)
    assert len(set(VERDICT_RUNBOOKS.values())) == len(VERDICT_RUNBOOKS), (
        "a runbook stands for its verdict in the column"
    )
    assert set(VERDICT_RUNBOOKS.values()) <= ALERTS
    for verdict, text in FIRST_ACTIONS.items():
        engine = replace(full_engine(), diagnosis=Diagnosis(verdict, 1.0, None, 0.0))
        if verdict != "unknown":  # what is missing differs
            assert text.startswith(plan(engine, builtin()).actions_now[0].title), verdict
    first = next(iter(first_screen(LINKED).values()))
    column = next(item for item in first["fieldConfig"]["overrides"] if item["matcher"]["options"] == "First action")
    properties = {item["id"]: item["value"] for item in column["properties"]}
    assert {key: option["text"] for key, option in properties["mappings"][0]["options"].items()} == {
        UNSURE: LOOK_FIRST,
        **{VERDICT_RUNBOOKS[verdict]: text for verdict, text in FIRST_ACTIONS.items()},
    }
    assert properties["links"][0]["url"].endswith("/${__value.raw}.md")


def test_engines_are_ranked_as_on_the_page() -> None:
    assert sorted(RANKS, key=RANKS.__getitem__, reverse=True) == list(ORDER)
    assert set(RANKS) == set(VERDICTS)


def test_what_to_set_is_ordered_by_the_steps_of_the_mitigation_and_all_of_it_needs_a_restart() -> None:
    assert set(MITIGATION_ORDER) == set(LIMITS)
    panel = first_screen()["What to set"]
    for target in panel["targets"]:
        steps = re.findall(r'"step", "(\d)", "limit", "(\w+)"', target["expr"])
        assert [limit for _, limit in sorted(steps)] == list(MITIGATION_ORDER)
    assert "Every limit is an argument of the engine and takes effect after a restart." in panel["description"]
    sorts = [step["options"]["sort"] for step in panel["transformations"] if step["id"] == "sortBy"]
    assert sorts == [[{"field": "step", "desc": False}]]


@every_dashboard
def test_no_query_is_long_whatever_is_chosen(uid: str) -> None:
    """4 kB is what proxies in front of Prometheus take in an address; a name in Kubernetes has up to 63 characters."""
    names = [variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]]
    for title, expr in expressions(uid):
        for name in names:
            expr = re.sub(rf"\$\{{?{name}\b\}}?", "n" * 63, expr)
        assert len(expr) < 4000, f"{title}: {len(expr)}"


def test_every_verdict_that_asks_for_action_has_numbers_behind_it_and_each_has_words() -> None:
    words = findings.reasons(builtin())
    assert not [text for text in words.values() if "{" in text]
    for table in TABLES:
        if table.name in ACTIONABLE and table.confident:
            rows = {name for condition in table.supports for name in condition.names()}
            assert any(set(names_in(findings.of(name).seen)) & words.keys() for name in rows), table.title


def test_a_reason_is_the_first_known_number_behind_what_supports_the_verdict() -> None:
    signals = full_signals()
    said = Gathered(Values(View(signals, Recent([1.0]), builtin(), 5)))
    peak = signals.kv.kv_used_ratio_recent_max
    assert peak is not None
    assert said.numbers_behind(["kv_full", "queue_present"]) == {
        "kv_used_ratio_recent_max": pytest.approx(100 * peak),
        "waiting": signals.load.waiting,
    }
    unknown = replace(signals, load=replace(signals.load, waiting=None, waiting_deferred=None))
    said = Gathered(Values(View(unknown, Recent([1.0]), builtin(), 5)))
    assert said.numbers_behind(["queue_present"]) == {"running": signals.load.running}


@pytest.mark.parametrize("uid", sorted(set(DASHBOARDS) - {"kvpressure-configuration"}))
def test_graphs_and_tables_over_engines_hold_a_bounded_number_of_them(uid: str) -> None:
    for panel in panels(uid):
        if (
            panel["type"] in ("timeseries", "state-timeline", "table") and panel["title"] != "Driver events"
        ):  # rare, and of any GPU
            for target in panel["targets"]:
                assert "ALERTS" in target["expr"] or "topk(" in target["expr"], f"{panel['title']}: {target['expr']}"


def test_table_columns_come_from_their_queries() -> None:
    for uid in DASHBOARDS:
        for panel in panels(uid):
            if panel["type"] != "table":
                continue
            steps = {step["id"]: step["options"] for step in panel["transformations"]}
            names = steps["filterFieldsByName"]["include"]["names"]
            refs = {target["refId"] for target in panel["targets"]}
            for name in names:
                if name.startswith("Value #"):
                    assert name.removeprefix("Value #") in refs, panel["title"]
            shown = {*steps["organize"]["renameByName"].values(), *names}
            for override in panel["fieldConfig"]["overrides"][1:]:  # the first is for every cell
                assert override["matcher"]["options"] in shown, panel["title"]


def test_dashboard_survives_grafanas_own_model() -> None:
    """A key that Grafana does not know is lost in a round trip through the SDK's typed model, and so found."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    for dashboard in DASHBOARDS.values():
        back = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))
        assert lost(dashboard, back, "") == []


def lost(before: Any, after: Any, path: str) -> list[str]:
    if isinstance(before, dict):
        return [
            item
            for key in before
            if before[key] is not None
            for item in ([f"{path}.{key}"] if key not in after else lost(before[key], after[key], f"{path}.{key}"))
        ]
    if isinstance(before, list):
        return [
            item
            for index, (a, b) in enumerate(zip(before, after, strict=True))
            for item in lost(a, b, f"{path}[{index}]")
        ]
    return []
