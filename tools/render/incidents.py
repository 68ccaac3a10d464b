"""Picture the first screen of the incident board and of the exporter's page in the demo's five incidents, and print the answers.

``tools/render/render.sh --incidents --out docs/images``; what the pictures have to tell is in ``docs/dashboards.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from chrome import picture
from playing import incident
from render import BOARDS, HERE, SETTLE, declared, draw, installed, serving

from kvpressure.demo.scenario import SCENARIOS, Scenario

SCREEN = (1600, 900)
PHONE = (500, 900)  # the narrowest window that Chromium opens
SECONDS = 420  # of the demo; the incident begins after a fifth
PAGE_SECONDS = 3.0  # below the page's refresh


def look(scenario: Scenario, out: Path) -> list[str]:
    """Play ``scenario`` and picture board and page while it stands; returns what is wrong with the board."""
    width, height = SCREEN
    with incident(scenario.name, SECONDS) as demo, serving(demo.prometheus) as base:
        time.sleep(SETTLE)
        page = f"{demo.exporter}/"
        picture(page, out / f"incident-{scenario.name}-page.webp", width, height, seconds=PAGE_SECONDS)
        if scenario.name == "kv_pressure":
            picture(page, out / "page-dark.webp", width, height, "--blink-settings=preferredColorScheme=0", seconds=PAGE_SECONDS)
            picture(page, out / "page-phone.webp", *PHONE, seconds=PAGE_SECONDS)
        tell(scenario, demo.exporter)
        return draw(base, BOARDS / "kvpressure-incident.json", out / f"incident-{scenario.name}-board.webp", height, declared())


def tell(scenario: Scenario, exporter: str) -> None:
    """Verdict, evidence and first actions as text."""
    with urlopen(f"{exporter}/api/v1/diagnosis", timeout=5) as answer:
        one = next(one for one in json.load(answer)["engines"] if one["pod"] == scenario.pod)
    print(f"{scenario.name}: {one['pod']}: {one['verdict']} {one['stage'] or ''} {one['confidence']}")
    print(f"  for: {one['supporting']}\n  against: {one['opposing']}\n  signature: {one['documented_signature']}")
    for action in one["mitigation"]["actions"][:3]:
        print(f"  {action['title']} {action['flags']} {action['text']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "build", help="where pictures go (default: tools/render/build)")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="only this one; repeat for several")
    options = parser.parse_args()
    if not installed():
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    problems = [line for name in options.scenario or SCENARIOS for line in look(SCENARIOS[name], options.out)]
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
