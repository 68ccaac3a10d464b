"""docs/failure-reasons.md and its page of engines name every reason that a failure can have, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvpressure.model import reasons
from kvpressure.sources import plugin_reports as allocator
from kvpressure.sources.gpu.nvidia import codes as nvidia
from kvpressure.sources.host import cgroup, procfs
from kvpressure.sources.host import container_logs as logs
from kvpressure.sources.kubernetes import node, podresources, pods

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = (DOCS / "failure-reasons.md").read_text(encoding="utf-8")
ENGINES = (DOCS / "failure-reasons-engines.md").read_text(encoding="utf-8")
EVERYWHERE = {"internal", "timeout"}  # of the worker that runs any source


def named(heading: str) -> set[str]:
    """The reasons in the first column of the table under a heading."""
    return reasons_in(SOURCES.split(f"## {heading}")[1].split("\n#")[0])


def reasons_in(section: str) -> set[str]:
    """The reasons in the first column of a table."""
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {word for row in rows for word in re.findall(r"`([a-z0-9_]+)`", row)}


def test_pages_of_engines() -> None:
    assert reasons_in(ENGINES) == set(reasons.REASONS)


def test_gpus() -> None:
    assert named("GPUs") == set(nvidia.REASONS)


def test_kubernetes() -> None:
    assert named("Kubernetes") == {*pods.REASONS, *node.REASONS}


def test_files_and_sockets() -> None:
    of_allocator = {
        allocator.NO_DIRECTORY,
        allocator.NO_PERMISSION,
        allocator.MALFORMED,
        allocator.NEWER_FORMAT,
        allocator.TOO_LARGE,
    }
    known = {*podresources.REASONS, *procfs.REASONS, *cgroup.REASONS, *logs.REASONS, *of_allocator}
    assert named("The node's files") | EVERYWHERE == known | EVERYWHERE
