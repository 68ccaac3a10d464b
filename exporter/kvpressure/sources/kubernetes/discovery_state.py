"""What the sources of one process share.

Each source reads in its own thread and leaves here what others need: the pods of this node, the engines to scrape,
the GPUs as last read. Each attribute holds something frozen and is swapped by one assignment, so readers need no
lock. ``None`` = never known; a known value stays when its source fails later, because pods and GPUs do not disappear
with the API server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpressure.model.readings import GpuOwner, GpuReading, Snapshot
    from kvpressure.sources.kubernetes.pod import Pod
    from kvpressure.sources.scrape.targets import Target


class SharedDiscovery:
    """Part of ``Settings``, from which every source is built."""

    def __init__(self) -> None:
        self.pods: tuple[Pod, ...] | None = None  # written by the source ``pods``
        self.targets: tuple[Target, ...] = ()  # written by ``pods``, read by ``engines``
        self.gpus: tuple[GpuReading, ...] = ()  # written by ``observe``, read by ``podresources`` and ``procfs``
        self.owners: tuple[GpuOwner, ...] = ()  # written by ``observe``
        self.wanted: tuple[tuple[str, str], ...] = ()  # written by ``observe``, read by ``plugin``

    def observe(self, snapshot: Snapshot, _state: object) -> None:
        """Listener of the monitor: keep the newest known GPUs and owners, and the pods to read first where not all
        can be (those with a GPU, then those with an engine).
        """
        if snapshot.gpus:
            self.gpus = snapshot.gpus
        if snapshot.owners:
            self.owners = snapshot.owners
        first = [(owner.namespace, owner.pod) for owner in self.owners]
        self.wanted = tuple(dict.fromkeys([*first, *((page.namespace, page.pod) for page in snapshot.pages)]))
