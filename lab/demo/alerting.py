"""The bundle's rules and Alertmanager configuration, with waiting times shortened for a demo."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from kvpressure.bundle.rules import Options, load_groups, rule_file
from kvpressure.bundle.templating import context, render
from kvpressure.bundle.text import duration
from kvpressure.settings.thresholds import builtin

REAL_SECONDS: Final = 3600.0  # a run of an hour or more needs no shortening
MINIMUM_SECONDS: Final = 0.25
MOST_SIMULATED_SECONDS: Final = 2.5  # between two scrapes and evaluations of a run that is faster than real time
ENGINE_SCRAPES: Final = 4  # scrapes of the exporter for each one of an engine, whose page is larger
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+)(ms|s|m|h|d)")
_RULE_WAITS: Final = ("for", "keep_firing_for")
_EXPRESSION_WAIT: Final = re.compile(r"(kvpressure_finding\{[^}]*\}\[|kvpressure_harm\{[^}]*\} offset )(\w+)")
_ROUTE_WAITS: Final = ("group_wait", "group_interval", "repeat_interval")


def factor(simulated_seconds: float, speed: float) -> float:
    """Factor for waiting times: a run of minutes stands for an hour, and simulated time runs faster."""
    return min(1.0, simulated_seconds / REAL_SECONDS) / speed


def scrape_seconds(speed: float) -> float:
    """Real seconds between two scrapes, and between two evaluations of rules. A slower run needs fewer of them."""
    return max(MINIMUM_SECONDS, min(MOST_SIMULATED_SECONDS, max(1.0, speed)) / speed)


def shortened(text: str, by: float) -> str:
    """A Prometheus duration times ``by``; 0 stays 0, nothing else falls below ``MINIMUM_SECONDS``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration of one unit")
    seconds = int(match[1]) * _UNITS[match[2]]
    return duration(max(MINIMUM_SECONDS, round(seconds * by, 3)) if seconds else 0)


def rules(by: float, interval_seconds: float) -> dict[str, Any]:
    """The plain rule file with every ``for`` and ``keep_firing_for`` times ``by``, evaluated every
    ``interval_seconds``; ranges over findings and offsets of harm are waits, too. Others in expressions stay.
    """
    options = Options(builtin())
    document = rule_file(load_groups(options), options.values)
    for group in document["groups"]:
        group["interval"] = duration(interval_seconds)
        for rule in group["rules"]:
            rule.update({key: shortened(rule[key], by) for key in _RULE_WAITS if key in rule})
            rule["expr"] = _EXPRESSION_WAIT.sub(lambda found: found[1] + shortened(found[2], by), rule["expr"])
    return document


def alertmanager(by: float, receiver_url: str) -> dict[str, Any]:
    """The example configuration with shortened routes and inhibitions; every receiver is ``receiver_url/<name>``."""
    alerts = frozenset(alert.name for group in load_groups(Options(builtin())) for alert in group.alerts)
    document: dict[str, Any] = yaml.safe_load(render("alertmanager.yaml.j2", context(builtin(), alerts=alerts)))
    _shorten_route(document["route"], by)
    for receiver in document["receivers"]:
        for webhook in receiver.get("webhook_configs", ()):
            webhook["url"] = f"{receiver_url}/{receiver['name']}"
    return document


def _shorten_route(route: dict[str, Any], by: float) -> None:
    for key in _ROUTE_WAITS:
        if key in route:
            route[key] = shortened(route[key], by)
    for child in route.get("routes", ()):
        _shorten_route(child, by)


def prometheus(
    rule_path: str, exporter: str, engines: Sequence[str], alertmanager_address: str, scrape_seconds: float
) -> Mapping[str, Any]:
    """Configuration of a Prometheus that scrapes the demo's exporter and its engines, whose histograms dashboards
    draw.
    """
    return {
        "global": {
            "scrape_interval": duration(scrape_seconds),
            "evaluation_interval": duration(scrape_seconds),
            "scrape_timeout": duration(scrape_seconds),
        },
        "rule_files": [rule_path],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager_address]}]}]},
        "scrape_configs": [
            {
                "job_name": "kvpressure",
                "honor_labels": True,
                "static_configs": [{"targets": [exporter], "labels": {"node": "demo"}}],
            },
            {
                "job_name": "vllm",
                "scrape_interval": duration(ENGINE_SCRAPES * scrape_seconds),
                "static_configs": [{"targets": list(engines)}],
            },
        ],
    }
