"""Every query of every dashboard, against a real Prometheus that scrapes the demo and evaluates our rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from kvpressure.bundle.dashboards import optional_queries, render_dashboards
from kvpressure.bundle.dashboards.builder import BundleValues, DashboardContext
from kvpressure.settings.thresholds import builtin
from tests.helpers.beats import in_time, missed_by

pytestmark = [pytest.mark.live, pytest.mark.real_time]

SITE = DashboardContext(builtin(), BundleValues())
DASHBOARDS = render_dashboards(SITE)
OPTIONAL = optional_queries(SITE)
AT_A_TIME = 8
ROUNDS = 2  # of questions at least
SIMULATED_SECONDS, SPEED = 150, 5  # half a minute; the incident is from a fifth to a half of it
Where = tuple[str, str, str]  # uid, panel title, refId

QUERIES: dict[Where, str] = {
    (uid, panel["title"], target["refId"]): target["expr"]
    for uid, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel.get("targets", ())
}
ANNOTATIONS = {
    (uid, item["name"]): item["expr"]
    for uid, dashboard in DASHBOARDS.items()
    for item in dashboard["annotations"]["list"]
}
VARIABLES = sorted(
    {
        (item["name"], item["query"]["query"])
        for dashboard in DASHBOARDS.values()
        for item in dashboard["templating"]["list"][1:]
    }
)


@dataclass
class Answers:
    """What came back over the whole run: the most series each query returned, and what Prometheus refused."""

    series: dict[Where, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    values: dict[str, set[str]] = field(default_factory=dict)
    rounds: int = 0


def expand(expr: str) -> str:
    """As Grafana does with everything chosen (allValue is ``.*``)."""
    return re.sub(r"\$[a-z]\w*", ".*", expr.replace("$__rate_interval", "15s"))


def ask(prometheus: str, path: str, **parameters: str) -> list[object]:
    with urlopen(f"{prometheus}api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
        data = json.load(answer)["data"]
    return data["result"] if isinstance(data, dict) else data


def ask_all(prometheus: str, answers: Answers) -> None:
    """One round over every query, annotation and variable; several at a time, as a busy machine makes each wait."""

    def ask_one(item: tuple[tuple[str, ...], str]) -> None:
        where, expr = item
        try:
            found = len(ask(prometheus, "query", query=expand(expr)))
        except HTTPError as error:
            answers.refused[expr] = error.read().decode()
        else:
            answers.series[where] = max(found, answers.series.get(where, 0))

    asked = [*QUERIES.items(), *(((*key, ""), expr) for key, expr in ANNOTATIONS.items())]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(ask_one, asked))
    for name, query in VARIABLES:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match is not None
        values = ask(prometheus, f"label/{match[2]}/values", **{"match[]": expand(match[1])})
        answers.values.setdefault(name, set()).update(map(str, values))
    answers.rounds += 1


@contextmanager
def demo(speed: float) -> Iterator[subprocess.Popen[str]]:
    """The demo, interrupted in the end if it still runs."""
    command = [sys.executable, "-m", "lab.demo", "--for", str(SIMULATED_SECONDS), "--speed", str(speed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def watch_incident(slower: int) -> tuple[Answers, list[str]]:
    """Run the demo and ask from the begin of its incident until it is over. Also returns which beats were missed."""
    found = Answers()
    lasts = SIMULATED_SECONDS * slower / SPEED
    with demo(SPEED / slower) as process:
        prometheus = prometheus_in_the_incident(process)
        begin = time.monotonic()
        # A demo that ends before a round does takes its Prometheus along.
        with suppress(URLError, OSError):
            while time.monotonic() < begin + 0.6 * lasts or found.rounds < ROUNDS:
                time.sleep(1.0)
                ask_all(prometheus, found)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "what was seen:" in output, output
    rounds = [] if found.rounds >= ROUNDS else [f"{found.rounds} of {ROUNDS} rounds of queries before the end"]
    return found, missed_by(output) + rounds


def prometheus_in_the_incident(process: subprocess.Popen[str]) -> str:
    """Address of the demo's Prometheus, once the incident has begun."""
    assert process.stdout is not None
    prometheus = ""
    for line in process.stdout:
        if match := re.match(r"  Prometheus +(http://\S+)", line):
            prometheus = match[1]
        if "== incident" in line:
            break
    assert prometheus, "the demo did not start Prometheus: is it installed?"
    return prometheus


def not_understood(answers: Answers) -> list[str]:
    return [f"{expr}: {why}" for expr, why in answers.refused.items()]


def empty_without_a_reason(answers: Answers) -> list[str]:
    """Queries that never returned anything and do not say why that may be."""
    return [f"no data: {where}" for where in QUERIES if not answers.series.get(where) and where not in OPTIONAL]


def variables_without_values(answers: Answers) -> list[str]:
    """The demo has no cluster label, which All matches too; every other variable has to find something."""
    return [f"no values: {name}" for name, values in answers.values.items() if not values and name != "cluster"]


def silent_in_an_incident(answers: Answers) -> list[str]:
    """What may be empty, and must not be while the cache is full."""
    spoken = (
        ("kvpressure-incident", "Why: evidence about the first engine", "A"),
        ("kvpressure-incident", "What to set", "A"),
        ("kvpressure-incident", "What fires", "A"),
        ("kvpressure-incident", "Time until the cache is full", "A"),
        ("kvpressure-detail", "Limits", "C"),
        ("kvpressure-incident", "Firing alerts", ""),
    )
    return [f"silent: {where}" for where in spoken if not answers.series.get(where)]


def test_every_query_of_every_dashboard_returns_data_from_the_demo() -> None:
    """One test, so that parallel workers do not each run a demo."""
    answers = in_time(watch_incident)
    assert answers.rounds >= ROUNDS
    checks = (not_understood, empty_without_a_reason, variables_without_values, silent_in_an_incident)
    problems = [line for check in checks for line in check(answers)]
    assert problems == [], "\n".join(problems)
    assert answers.values["pod"] == {"chat-13b-0", "code-7b-0", "mail-1b3-0"}
