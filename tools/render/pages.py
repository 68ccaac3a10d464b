"""Take pictures of the exporter's own page in the demo's five incidents, and print what the page answers.

``.venv/bin/python tools/render/pages.py --out docs/images``; needs Chromium, no Prometheus and no npm.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from kvpressure.demo.scenario import SCENARIOS, Scenario

HERE = Path(__file__).parent
SPEED, SECONDS, SETTLE = 2, 240, 12
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--hide-scrollbars")


def look(scenario: Scenario, out: Path, size: str) -> None:
    """Run ``scenario``; once its verdict has stood for a while, picture the page and print its answers."""
    command = [sys.executable, "-u", "-m", "kvpressure.cli", "demo", "--scenario", scenario.name, "--for", str(SECONDS), "--speed", str(SPEED),
               "--no-prometheus"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    try:
        url = ""
        for line in demo.stdout:
            if match := re.match(r"  exporter +(http://\S+)", line):
                url = match[1]
            if "== incident" in line:
                break
        for _ in range(60):
            time.sleep(1)
            if engine(url, scenario)["verdict"] == scenario.verdict:
                break
        time.sleep(SETTLE)
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(["chromium", *BROWSER, f"--user-data-dir={profile}", f"--window-size={size}",
                            f"--screenshot={out / f'page-{scenario.name}.png'}", url], check=True, capture_output=True, timeout=60)
        tell(engine(url, scenario))
    finally:
        demo.terminate()
        demo.wait()


def engine(url: str, scenario: Scenario) -> dict[str, object]:
    """What the JSON says of the scenario's pod."""
    with urlopen(f"{url.rstrip('/')}/api/v1/diagnosis", timeout=5) as answer:
        return next((one for one in json.load(answer)["engines"] if one["pod"] == scenario.pod), {"verdict": ""})


def tell(one: dict[str, object]) -> None:
    """Verdict, evidence and first actions as text."""
    print(f"{one['pod']}: {one['verdict']} {one['stage'] or ''} {one['confidence']}")
    print(f"  for: {one['supporting']}\n  against: {one['opposing']}\n  signature: {one['documented_signature']}")
    for action in one["mitigation"]["actions"][:3]:  # type: ignore[index]
        print(f"  {action['title']} {action['flags']} {action['text']}")


def main() -> None:
    """All scenarios, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "build")
    parser.add_argument("--size", default="1000,1000", help="of the picture (default: 1000,1000)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for scenario in SCENARIOS.values():
        look(scenario, options.out, options.size)


if __name__ == "__main__":
    main()
