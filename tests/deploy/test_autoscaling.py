"""Autoscaling: the rule before promtool, and what refers to the rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from kvpressure.model.state import VERDICTS
from kvpressure.publish.metrics import METRICS
from tests.deploy.chart import DEPLOY, Json, problems
from tests.helpers.prometheus import accepted

FOLDER: Final = DEPLOY / "autoscaling"
RULES: Final = yaml.safe_load((FOLDER / "rules.yaml").read_text())
RECORDED: Final = "kvpressure:required_replicas:sum"
POOL: Final = 40_000


class Replica(NamedTuple):
    """What Prometheus has of one ready replica; ``None`` = the series is absent."""

    waiting: float
    kv_used_max: float | None
    verdict: str


CASES: Final[dict[str, tuple[Replica, float]]] = {
    "at the target": (Replica(0, 0.7, "healthy"), 1.0),
    "half": (Replica(0, 0.35, "healthy"), 0.5),
    "full with a queue as large as the cache": (Replica(80, 1.0, "kv_pressure"), 2 / 0.7),
    "stalled with a queue": (Replica(80, 1.0, "stalled"), 1.0),
    "host-bound with a queue": (Replica(80, 0.9, "host_bound"), 1.0),
    "waiting for its peer": (Replica(80, 0.9, "transfer_bound"), 1.0),
    "no KV usage": (Replica(80, None, "unknown"), 1.0),
}
"""A replica, and how many replicas its load requires."""


def series(number: int, replica: Replica, role: str = "", of_pool: int = 0) -> list[Json]:
    labels = f'namespace="inference",pod="p{number}{role}{of_pool}",model_name="m{number}",engine="0"'
    pool = f'pool="chat{role and "-"}{role}",role="{role}",source="owner"'
    values: dict[str, float | None] = {
        f"kvpressure_engine_pool_info{{{labels},{pool}}}": 1.0,
        f"kvpressure_requests_waiting{{{labels}}}": replica.waiting,
        f"kvpressure_kv_cache_used_ratio_max{{{labels}}}": replica.kv_used_max,
        f"kvpressure_context_length_mean_tokens{{{labels}}}": POOL / 80,
        f"kvpressure_kv_cache_capacity_tokens{{{labels}}}": POOL,
        **{
            f'kvpressure_verdict{{{labels},verdict="{verdict}"}}': float(verdict == replica.verdict)
            for verdict in VERDICTS
        },
    }
    return [{"series": name, "values": f"{value}x80"} for name, value in values.items() if value is not None]


def promtool(tmp_path: Path, test: Json) -> None:
    """Fails where promtool finds another result than is expected."""
    document = {
        "rule_files": [str(FOLDER / "rules.yaml")],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", **test}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    accepted("promtool", "test", "rules", tmp_path / "test.yaml")


def expected(number: int, value: float) -> Json:
    query = f'round({RECORDED}{{model_name="m{number}"}}, 0.000001)'
    labels = f'{{namespace="inference",pool="chat",model_name="m{number}"}}'
    return {"expr": query, "eval_time": "15m", "exp_samples": [{"labels": labels, "value": round(value, 6)}]}


def test_the_rule_asks_for_replicas_that_help(tmp_path: Path) -> None:
    """In a real Prometheus, with exactly the series that the exporter has in each case."""
    given = [item for number, (one, _) in enumerate(CASES.values()) for item in series(number, one)]
    wanted = [expected(number, value) for number, (_, value) in enumerate(CASES.values())]
    promtool(tmp_path, {"input_series": given, "promql_expr_test": wanted})


def test_pools_of_one_model_are_scaled_apart(tmp_path: Path) -> None:
    """Six prefill servers at 2 % and two decode servers at 99 % with 80 waiting, whose requests fill the cache once:
    decode needs (0.99 + 0.99 + 1) / 0.7 replicas; prefill, whose cache is no measure of its load, stays as it is.
    """
    load = {"prefill": (6, Replica(0, 0.02, "healthy")), "decode": (2, Replica(40, 0.99, "kv_pressure"))}
    given = [item for role, (count, one) in load.items() for n in range(count) for item in series(0, one, role, n)]
    wanted = {"prefill": 6, "decode": 2.98 / 0.7}
    samples = [
        {
            "labels": f'{{namespace="inference",pool="chat-{role}",model_name="m0",role="{role}"}}',
            "value": round(value, 6),
        }
        for role, value in wanted.items()
    ]
    asked = {"expr": f"round({RECORDED}, 0.000001)", "eval_time": "15m", "exp_samples": samples}
    promtool(tmp_path, {"input_series": given, "promql_expr_test": [asked]})


def test_a_rising_cache_asks_before_it_is_full(tmp_path: Path) -> None:
    """0.2 % more every 15 s: 0.12 + 0.002 × 60 = 0.24 after 15 minutes, 0.264 three minutes later."""
    labels = 'namespace="inference",pod="p0",model_name="m0",engine="0"'
    rising = [
        {"series": f"kvpressure_kv_cache_used_ratio_max{{{labels}}}", "values": "0.12+0.002x80"},
        {"series": f"kvpressure_requests_waiting{{{labels}}}", "values": "0x80"},
        {"series": f'kvpressure_engine_pool_info{{{labels},pool="chat",role="",source="owner"}}', "values": "1x80"},
    ]
    promtool(tmp_path, {"input_series": rising, "promql_expr_test": [expected(0, 0.264 / 0.7)]})


def test_the_rule_uses_metrics_that_exist() -> None:
    names = set(re.findall(r"\bkvpressure_\w+", str(RULES)))
    known = {f"kvpressure_{metric.name.removeprefix('kvpressure_')}" for metric in METRICS}
    assert names <= known
    verdicts = set(re.search(r'verdict=~"([^"]+)"', str(RULES))[1].split("|"))
    assert verdicts <= set(VERDICTS)


@pytest.mark.slow
def test_what_scales_asks_for_the_rule() -> None:
    rules = {rule["record"] for group in RULES["groups"] for rule in group["rules"]}
    keda = yaml.safe_load((FOLDER / "keda-scaledobject.yaml").read_text())
    hpa = yaml.safe_load((FOLDER / "hpa.yaml").read_text())
    adapter: Any = yaml.safe_load((FOLDER / "prometheus-adapter-values.yaml").read_text())
    assert RECORDED in rules
    (trigger,) = keda["spec"]["triggers"]
    assert RECORDED in trigger["metadata"]["query"]
    (external,) = adapter["rules"]["external"]
    assert f'"{RECORDED}"' in external["seriesQuery"]
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == external["name"]["as"]
    assert problems([hpa]) == []
    operator = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())
    assert operator["spec"] == RULES
    assert problems([operator]) == []
