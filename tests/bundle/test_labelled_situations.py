"""What the bundle does in situations of operation that were labelled before its rules were written.

As they are at a scrape interval of a minute. ``make -C lab situations`` runs them at three, and again with every
series and every recording twice: a second exporter, another job, a federated copy. Each variant takes promtool minutes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.alerts.engine import evaluate, evaluate_each
from lab.alerts.replayed import scrapes
from lab.alerts.series import SCRAPE_SECONDS, Series, samples

from kvpressure.bundle.render import RULES, render
from kvpressure.bundle.rules import Options, load_groups, metrics_read
from kvpressure.bundle.values import BundleValues
from kvpressure.model.isolation import Failure
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import EngineKey
from kvpressure.model.signals import LoadSignals, ProgressSignals, RequestSignals, Signals, Slow, TransferSignals
from kvpressure.model.state import Cause, Diagnosis, EngineState, State, engine_without_values
from kvpressure.settings.thresholds import builtin
from tests.helpers.rule_cases import needed_by
from tests.helpers.situations import Fired, Situation, complaints, judge, load

SITUATIONS = load()
ALL = {"15s": (15.0, False), "60s": (60.0, False), "150s": (150.0, False), "twice": (30.0, True)}
VARIANTS = {name: ALL[name] for name in os.environ.get("SITUATION_VARIANTS", "60s").split(",")}
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Outcome:
    """What fired in each situation at a scrape interval, and what promtool said."""

    scrape: float
    fired: Mapping[tuple[str, str], set[Fired]]
    output: str


def with_copies(rules: str) -> str:
    """The rules with each recording evaluated once more, as a federated copy with a label of its own."""
    document = yaml.safe_load(rules)
    for group in document["groups"]:
        copies = [{**rule, "labels": {"prometheus": "leaf"}} for rule in group["rules"] if "record" in rule]
        group["rules"] += copies
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture(scope="module", params=list(VARIANTS))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    scrape, double = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    enabled = Options(builtin(), BundleValues())
    rules = folder / "rules.yaml"
    text = render(enabled)[RULES]
    rules.write_text(with_copies(text) if double else text)
    fired, output = judge(rules, SITUATIONS, folder, scrape, double)
    return Outcome(scrape, fired, output)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_it_does_what_is_expected(outcome: Outcome, situation: Situation) -> None:
    wrong = complaints(situation, outcome.fired)
    if situation.why_excluded(outcome.scrape):
        assert wrong, "no longer wrong: take the exclusion out"
    else:
        assert wrong == [], situation.what


def test_no_rule_fails(outcome: Outcome) -> None:
    assert "rule:" not in outcome.output, outcome.output[:2000]
    assert "parse error" not in outcome.output, outcome.output[:2000]


def test_the_shortest_harm_on_record_pages_at_the_pace_of_the_rules() -> None:
    """Users of KV03 wait for 150 seconds, of which the alert waits 120: ``for`` each minute would miss it."""
    name = "incidents/KV03.jsonl.gz"
    (active,) = evaluate_each({name: scrapes(name, SCRAPE_SECONDS)}).values()
    assert {alert.name for alert in active if alert.firing and alert.pages} == {"InferenceSlow"}


def test_harm_of_half_a_minute_in_each_minute_pages_nobody() -> None:
    series = Series()
    for number in range(40):
        series.add_samples({f'kvpressure_harm{{{ENGINE},harm="slow",level="critical"}}': "9"} if number % 4 < 2 else {})
    assert "InferenceSlow" not in {alert.name for alert in evaluate(series) if alert.firing}


ENGINE = 'namespace="inf",pod="chat-0",model_name="m",engine="0"'

SITE = "https://grafana.internal"


@cache
def groups_linking(dashboards: str) -> list[dict[str, Any]]:
    options = Options(builtin(), BundleValues(dashboard_base_url=dashboards))
    found: list[dict[str, Any]] = yaml.load(render(options)[RULES], yaml.CSafeLoader)["groups"]
    return found


def rendered(folder: Path, series: Mapping[str, str], alert: str, dashboards: str = SITE) -> str:
    """What promtool says of the alert's texts after twenty minutes of those of the series that "alerts only" keeps."""
    every = groups_linking(dashboards)
    groups, kept = needed_by(alert, every), metrics_read({"groups": every})
    (folder / "rules.yaml").write_text(yaml.dump({"groups": groups}, Dumper=yaml.CSafeDumper))
    case = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values}
            for name, values in series.items()
            if not name.startswith("kvpressure_") or name.split("{")[0] in kept
        ],
        "alert_rule_test": [{"eval_time": "20m", "alertname": alert, "exp_alerts": []}],
    }
    file = folder / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}))
    result = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    return (result.stdout + result.stderr).replace(str(folder), "")  # whose name has numbers of its own


NAMED = {
    "InferenceSlow": "slow_badly",
    "InferenceStalled": "stuck",
    "InferenceRequestsFailing": "losing_requests_badly",
}


def of_engine(pod: str, *, verdict: str = "", value: float = 0.95, action: str = "", model: str = "m") -> EngineState:
    """An engine that is slow, stalled and loses requests."""
    namespace, _, name = pod.rpartition("/")
    signals = Signals(
        time=0.0,
        load=LoadSignals(waiting=712, running=256, in_flight=968),
        requests=RequestSignals(requests_lost_ratio=0.87, failed_ratio=0.87, abandoned_usual_ratio=0.021),
        progress=ProgressSignals(seconds_without_progress=250),
    )
    slow = Slow("ttft", 41.2, 0.103, badly=True)
    published: dict[str, bool | None] = dict.fromkeys(NAMED.values(), True)
    found = Diagnosis(
        verdict or "unknown",
        value,
        None,
        0.0,
        published={**published, "answers_suspect": False},
        grade="strong" if value > 0.9 else "doubtful",
        slow=slow,
    )
    key = EngineKey(namespace, name, model, "0")
    engine = engine_without_values(key, "", "", (), "", EnginePool("chat"), True, 0.0, 0.0, Failure("", "", "", ""))
    cause = Cause("the cause", action)
    explain = (lambda _: cause) if verdict else None
    return replace(engine, signals=signals, diagnosis=found, failure=None, explain=explain)


def series_of(*engines: EngineState, cluster: str = "") -> dict[str, str]:
    """What is scraped of them for half an hour."""
    state = State(time=0.0, engines=engines)
    mark = f'{{cluster="{cluster}",' if cluster else "{"
    return {name.replace("{", mark, 1): f"{value}+0x30" for name, value in samples(state)}


CAUSES = (
    (
        {"verdict": "concurrency_limited", "action": "Raise max_num_seqs (--max-num-seqs 32)"},
        "Cause: the cause (95 % certain). First action: Raise max_num_seqs (--max-num-seqs 32)."
        " Run: kvpressure mitigate",
    ),
    (
        {"verdict": "kv_pressure", "value": 0.6, "action": "Cap output tokens"},
        "Cause: not certain; most likely the cause (60 %). First action: Cap output tokens. Run: kvpressure mitigate",
    ),
    (
        {"verdict": "unknown", "value": 0.4, "action": "Check the triage steps"},
        "Cause: unknown (the cause). First action: Check the triage steps. Run: kvpressure diagnose",
    ),
)
LOG = "log (kubectl -n inf logs chat-0 --since=15m)"
OTHERWISE = {  # where the verdict asks for nothing, or there is none
    "InferenceSlow": "compare with the other engines",
    "InferenceStalled": f"save the stacks and the {LOG}",
    "InferenceRequestsFailing": f"read the server's {LOG}",
}
FELT = {
    "InferenceSlow": "Time to first token of m ({}) at p95, usually about 100 ms: 41.2s",
    "InferenceStalled": "m ({}) answers nothing, at least 100 requests in flight, for 4m 10s",
    "InferenceRequestsFailing": "Requests of m ({}) that end without an answer: 87%",
}


@pytest.mark.parametrize("alert", FELT)
def test_what_wakes_somebody_says_what_hurts_where_why_and_what_to_do(tmp_path: Path, alert: str) -> None:
    for cause, tail in CAUSES:
        text = rendered(tmp_path, series_of(of_engine("inf/chat-0", **cause)), alert)
        assert f'summary="{FELT[alert].format("inf/chat-0")}"' in text
        assert f"Engine 0, at least 100 requests waiting. {tail} -n inf --pod chat-0" in text
        assert 'pool="chat"' in text
    for verdict in ("healthy", ""):
        text = rendered(tmp_path, series_of(of_engine("inf/chat-0", verdict=verdict)), alert)
        assert f"First action: {OTHERWISE[alert]}" in text
        assert "Run: kvpressure diagnose -n inf --pod chat-0" in text
    bare = rendered(tmp_path, series_of(of_engine("10.0.0.9:8000")), alert)
    assert FELT[alert].format("10.0.0.9:8000") in bare
    assert "Run: kvpressure diagnose --pod 10.0.0.9:8000" in bare


def test_answers_that_may_be_wrong_ask_to_stop_whatever_the_verdict(tmp_path: Path) -> None:
    engine = of_engine("inf/chat-0", verdict="healthy")
    suspect = replace(engine.signals, transfers=TransferSignals(read_after_expiry=1))
    found = replace(engine.diagnosis, published={"answers_suspect": True})
    text = rendered(
        tmp_path, series_of(replace(engine, signals=suspect, diagnosis=found)), "InferenceKVTransferCorrupt"
    )
    assert "Answers of m (inf/chat-0) may be wrong" in text
    assert "First action: take the pair out of service" in text
    assert "Run: kvpressure mitigate -n inf --pod chat-0" in text


def test_it_says_how_most_of_the_lost_requests_ended(tmp_path: Path) -> None:
    engine = of_engine("inf/chat-0")
    usual = "usual share of abandoned ones: about 2 %"
    assert f"Most of them fail, {usual}" in rendered(tmp_path, series_of(engine), "InferenceRequestsFailing")
    given_up = replace(engine.signals.requests, failed_ratio=0.1, abandoned_more_ratio=0.77)
    engine = replace(engine, signals=replace(engine.signals, requests=given_up))
    text = rendered(tmp_path, series_of(engine), "InferenceRequestsFailing")
    assert f"Most of them are abandoned by their clients, {usual}" in text


def test_an_alert_says_what_is_so_now_and_stays_the_same_alert(tmp_path: Path) -> None:
    """Several exporters see the engine and say different things, and change what they say; one takes another pool."""
    every = 'namespace="inf",pod="chat-0",model_name="m",engine="0",role="",harm="slow",level="critical"'
    own, by_turns = f'{every},pool="chat"', " ".join(["9 stale"] * 15)
    series = {
        f'kvpressure_harm{{{own},instance="a",said="Slow. Cause: one."}}': by_turns,
        f'kvpressure_harm{{{own},instance="a",said="Slow. Cause: two."}}': f"_ {by_turns}",
        f'kvpressure_harm{{{own},instance="b",said="Slow. Cause: three."}}': by_turns.replace("9", "8"),
        f'kvpressure_harm{{{every},pool="",instance="c",said="Slow."}}': f"_ {by_turns}".replace("9", "10"),
    }
    text = rendered(tmp_path, series, "InferenceSlow", "")
    assert text.count('alertname="InferenceSlow"') == 1
    assert 'description="Slow. Cause: one."' in text  # twenty minutes after the first
    without = {f"kvpressure_harm{{{own}}}": "9x30"}
    text = rendered(tmp_path, without, "InferenceSlow", "")
    assert 'summary="An engine is in trouble: 9s"' in text
    assert 'description="Cause: unknown' in text


def test_an_objective_says_how_many_miss_it_and_the_worst_engine(tmp_path: Path) -> None:
    model = 'namespace="inf",model_name="m"'
    of_pool = f'{model},pool="chat",role="",objective="ttft"'
    series = {
        **series_of(of_engine("inf/chat-0", verdict="kv_pressure", action="Cap output tokens")),
        f"kvpressure_engine_trouble{{{ENGINE}}}": "7.9+0x30",
        'kvpressure_engine_trouble{namespace="inf",pod="chat-1",model_name="m",engine="0"}': "2+0x30",
        f'kvpressure_objective_target_ratio{{{ENGINE},objective="ttft"}}': "0.99+0x30",
        f'kvpressure_objective_bound_seconds{{{ENGINE},objective="ttft"}}': "2+0x30",
        **{f"pool:kvpressure_objective_burn_rate:{name}{{{of_pool}}}": "15+0x30" for name in ("1h", "5m")},
    }
    text = rendered(tmp_path, series, "InferenceObjectiveBurn")
    assert "m in inf: 15% of the requests miss the objective ttft within 2s (allowed: 1%)" in text
    tail = "cause: the cause. First action: Cap output tokens. Run: kvpressure mitigate -n inf --pod chat-0"
    assert f"In most trouble: chat-0, {tail}" in text


def test_every_alert_that_wakes_somebody_about_an_engine_is_rendered_here() -> None:
    critical = {
        alert.name
        for group in load_groups(Options(builtin()))
        for alert in group.alerts
        for level in alert.levels
        if level.severity == "critical" and alert.subject == "engine"
    }
    assert critical == {*FELT, "InferenceKVTransferCorrupt"}


def test_the_page_of_a_cluster_carries_its_own_figures_and_links_to_it(tmp_path: Path) -> None:
    one, other = (of_engine("inf/chat-0", verdict="host_bound", action=action) for action in ("Lower it", "Raise it"))
    series = series_of(one, cluster="a") | series_of(other, cluster="b")
    output = rendered(tmp_path, series, "InferenceStalled")
    page_of_a = next(page for page in output.split("alertname=") if "&var-cluster=a" in page)
    assert "for 4m 10s, cluster a" in page_of_a
    assert "First action: Lower it." in page_of_a
    assert "Raise it" not in page_of_a


POOL = 'namespace="inf",pool="chat"'
CONTAINER = f'pod="chat-0",container="vllm",model_name="m",{POOL}'
SPOKEN = {  # series and what its text has to say: where, for how long or how much, why, what to type
    "InferenceModelDown": (
        {
            f'kvpressure_pool_answers{{model_name="m",{POOL}}}': "1+0x4 stale",
            f'kvpressure_pod_answers{{pod="chat-0",{POOL}}}': "1+0x4 0+0x30",
            f'kvpressure_down_info{{pod="chat-0",reason="out of GPU memory while serving",{POOL}}}': "_x5 1+0x30",
            'kube_deployment_status_replicas_available{namespace="inf",deployment="chat"}': "0+0x40",
        },
        (
            "m in inf is down for 16m 0s: no pod of chat answers",
            "chat-0: out of GPU memory while serving. kube-state-metrics counts 0 available replicas.",
            "kubectl -n inf get pods -o wide",
        ),
    ),
    "InferenceCapacityLost": (
        {
            f'kvpressure_pod_answers{{pod="chat-0",{POOL}}}': "0+0x40",
            f'kvpressure_down_info{{pod="chat-0",reason="ImagePullBackOff",{POOL}}}': "1+0x40",
            f"kvpressure_start_usual_seconds{{{POOL}}}": "540+0x40",
        },
        (
            "1 pods of chat in inf do not serve",
            "0 answer. chat-0: ImagePullBackOff. A start usually takes up to 9m 0s here.",
        ),
    ),
    "InferenceModelUnobserved": (  # on a host without Kubernetes
        {'kvpressure_pool_answers{model_name="m",pool="10.0.0.9:8000"}': "1+0x2 stale"},
        ("m was last observed 18m 0s ago", "10.0.0.9:8000, so it is unknown whether users get answers."),
    ),
    "InferenceOutOfMemory": (
        {f'kvpressure_out_of_memory_timestamp_seconds{{what="host",level="lost",{CONTAINER}}}': "1200+0x40"},
        (
            "inf/chat-0 is out of memory: host (m)",
            "No pod of the pool answers. Container vllm: the kernel killed it at its host memory limit (OOMKilled).",
            "Run: kvpressure mitigate -n inf --pod chat-0",
        ),
    ),
    "InferenceCrashLoop": (
        {
            f"kvpressure_container_restarts_total{{{CONTAINER}}}": "0+1x40",
            'kvpressure_container_last_termination_info{namespace="inf",pod="chat-0",container="vllm",reason="Error",exit_code="139"}': "1+0x40",  # noqa: E501
        },
        ("inf/chat-0 restarted ", " times in 30 minutes (m)", "Last end: Error, exit code 139."),
    ),
}


@pytest.mark.parametrize("alert", SPOKEN)
def test_the_text_says_what_is_down_why_and_what_to_type(tmp_path: Path, alert: str) -> None:
    series, said = SPOKEN[alert]
    output = rendered(tmp_path, series, alert, "")
    assert [text for text in said if text not in output] == [], output
