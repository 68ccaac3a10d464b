"""The real Prometheus and Alertmanager beside the demo: nobody is alarmed by the start itself."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvpressure.demo.stack import Stack, installed
from serve_process import LISTEN, QUIET, Process


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
            time.sleep(2)
            with urlopen(f"{stack.prometheus.url}/api/v1/rules?type=alert", timeout=5) as answer:
                groups = json.load(answer)["data"]["groups"]
        finally:
            stack.stop()
    finally:
        process.stop()
    assert any(
        rule["name"] == "KvpressureExporterAbsent" and rule["health"] == "ok"
        for group in groups
        for rule in group["rules"]
    )
    assert [
        alert["labels"]["alertname"] for alert in sent if alert["labels"]["alertname"].startswith("KvpressureExporter")
    ] == []
