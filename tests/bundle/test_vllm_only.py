"""``alerts/kvpressure-vllm-only-rules.yaml``: what the page says of it."""

from __future__ import annotations

import re

import pytest
from lab.accuracy import data
from lab.alerts import vllm_only
from lab.alerts.replayed import alerts as full_alerts

pytestmark = pytest.mark.live


def test_the_page_states_what_fires_on_the_recordings() -> None:
    """Each fourth incident is on the page as missed, or as a false alarm, exactly if it is one now."""
    wanted = data.incidents()[::4]
    full = {
        name: {item.name for item in active if item.firing and item.pages}
        for name, active in full_alerts(item.name for item in wanted).items()
    }
    own = vllm_only.play(item.name for item in wanted)
    missed, wrong = listed("missed"), listed("fires on incidents where nothing should")
    for item in wanted:
        fired = {one.name for one in own[item.name]}
        assert (item.id in missed) == bool(full[item.name] and not fired), item.id
        assert (item.id in wrong) == bool(item.page == "no" and fired), item.id


def test_the_table_of_alerts_is_that_of_todays_rules() -> None:
    lines = vllm_only.PAGE.read_text(encoding="utf-8").splitlines()
    assert [row for row in vllm_only.alerts_table().splitlines() if row not in lines] == []


def listed(title: str) -> dict[str, str]:
    """Incidents of a line of the page, each with its alerts."""
    page = vllm_only.PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"(\w+) \(([\w, ]+)\)", page.split(f"* {title}: ", 1)[1].splitlines()[0]))
