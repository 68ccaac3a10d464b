"""Dashboards: the rules of Grafana's dashboard linter, those it lacks, and what promtool answers to every query."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as pp
import pytest
import yaml

from kvpressure.bundle.dashboards import optional_queries, render_dashboards
from kvpressure.bundle.dashboards.builder import OF_ENGINES, OF_FLEET, BundleValues, DashboardContext
from kvpressure.bundle.rules import Options, load_groups, rule_file
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import PUBLISHED, Gathered, Values
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import EngineState, State
from kvpressure.publish.collector import collect
from kvpressure.publish.exposition import Encoder
from kvpressure.publish.metrics import BY_NAME, METRICS, PREFIX
from kvpressure.settings.thresholds import builtin
from tests.bundle.promql import EXTERNAL, selectors, walk
from tests.publish.states import full_engine, full_gpu, full_signals, full_state

UNITS = {"percentunit", "short", "none", "s", "reqps", "decbytes", "watt", "dateTimeFromNow"}
SYNTHETIC = {
    "ALERTS",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}  # Prometheus' own, every Python exporter's
BUCKETS = {f"{metric.full_name}_bucket" for metric in METRICS if metric.kind == "histogram"}
MOST_PANELS = 70
SITE = DashboardContext(builtin(), BundleValues())
DASHBOARDS = render_dashboards(SITE)

every_dashboard = pytest.mark.parametrize("uid", sorted(DASHBOARDS))


def panels(uid: str, dashboards: Mapping[str, Any] = DASHBOARDS) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboards[uid]["panels"] if panel["type"] != "row")


def panel(uid: str, title: str) -> dict[str, Any]:
    return next(one for one in panels(f"kvpressure-{uid}") if one["title"].startswith(title))


def expand(expr: str) -> str:
    """Variables replaced by something of their kind, so that the expression parses."""
    return re.sub(r"\$[a-z]\w*", "x", expr.replace("$__rate_interval", "5m"))


def expressions(uid: str) -> Iterator[tuple[str, str]]:
    return ((panel["title"], target["expr"]) for panel in panels(uid) for target in panel["targets"])


def test_no_more_panels_than_a_person_learns() -> None:
    assert sum(1 for uid in DASHBOARDS for _ in panels(uid)) <= MOST_PANELS


@every_dashboard
def test_variables(uid: str) -> None:
    variables = DASHBOARDS[uid]["templating"]["list"]
    names = OF_FLEET if uid == "kvpressure-fleet" else OF_ENGINES
    assert [variable["name"] for variable in variables] == ["datasource", *names]
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
    known = {metric.full_name for metric in METRICS} | recorded | set(EXTERNAL) | SYNTHETIC | BUCKETS
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
def test_links_inside_tables_lead_to_dashboards_and_keep_time_and_variables(uid: str) -> None:
    text = json.dumps(DASHBOARDS[uid])
    for url in re.findall(r'"url": "(/d/[^"]+)"', text):
        target, _, query = url.removeprefix("/d/").partition("?")
        assert target in DASHBOARDS
        assert "${__url_time_range}" in query
        for variable in DASHBOARDS[uid]["templating"]["list"]:
            assert f"${{{variable['name']}:queryparam}}" in query or f"var-{variable['name']}=" in query


@every_dashboard
def test_the_heartbeat_which_always_fires_is_in_no_list_of_firing_alerts(uid: str) -> None:
    for selector in re.findall(r"ALERTS\{[^}]*\}", "\n".join(expr for _, expr in expressions(uid))):
        operator, pattern = re.search(r'severity(=~|!~|=|!=)"([^"]*)"', selector).groups()  # type: ignore[union-attr]  # each has one
        assert bool(re.fullmatch(pattern, "none")) == operator.startswith("!"), selector


@every_dashboard
def test_no_query_is_long_whatever_is_chosen(uid: str) -> None:
    """4 kB is what proxies in front of Prometheus take in an address; a name in Kubernetes has up to 63 characters."""
    names = [variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]]
    for title, expr in expressions(uid):
        for name in names:
            expr = re.sub(rf"\$\{{?{name}\b\}}?", "n" * 63, expr)
        assert len(expr) < 4000, f"{title}: {len(expr)}"


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


SMALL = ("ALERTS", "kvpressure_source_up", "sum by (le)", "by (verdict)")
"""What a query is bounded by without ``topk``: alerts, sources of exporters, buckets, verdicts."""


@every_dashboard
def test_graphs_and_tables_over_engines_hold_a_bounded_number_of_them(uid: str) -> None:
    tiles = {one["title"] for one in panels(uid) if one["type"] == "stat"}
    for title, expr in expressions(uid):
        if title not in (*tiles, "Pools, worst first"):  # a pool that is down may never be left out
            bounded = re.sub(r"topk by|by \(pod, ", "", expr)
            assert "topk(" in bounded or any(one in expr for one in SMALL), f"{title}: {expr}"


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


# --- what Prometheus answers ------------------------------------------------------------------------------------------

pages = {"alertstate": "firing", "severity": "critical", "kvpressure_family": "harm"}
Sample = tuple[dict[str, str], float]


def engine_of(namespace: str, pod: str, rank: int = 0, verdict: str = "kv_pressure", up: bool = True) -> EngineState:
    engine = full_engine(pod)
    diagnosis = replace(engine.diagnosis, verdict=verdict)
    key = EngineKey(namespace, pod, "m", str(rank))
    pool = EnginePool(pod.rsplit("-", 1)[0], "", "owner")
    return replace(engine, key=key, diagnosis=diagnosis, pool=pool, up=up)


def series_of(state: State, *alerts: Mapping[str, str]) -> list[dict[str, str]]:
    """What Prometheus holds after it scraped an exporter with this state, and firing alerts."""
    text = Encoder().encode(collect(state), openmetrics=False).decode()
    found = [{"series": _named("ALERTS", labels), "values": "1x40"} for labels in alerts]
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            grows = name.endswith(("_total", "_bucket", "_count", "_sum"))
            scraped = f'{name}{{instance="a:1",job="kvpressure"' + (f",{labels}" if labels else "}")
            found.append({"series": scraped, "values": f"{float(value):g}{'+1' if grows else ''}x40"})
    return found


def _named(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items()) + "}"


def answers(series: Iterable[Mapping[str, str]], queries: Iterable[str], folder: Path) -> dict[str, list[Sample]]:
    """What promtool answers to each query after ten minutes, with all variables at "All"."""
    asked = {re.sub(r"\$[a-z]\w*", ".*", query.replace("$__rate_interval", "2m")): query for query in queries}
    groups = rule_file(load_groups(Options(builtin())), BundleValues())["groups"]
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if "record" in rule]
    (folder / "rules.yaml").write_text(yaml.dump({"groups": groups}, Dumper=yaml.CSafeDumper))
    case = {
        "interval": "15s",
        "input_series": list(series),
        "promql_expr_test": [{"expr": query, "eval_time": "10m", "exp_samples": []} for query in asked],
    }
    document = {"rule_files": [str(folder / "rules.yaml")], "evaluation_interval": "1m", "tests": [case]}
    (folder / "test.yaml").write_text(yaml.dump(document, Dumper=yaml.CSafeDumper, width=1 << 30))
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert "error" not in output.split("FAILED:")[0], output[:2000]
    found: dict[str, list[Sample]] = {query: [] for query in asked.values()}
    for block in re.split(r"\n    expr: ", output)[1:]:
        text, end = json.JSONDecoder().raw_decode(block)
        assert "err:" not in block[end:].split("\n")[0], block[:3000]
        samples = re.findall(r"\{((?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\} ([-+\w.]+)", block[end:].partition("got:")[2])
        found[asked[text]] = [
            (dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)) for labels, value in samples
        ]
    return found


@cache
def _of_two_tenants(folder: Path) -> dict[str, list[Sample]]:
    """Two namespaces with a pod of the same name, each with eight ranks; every query of every dashboard."""
    ranks = [engine_of(namespace, "chat-0", rank) for namespace in ("team-a", "team-b") for rank in range(8)]
    said = replace(ranks[0].diagnosis, published=dict.fromkeys(PUBLISHED, True))
    owned = [replace(one, gpus=(f"GPU-{one.key.namespace}",), diagnosis=said) for one in ranks]
    state = full_state()
    gpus = [full_gpu(index, f"GPU-team-{tenant}") for index, tenant in enumerate("ab")]
    alerts = [{**pages, "alertname": "Slow", "namespace": "team-a", "pod": "chat-0", "model_name": "m", "engine": "3"}]
    alerts.append({**pages, "alertname": "Down", "namespace": "team-b", "pool": "gone", "model_name": "m"})
    series = series_of(replace(state, engines=tuple(owned), gpus=tuple(gpus)), *alerts)
    return answers(series, (expr for uid in DASHBOARDS for _, expr in expressions(uid)), folder)


def legend(text: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), text)


@pytest.mark.live
@every_dashboard
def test_every_series_is_unique_in_the_legend_of_its_panel(uid: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = _of_two_tenants(tmp_path_factory.getbasetemp())
    drawn = 0
    for one in panels(uid):
        if one["type"] in ("timeseries", "state-timeline"):
            legends = [
                legend(target["legendFormat"], labels)
                for target in one["targets"]
                for labels, _ in found[target["expr"]]
            ]
            drawn += len(legends)
            assert [legend for legend, times in Counter(legends).items() if times > 1] == [], one["title"]
            assert "" not in legends, one["title"]
    assert drawn > 20


@pytest.mark.live
def test_every_query_returns_data_or_says_why_it_may_not(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = _of_two_tenants(tmp_path_factory.getbasetemp())
    queries = {
        (uid, one["title"], target["refId"]): found[target["expr"]]
        for uid in DASHBOARDS
        for one in panels(uid)
        for target in one["targets"]
    }
    assert {where for where, answer in queries.items() if not answer} - optional_queries(SITE).keys() == set()


@pytest.mark.live
def test_a_fleet_shows_every_pool_and_those_that_are_down_or_page_first(tmp_path: Path) -> None:
    fine = [engine_of("a", f"fine{number}-0", verdict="healthy") for number in range(30)]
    unsure = engine_of("a", "pressed-0")
    unsure = replace(unsure, diagnosis=replace(unsure.diagnosis, confidence=0.6))
    engines = [*fine, unsure, engine_of("a", "down-0", verdict="unknown", up=False)]
    alerts = [{**pages, "alertname": "Slow", "namespace": "a", "pod": "fine7-0", "model_name": "m", "engine": "0"}]
    alerts.append({**pages, "alertname": "Down", "namespace": "a", "pool": "gone", "model_name": "m"})
    order, number_of_pages = (target["expr"] for target in panel("fleet", "Pools, worst first")["targets"][:2])
    incident, causes = (target["expr"] for target in panel("incident", "Engines")["targets"][:2])
    silent = panel("fleet", "Pools that do not answer")["targets"][0]["expr"]
    series = series_of(replace(full_state(), engines=tuple(engines)), *alerts)
    found = answers(series, (order, number_of_pages, incident, causes, silent), tmp_path)
    assert found[silent] == [({}, 1.0)]
    actions = {labels["pod"]: labels["action"] for labels, _ in found[causes]}
    assert actions.pop("pressed-0") == "Not certain: Lower max_num_seqs"
    assert set(actions.values()) == {"Lower max_num_seqs"}  # of engines in equal trouble, any are among the first
    pools = {labels["pool"]: value for labels, value in found[order]}
    assert len(pools) == len(engines) + 1
    assert sorted(pools, key=lambda name: -pools[name])[:3] == ["down", "fine7", "gone"]
    assert {labels["pool"]: value for labels, value in found[number_of_pages]} == {"fine7": 1, "gone": 1}
    listed = {labels["pod"]: value for labels, value in found[incident]}
    assert sorted(listed, key=lambda name: -listed[name])[:3] == ["down-0", "fine7-0", "pressed-0"]
