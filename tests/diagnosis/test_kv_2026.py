"""What is said of servers in a pair, with a tier, with sessions that return and with drafts, as somebody labelled them
who had not seen the rules (``tests/fixtures/kv-2026``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.advice.mitigation import plan
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape
from tests.diagnosis.test_transfers import STEP, pages, played

pytestmark = pytest.mark.slow

SITUATIONS = yaml.load(
    (Path(__file__).parents[1] / "fixtures" / "kv-2026" / "situations.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
T = builtin()


def complaints(case: dict[str, Any]) -> list[str]:
    """What a label asks and does not get."""
    states = played(
        (
            parse_scrape(text, target="http://a:8000/metrics", time=1000.0 + STEP * tick)
            for tick, text in enumerate(pages(case, of_sglang='model_name="m"'))
        ),
        case["args"],
    )
    last = states[-1]
    actions = [f"{action.title}. {action.text} {' '.join(action.flags)}" for action in plan(last, T).actions]
    begin = sum(case["phases"][:-1]) // STEP + 20 // STEP
    sure = {s.diagnosis.verdict for s in states[begin:] if s.diagnosis.confidence >= T["confident"]}
    asked = {
        f"verdict {last.diagnosis.verdict} ({last.diagnosis.confidence}: {last.diagnosis.row})": (
            last.diagnosis.verdict in case["right"]
        ),
        f"confident and wrong: {sure & set(case['wrong'])}": not sure & set(case["wrong"]),
        f"first action {actions[:1]}": bool(re.search(case.get("act", ""), " ".join(actions[:1]), re.IGNORECASE)),
        f"an action has {case.get('never')}": "never" not in case
        or not re.search(case["never"], " ".join(actions), re.IGNORECASE),
    }
    return [words for words, holds in asked.items() if not holds]


@pytest.mark.parametrize("case", SITUATIONS, ids=lambda case: case["id"])
def test_it_is_told_as_labelled(case: dict[str, Any]) -> None:
    assert complaints(case) == [], case["what"]
