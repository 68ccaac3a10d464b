"""Picture the first screen of the incident dashboard and of the exporter's page in five incidents, and print the
answers.

``lab/render/render.sh --incidents --out docs/images``; what the pictures have to tell is in ``docs/dashboards.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from chrome import DARK, picture, saved
from lab.demo.scenario import SCENARIOS, Scenario
from playing import incident
from render import DASHBOARDS, HERE, declared, draw, installed, serving

from kvpressure.settings.thresholds import builtin

SCREEN = (1600, 900)
PHONE = (500, 900)  # the narrowest window that Chromium opens
SECONDS = 900  # of the demo; the incident begins after a fifth, when the engines know their usual latency
STAND, PATIENCE = 45, 240  # seconds


def look(scenario: Scenario, out: Path) -> list[str]:
    """Play ``scenario`` and picture dashboard and page while it stands; returns what is wrong with the dashboard."""
    width, height = SCREEN
    with incident(scenario.name, SECONDS) as demo, serving(demo.prometheus) as base:
        await_verdict(scenario, demo.exporter)
        with saved(f"{demo.exporter}/") as page:
            picture(page, out / f"incident-{scenario.name}-page.webp", width, height, seconds=1)
            if scenario.name == "kv_pressure":
                picture(page, out / "page-dark.webp", width, height, DARK, seconds=1)
                picture(page, out / "page-phone.webp", *PHONE, seconds=1)
        tell(scenario, demo.exporter)
        return draw(
            base,
            DASHBOARDS / "kvpressure-incident.json",
            out / f"incident-{scenario.name}-dashboard.webp",
            height,
            declared(),
        )


def await_verdict(scenario: Scenario, exporter: str) -> None:
    """Wait until what the scenario promises has stood for a while with confidence, or for ``PATIENCE`` seconds."""
    stood, begin = 0, time.monotonic()
    while stood < STAND and time.monotonic() < begin + PATIENCE:
        time.sleep(1)
        one = answer(scenario, exporter)
        stood = stood + 1 if one["verdict"] == scenario.verdict and one["confidence"] >= builtin()["confident"] else 0


def answer(scenario: Scenario, exporter: str) -> dict[str, Any]:
    """What the exporter's JSON says of the scenario's pod."""
    with urlopen(f"{exporter}/api/v1/diagnosis", timeout=5) as response:
        found: dict[str, Any] = next(one for one in json.load(response)["engines"] if one["pod"] == scenario.pod)
    return found


def tell(scenario: Scenario, exporter: str) -> None:
    """Verdict, evidence and first actions as text."""
    one = answer(scenario, exporter)
    print(f"{scenario.name}: {one['pod']}: {one['verdict']} {one['stage'] or ''} {one['confidence']}")
    print(f"  for: {one['supporting']}\n  against: {one['opposing']}\n  signature: {one['documented_signature']}")
    for action in one["mitigation"]["actions"][:3]:
        print(f"  {action['title']} {action['flags']} {action['text']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "build", help="where pictures go (default: lab/render/build)"
    )
    parser.add_argument(
        "--scenario", choices=sorted(SCENARIOS), action="append", help="only this one; repeat for several"
    )
    options = parser.parse_args()
    if not installed():
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    problems = [line for name in options.scenario or SCENARIOS for line in look(SCENARIOS[name], options.out)]
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
