"""Settings by what a person wants, the common ones first: the order of ``serve --help`` and of ``docs/settings.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvpressure.settings_options import Option


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that are looked for together. ``names`` are whole names, or beginnings that end with a dot."""

    title: str
    text: str
    names: tuple[str, ...]

    def place(self, name: str) -> int | None:
        """Where among ``names`` the setting ``name`` stands; None when it does not belong here."""
        return next(
            (
                place
                for place, entry in enumerate(self.names)
                if name == entry or (entry.endswith(".") and name.startswith(entry))
            ),
            None,
        )


PACE: Final = Group(
    "pace of the sources", "how often each source reads, and when a reading of it counts as hanging", ()
)
GROUPS: Final = (
    Group(
        "common",
        "what most installations set",
        (
            "vllm.target",
            "web.listen-address",
            "web.config.file",
            "thresholds",
            "record.directory",
            "node-name",
            "log.level",
        ),
    ),
    Group("sources", "what is read; --no-collector.NAME switches one off", ("collector.",)),
    Group("engines", "how vLLM servers are read", ("vllm.", "plugin.")),
    Group("GPUs", "how GPUs are read", ("nvidia.", "gpu.amd.", "host.sys")),
    Group(
        "Kubernetes",
        "where this node's pods, their GPUs, logs and cgroups are found",
        ("kube.", "kubelet.", "host.", "log-positions"),
    ),
    Group("web server", "what is served", ("web.",)),
    Group("recordings", "the flight recorder, and playing what it wrote", ("record.", "recording.")),
    Group("running", "ticks and log lines", ("interval", "log.")),
    PACE,
)


def group_of(name: str) -> Group:
    """The group of the setting ``name``."""
    if name.startswith("collector.") and name.count(".") == 2:
        return PACE
    return next(group for group in GROUPS if group.place(name) is not None)


def grouped(options: Iterable[Option]) -> Mapping[Group, list[Option]]:
    """Settings by group, both in their order; no group without a setting."""
    found: dict[Group, list[Option]] = {group: [] for group in GROUPS}
    for option in sorted(options, key=lambda option: group_of(option.name).place(option.name) or 0):
        found[group_of(option.name)].append(option)
    return {group: members for group, members in found.items() if members}
