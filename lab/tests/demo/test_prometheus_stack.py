"""The real Prometheus and Alertmanager beside the demo: nobody is alarmed by the start itself."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from tests.helpers.serve_process import LISTEN, QUIET, Process
from tests.helpers.waiting import until

from lab.demo.prometheus_stack import Stack, installed

pytestmark = pytest.mark.live

OURS = "KvpressureExporter"


def asked(stack: Stack, path: str) -> Any:
    with urlopen(f"{stack.prometheus.url}/api/v1/{path}", timeout=5) as answer:
        return json.load(answer)["data"]


def evaluated(stack: Stack) -> dict[str, str]:
    """Last evaluation of each group with a rule about the exporter. Raises while one was not evaluated, or failed."""
    groups = [
        g for g in asked(stack, "rules?type=alert")["groups"] if any(r["name"].startswith(OURS) for r in g["rules"])
    ]
    assert groups
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    return {group["name"]: group["lastEvaluation"] for group in groups}


TICKS_APART = {"what": "stuck"}.items()  # true here for a moment: scrapes are closer together than ticks may be


def test_no_alert_about_the_exporter_fires_before_its_first_scrape(tmp_path: Path) -> None:
    """With waiting times a thousand times shorter, an alert for what is absent fires at the first evaluation."""
    programs = installed()
    assert programs is not None, "prometheus and prometheus-alertmanager are needed"
    sent: list[dict[str, Any]] = []
    process = Process(*QUIET, *LISTEN)
    try:
        stack = Stack(
            programs,
            tmp_path,
            f"127.0.0.1:{process.port}",
            0.001,
            0.5,
            lambda _, alerts: sent.extend(alerts),
            threading.Event(),
        )
        try:
            first = until(lambda: evaluated(stack))
            until(lambda: not set(first.items()) & set(evaluated(stack).items()))  # each of them once more
            fired = asked(stack, "query?query=" + quote(f'max_over_time(ALERTS{{alertname=~"{OURS}.*"}}[5m])'))[
                "result"
            ]
        finally:
            stack.stop()
    finally:
        process.stop()
    labels = [alert["metric"] for alert in fired] + [alert["labels"] for alert in sent]
    assert [one for one in labels if one["alertname"].startswith(OURS) and not one.items() >= TICKS_APART] == []
