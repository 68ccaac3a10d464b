"""docs/reference/failure-reasons.md names every reason that a failure can have; the triage page says what to do."""

from __future__ import annotations

from kvpressure.kvevents import contents
from kvpressure.model import reasons
from kvpressure.model.readings import SourceHealth
from kvpressure.model.state import State
from kvpressure.publish.failure_reasons import ANY, EVENTS, SCRAPES, SECTIONS, WEB, Meaning, action
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.web import server
from kvpressure.sources import catalog
from kvpressure.sources.gpu.amd import files as amd
from kvpressure.sources.gpu.amd import smi
from kvpressure.sources.gpu.nvidia import codes as nvidia
from kvpressure.sources.host import cgroup, procfs
from kvpressure.sources.host import container_logs as logs
from kvpressure.sources.kubernetes import node, podresources, pods
from kvpressure.sources.scrape.source import TARGET_LIMIT

EVERYWHERE = {"internal", "timeout", "impossible"}  # of the worker that runs any source


def of(source: str) -> set[str]:
    """The reasons in the sections of a source."""
    return named(*(row for one in SECTIONS if source in one.sources for row in one.rows))


def named(*rows: Meaning) -> set[str]:
    return {reason for row in rows for reason in row.reasons}


OF_AMD = (amd.NO_PERMISSION, amd.BUSY, amd.LOST, amd.IO_ERROR, amd.INVALID_DATA, amd.PARTITIONS_UNSEEN, smi.FAILED)


def test_every_reason_has_its_row_and_no_row_another() -> None:
    assert named(*SCRAPES.rows) == set(reasons.REASONS)
    assert named(*EVENTS.rows) == set(contents.REASONS)
    assert of("nvidia") == of("amd") == {*nvidia.REASONS, *OF_AMD} - {"internal"}
    assert of("pods") == of("node") == {*pods.REASONS, *node.REASONS}
    assert of("podresources") == set(podresources.REASONS)
    assert of("logs") == {*procfs.REASONS, *cgroup.REASONS, *logs.REASONS}
    assert of("engines") == {TARGET_LIMIT}
    assert named(*ANY.rows) == EVERYWHERE
    assert named(*WEB.rows) == set(server.REASONS)
    assert {name for one in SECTIONS for name in one.sources} <= set(catalog.registry())


def test_the_triage_page_says_what_to_do_about_a_source_that_is_down() -> None:
    health = {
        "nvidia": SourceHealth("nvidia", up=False, reason="library_missing"),
        "logs": SourceHealth("logs", up=False, reason="of_an_extension"),
    }
    html = render_page(State(time=0.0, health=health), "node-1", ViewContext())
    assert html.count("To do: ") == 1
    assert f"To do: {action('nvidia', 'library_missing')}." in html


def test_advice_is_that_of_the_source() -> None:
    assert "reboot" in action("nvidia", "timeout")
    assert "kubelet" in action("podresources", "timeout")
    assert action("cgroup", "timeout") == action("", "timeout") != ""
