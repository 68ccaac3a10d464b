"""The source of pods: the engines of this node, their metrics endpoints, and the state of their containers.

One list and watch of this node's pods, or one per configured namespace. Watchers update the view in their threads;
``read`` only reads it. While a watch is broken the view may be outdated: ``read`` then fails with the reason (its
series are absent), but the engines are still scraped.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvpressure.sources.base import Reading, SourceError, SourceSettings, isolated
from kvpressure.sources.kubernetes.api import BACKOFF_SECONDS, KubeApi, Watcher
from kvpressure.sources.kubernetes.api import REASONS as KUBE_REASONS
from kvpressure.sources.kubernetes.command_lines import CommandLines
from kvpressure.sources.kubernetes.discovery import TOO_MANY_PODS
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.kubernetes.pod import Pod, discovered, with_uids_of_their_own
from kvpressure.sources.kubernetes.podspec import (
    REFUSALS,
    SAME_ADDRESS,
    Policy,
    bare_pod,
    read_pod,
)
from kvpressure.sources.places import admitted
from kvpressure.sources.scrape.targets import Target

MAX_PODS: Final = 2000  # kept of one watch; a node has 110 by default and rarely more than 500
"""Pods of the node. Beyond: those without a GPU and ended ones are left out first, and counted.
Shown as: `source_errors_total{source="pods",reason="too_many_pods"}`.
"""

COMMAND_CUT: Final = "command_cut"
REASONS: Final = (
    *KUBE_REASONS,
    *(reason for reason in REFUSALS if reason != "no_endpoint"),
    COMMAND_CUT,
    TOO_MANY_PODS,
)
"""Reasons of this source. Those of ``podspec.REFUSALS`` count once each: engines that cannot be scraped, or only in
part. ``command_cut``: command lines too long to be read fully, once each.
"""


def api_of(settings: SourceSettings) -> KubeApi:
    """The client for these settings."""
    return KubeApi(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file)


class _PodTable:
    """Pods by uid. Beyond ``MAX_PODS`` those with the weakest claims are ``left_out``, which counts them."""

    def __init__(self, shared: SharedDiscovery) -> None:
        self._shared = shared
        self.pods: dict[str, Pod] = {}
        self.left_out = 0

    def put(self, pod: Pod) -> None:
        """Add or replace a pod. What is too much leaves at the next ``shrink``, or with an eighth more at once."""
        self.pods[pod.uid] = pod
        if len(self.pods) > MAX_PODS + MAX_PODS // 8:
            self.shrink()

    def remove(self, uid: str) -> None:
        """Remove a pod; one that is not there was left out."""
        if self.pods.pop(uid, None) is None:
            self.left_out = max(0, self.left_out - 1)

    def shrink(self) -> None:
        """Leave out what is too much."""
        if len(self.pods) <= MAX_PODS:
            return
        owning = self._shared.owning
        kept, left_out = admitted(
            self.pods.values(), MAX_PODS, lambda pod: pod.precedence(owning), lambda pod: (pod.namespace, pod.name)
        )
        self.pods = {pod.uid: pod for pod in kept}
        self.left_out += len(left_out)


class _WatchedPods:
    """The pods of one watch; written by its watcher, read by the source."""

    def __init__(
        self,
        api: KubeApi,
        path: str,
        parameters: Mapping[str, str],
        policy: Policy,
        backoff_seconds: tuple[float, float],
        shared: SharedDiscovery,
    ) -> None:
        self._policy = policy
        self._shared = shared
        self._lock = threading.Lock()
        self._table = _PodTable(shared)
        self._command_lines = CommandLines()  # the watcher's thread only
        self.watcher = Watcher(api, path, parameters, self._replace, self._change, backoff_seconds)

    def pods(self) -> list[Pod]:
        with self._lock:
            self._table.shrink()
            return [pod.with_processes(self._shared.processes) for pod in self._table.pods.values()]

    def left_out(self) -> int:
        """How many pods are left out."""
        with self._lock:
            return self._table.left_out

    def _replace(self, items: Iterator[dict[str, Any]]) -> None:
        table = _PodTable(self._shared)
        for pod in map(self._read, items):  # nothing here holds an item while the next one is decoded
            if pod is not None:
                table.put(pod)
        self._command_lines.keep(table.pods)
        with self._lock:
            self._table = table

    def _read(self, item: dict[str, Any]) -> Pod | None:
        pod = bare_pod(item)  # what stays of one that cannot be read
        if pod is not None:
            with isolated(f"pod {pod.namespace}/{pod.name}", self.watcher.errors):
                return read_pod(item, self._policy, self._command_lines)
        return pod

    def _change(self, kind: str, item: dict[str, Any]) -> None:
        pod = self._read(item)
        if pod is None:
            return
        if kind == "DELETED":
            self._command_lines.forget(pod.uid)
        with self._lock:
            if kind != "ADDED":
                self._table.remove(pod.uid)
            if kind != "DELETED":
                self._table.put(pod)


class PodsSource:
    """Pods of this node. ``read`` returns containers of engines; targets and pods go to ``settings.shared``."""

    name = "pods"

    def __init__(
        self,
        settings: SourceSettings,
        api: KubeApi | None = None,
        backoff_seconds: tuple[float, float] = BACKOFF_SECONDS,
    ) -> None:
        self._shared = settings.shared
        parameters = {"fieldSelector": f"spec.nodeName={settings.node_name}"}
        if settings.kube_selector:
            parameters["labelSelector"] = settings.kube_selector
        paths = [f"/api/v1/namespaces/{name}/pods" for name in settings.kube_namespaces] or ["/api/v1/pods"]
        policy = Policy(bool(settings.kube_selector), settings.kube_engine_tls == "verify")
        client = api or api_of(settings)
        self._views = [
            _WatchedPods(client, path, parameters, policy, backoff_seconds, settings.shared)
            for path in dict.fromkeys(paths)
        ]
        self._reported: set[tuple[str, str, str]] = set()
        self._colliding: set[tuple[str, str, str]] = set()

    def read(self) -> Reading:
        """Containers of this node's engines. Raises ``SourceError`` while no watch is current."""
        for view in self._views:
            view.watcher.start()
        for view in self._views:
            view.watcher.wait()
        failed = [view.watcher.error for view in self._views if view.watcher.error is not None]
        if len(failed) == len(self._views):
            raise SourceError(failed[0], "the view of this node's pods is out of date", self._new_errors())
        self._publish()
        errors = self._new_errors()
        current = [pod for view in self._views if view.watcher.error is None for pod in view.pods()]
        readings = sorted(
            (engine.reading for pod in current for engine in pod.engines),
            key=lambda reading: (reading.namespace, reading.pod, reading.container),
        )
        rows = [pod.without(self._shared.unread) for pod in current]
        uids = {(pod.namespace, pod.name): pod.uid for pod in self._shared.pods or () if pod.engines}
        return Reading(containers=tuple(readings), discovered=discovered(rows), pods=uids, errors=errors)

    def close(self) -> None:
        """End the watches."""
        for view in self._views:
            view.watcher.close()

    def _publish(self) -> None:
        """Hand pods and targets to the other sources; a broken watch keeps its last view."""
        pods = sorted((pod for view in self._views for pod in view.pods()), key=lambda pod: (pod.namespace, pod.name))
        self._shared.pods = with_uids_of_their_own(pods)
        targets: dict[str, Target] = {}
        self._colliding = set()
        owning = self._shared.owning
        for pod in sorted(
            pods, key=lambda pod: pod.precedence(owning)
        ):  # those on the host's network share its address
            for engine in pod.engines:
                for target in engine.targets:
                    if targets.setdefault(target.name, target) is not target:
                        self._colliding.add((SAME_ADDRESS, pod.uid, engine.container))
        self._shared.targets = tuple(targets.values())

    def _new_errors(self) -> dict[str, int]:
        """Failures since the last read: of the watchers' requests, and engines refused for the first time."""
        new: Counter[str] = Counter()
        for view in self._views:
            new += view.watcher.new_errors()
        new[TOO_MANY_PODS] = sum(view.left_out() for view in self._views)  # at every read, while it is so
        refused = {
            (row.reason, pod.uid, row.container)
            for pod in self._shared.pods or ()
            for row in pod.rows
            if row.reason in REASONS
        }
        refused |= {(COMMAND_CUT, pod.uid, name) for pod in self._shared.pods or () for name in pod.cut}
        refused |= self._colliding
        new.update(reason for reason, _, _ in refused - self._reported)
        self._reported = refused
        return {reason: count for reason, count in new.items() if count > 0}
