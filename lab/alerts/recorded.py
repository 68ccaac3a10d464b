"""The recordings: does each incident page that should, and does nothing else?

Recall and precision count the incidents whose cause is settled (grades A and B). Left out of recall are those whose
recording does not hold what a page needs, or ends too soon; ``NOT_VISIBLE`` and ``TOO_SHORT`` say so, and a test checks
that it is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.bundle.rules import Options, load_groups
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from lab.accuracy import data
from lab.alerts.engine import EVALUATION_SECONDS, Active, Episode, episodes
from lab.alerts.replayed import alerts
from lab.alerts.series import SCRAPE_SECONDS

TICK_SECONDS: Final = 5.0  # of the reconstructed incidents
NO_LATENCY: Final = "no latency, queue time or finished request is recorded, and no crash: only that requests wait"
NOT_VISIBLE: Final = {"PRE1": NO_LATENCY, "PRE4": NO_LATENCY}
TOO_SHORT: Final = {
    "FGPU1": ("InferenceModelDown", "alert_for_seconds"),
    "FGPU2": ("InferenceModelDown", "alert_for_seconds"),
    "FHNG10": ("InferenceStalled from gauges alone", "alert_ticket_for_seconds"),
}
"""Incidents that are over before what would page has waited: the alert, and the threshold of its wait."""
QUIET_CAPTURES: Final = ("a_idle", "b_light", "c_steady", "f_recovery")


@dataclass(frozen=True, slots=True)
class Page:
    """One page: the alert, when its condition first held at the recording's own resolution, and when it fired."""

    alert: str
    onset: float
    fired: float
    allowed: float  # the longest delay: ``for``, two evaluations and two scrapes

    @property
    def in_time(self) -> bool:
        """Fired soon enough."""
        return self.fired - self.onset <= self.allowed


@dataclass(frozen=True, slots=True)
class Played:
    """One incident and what fired in it."""

    incident: data.Incident
    pages: tuple[Page, ...]
    tickets: tuple[str, ...]

    @property
    def settled(self) -> bool:
        """Its cause is known, so its label counts."""
        return self.incident.grade != "C"

    @property
    def missing(self) -> str:
        """Why no page can be expected from this recording; empty when it can."""
        if self.incident.id in TOO_SHORT:
            alert, wait = TOO_SHORT[self.incident.id]
            return f"it lasts {self.incident.end - self.incident.start:g} s, and {alert} waits {builtin()[wait]:g} s"
        return NOT_VISIBLE.get(self.incident.id, "")

    @property
    def must_page(self) -> bool:
        """Counts for recall."""
        return self.settled and self.incident.page == "yes" and not self.missing


@dataclass(frozen=True, slots=True)
class Quiet:
    """A recording of a server that nobody need be woken for."""

    name: str
    label: str
    minutes: float
    pages: tuple[Episode, ...]
    tickets: tuple[str, ...]


def waits() -> dict[str, float]:
    """``for`` of the paging level of every alert that pages, in seconds."""
    return {
        alert.name: level.for_seconds
        for group in load_groups(Options(builtin()))
        for alert in group.alerts
        for level in alert.levels
        if level.wakes
    }


def _page(name: str, found: Sequence[Episode], fine: Sequence[Active] | None) -> Page:
    first = min((one for one in found if one.name == name and one.pages), key=lambda one: one.start)
    onset = first.pending_since if fine is None else min(one.at for one in fine if one.name == name and one.pages)
    return Page(name, onset, first.start, waits()[name] + 2 * EVALUATION_SECONDS + 2 * SCRAPE_SECONDS)


def _tickets(found: Sequence[Episode]) -> tuple[str, ...]:
    return tuple(sorted({episode.name for episode in found if not episode.pages and episode.severity != "info"}))


def incidents(timed: int = 1) -> list[Played]:
    """Every reconstructed incident, replayed and evaluated; ``timed``: the onset is taken at the recording's own
    resolution for all that page, or for each third, fourth, ... of them, which is most of the work, and at that of the
    evaluations for the others.
    """
    wanted = data.incidents()
    found = {name: episodes(active) for name, active in alerts(item.name for item in wanted).items()}
    paging = [name for name, ones in found.items() if any(one.pages for one in ones)]
    fine = alerts(paging[::timed], TICK_SECONDS, TICK_SECONDS)
    return [
        Played(
            item,
            tuple(
                _page(alert, found[item.name], fine.get(item.name))
                for alert in sorted({one.name for one in found[item.name] if one.pages})
            ),
            _tickets(found[item.name]),
        )
        for item in wanted
    ]


def quiet_labels() -> dict[str, str]:
    """BurstGPT, the captures of an idle and a healthy server, and the other real runs without KV pressure."""
    labels = {
        item.name: item.label
        for item in data.telemetry()
        if item.label in (data.BAIT, "cap_or_compute_bound_no_kv_pressure")
    }
    return labels | {f"vllm-cpu/{name}.jsonl.gz": "idle" if name == "a_idle" else "healthy" for name in QUIET_CAPTURES}


def quiet() -> list[Quiet]:
    """What fires in the recordings of ``quiet_labels``."""
    labels = quiet_labels()
    return [_quiet(name, labels[name], episodes(active)) for name, active in alerts(labels).items()]


def _quiet(name: str, label: str, found: Sequence[Episode]) -> Quiet:
    return Quiet(name, label, _minutes(name), tuple(episode for episode in found if episode.pages), _tickets(found))


def _minutes(name: str) -> float:
    with Reader(data.RECORDINGS / name) as reader:
        times = [snapshot.time for snapshot in reader]
    return (times[-1] - times[0]) / 60


def recall(played: Sequence[Played]) -> tuple[int, int]:
    """Incidents that page, of those that must."""
    wanted = [item for item in played if item.must_page]
    return sum(bool(item.pages) for item in wanted), len(wanted)


def precision(played: Sequence[Played]) -> tuple[int, int]:
    """Incidents labelled for a page, of those settled ones that page."""
    paged = [item for item in played if item.settled and item.pages]
    return sum(item.incident.page == "yes" for item in paged), len(paged)
