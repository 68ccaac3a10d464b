"""What the sources of one process share.

Each source reads in its own thread and leaves here what others need: the pods of this node, the engines to scrape,
the GPUs as last read. Each attribute holds something frozen and is swapped by one assignment, so readers need no
lock. ``None`` = never known; a known value stays when its source fails later, because pods and GPUs do not disappear
with the API server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvpressure.sources.places import Place, Precedence

if TYPE_CHECKING:
    from kvpressure.model.readings import GpuOwner, GpuReading, Snapshot
    from kvpressure.sources.kubernetes.pod import Pod, Process
    from kvpressure.sources.scrape.targets import Target


WAY_SECONDS: Final = 0.2  # a page of 64 engines takes a tenth of it


class SharedDiscovery:
    """Part of ``Settings``, from which every source is built."""

    def __init__(self) -> None:
        self.pods: tuple[Pod, ...] | None = None  # written by the source ``pods``
        self.targets: tuple[Target, ...] = ()  # written by ``pods`` or ``processes``, read by ``engines``
        self.processes: Mapping[str, Process] = {}  # by container id; from ``procfs`` to ``pods``
        self.gpus: tuple[GpuReading, ...] = ()  # written by ``observe``, read by ``podresources`` and ``procfs``
        self.owners: tuple[GpuOwner, ...] = ()  # written by ``observe``
        self.scraped: frozenset[Place] = frozenset()  # pods with an engine's page; written by ``observe``
        self.rendering = threading.Lock()  # held while a page is rendered
        self.unread: Mapping[str, tuple[str, str]] = {}  # target -> reason, detail; from ``engines`` to ``pods``

    def give_way(self) -> None:
        """Wait while a page is rendered, because somebody waits for it: Python runs one thread at a time, and would
        give each its turn. Called between two pieces of work; waits for ``WAY_SECONDS`` at most.
        """
        if self.rendering.acquire(timeout=WAY_SECONDS):
            self.rendering.release()

    def observe(self, snapshot: Snapshot, _state: object) -> None:
        """Listener of the monitor: keep the newest known GPUs and owners, and the pods with engines."""
        if snapshot.gpus:
            self.gpus = snapshot.gpus
        if snapshot.owners:
            self.owners = snapshot.owners
        self.scraped = frozenset((page.namespace, page.pod) for page in snapshot.pages)

    @property
    def owning(self) -> frozenset[Place]:
        """The pods that have a GPU."""
        return frozenset((owner.namespace, owner.pod) for owner in self.owners)

    def precedences(self) -> dict[Place, Precedence]:
        """How good the claims of pods are now, by their names."""
        owning = self.owning
        found = dict.fromkeys(owning, Precedence.HAS_GPU)
        found |= {(pod.namespace, pod.name): pod.precedence(owning) for pod in self.pods or ()}
        for place in self.scraped:
            found[place] = min(Precedence.SERVES, found.get(place, Precedence.SERVES))
        return found
