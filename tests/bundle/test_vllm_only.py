"""``alerts/kvpressure-vllm-only-rules.yaml``: what the page says of it, and the dashboard beside it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from lab.accuracy import data
from lab.alerts import vllm_only
from lab.alerts.replayed import alerts as full_alerts
from lab.alerts.series import SCRAPE_SECONDS

from kvpressure.bundle.dashboards.vllm_only import VARIABLES
from kvpressure.bundle.render import VLLM_ONLY, VLLM_ONLY_DASHBOARD
from tests.bundle.conftest import ROOT

pytestmark = pytest.mark.live

RULES = ROOT / VLLM_ONLY


def test_the_page_states_what_fires_on_the_recordings() -> None:
    """Each fourth incident is on the page as missed, or as a false alarm, exactly if it is one now."""
    wanted = data.incidents()[::4]
    full = {
        name: {item.name for item in active if item.firing and item.pages}
        for name, active in full_alerts(item.name for item in wanted).items()
    }
    own = vllm_only.play(item.name for item in wanted)
    missed, wrong = listed("missed"), listed("fires on incidents where nothing should")
    for item in wanted:
        fired = {one.name for one in own[item.name]}
        assert (item.id in missed) == bool(full[item.name] and not fired), item.id
        assert (item.id in wrong) == bool(item.page == "no" and fired), item.id


def test_the_table_of_alerts_is_that_of_todays_rules() -> None:
    lines = vllm_only.PAGE.read_text(encoding="utf-8").splitlines()
    assert [row for row in vllm_only.alerts_table().splitlines() if row not in lines] == []


def listed(title: str) -> dict[str, str]:
    """Incidents of a line of the page, each with its alerts."""
    page = vllm_only.PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"(\w+) \(([\w, ]+)\)", page.split(f"* {title}: ", 1)[1].splitlines()[0]))


# --- the dashboard beside the rules ---------------------------------------------------------------------------------

DASHBOARD = json.loads((ROOT / VLLM_ONLY_DASHBOARD).read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
BUSY = "vllm-cpu/d_kv_pressure.jsonl.gz"


def expanded(expr: str) -> str:
    """Everything chosen, and the rate interval that Grafana computes for a scrape every 15 s."""
    return re.sub(r"\$[a-z]\w*", ".*", expr.replace("$__rate_interval", "1m")).replace(" @ end()", "")


def names_read(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?<![\w:])(?:vllm:|http_requests_)\w+", text))


def test_every_query_of_the_dashboard_answers_on_a_recorded_server(tmp_path: Path) -> None:
    queries = [(panel["title"], expanded(target["expr"])) for panel in PANELS for target in panel["targets"]]
    assert len(queries) > 12
    series = vllm_only.scrapes(BUSY, names_read(json.dumps(DASHBOARD)) | vllm_only.wanted())
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    end = f"{(series.scrapes - 1) * SCRAPE_SECONDS:g}s"
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{SCRAPE_SECONDS:g}s",
        "group_eval_order": [group["name"] for group in groups],
        "tests": [
            {
                "interval": f"{SCRAPE_SECONDS:g}s",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.between(0, series.scrapes)
                ],
                "promql_expr_test": [{"expr": expr, "eval_time": end, "exp_samples": []} for _, expr in queries],
            }
        ],
    }
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump(document, width=1 << 30))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert "parse error" not in output
    silent = {title for title, expr in queries if f"expr: {json.dumps(expr)}" not in output}
    assert silent == {"Failed requests"}, silent  # none fails in this recording


def test_the_dashboard_needs_nothing_but_vllm_and_the_recordings_of_its_rules() -> None:
    text = json.dumps([panel["targets"] for panel in PANELS] + DASHBOARD["templating"]["list"])
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    assert set(re.findall(r"\b(?:engine|pod|workload):\w+:\w+", text)) <= recorded
    assert not re.search(r"(?<![\w:-])kvpressure_(?!family)\w+", text)
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", *VARIABLES]
