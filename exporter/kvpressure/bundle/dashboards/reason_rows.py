"""The published numbers behind the worst engine's verdict, with their words, for the first screen."""

from __future__ import annotations

from kvpressure.bundle.dashboards.builder import DashboardContext
from kvpressure.bundle.dashboards.queries import engine, worst
from kvpressure.bundle.text import words
from kvpressure.diagnosis.reasons import REASONS


def reasons_of_the_worst() -> str:
    """All reasons for the verdict of the engine in most trouble."""
    return worst(engine("verdict_reason", by="reason"), 1)


def reason_texts(site: DashboardContext) -> dict[str, str]:
    """Value of the label ``reason`` -> words, with thresholds formatted as everywhere in the bundle."""
    levels = {entry.name: words(entry) for entry in site.thresholds.entries()}
    return {reason.name: reason.words.format_map(levels) for reason in REASONS}
