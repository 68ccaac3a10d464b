"""Settings grouped by purpose, common ones first: the order of ``serve --help`` and ``docs/reference/settings.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvpressure.engines.registry import dialects
from kvpressure.settings.options import Option


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    """Settings of one purpose. ``names``: full names, or prefixes that end with a dot."""

    title: str
    text: str
    names: tuple[str, ...]

    def place(self, name: str) -> int | None:
        """Index of the setting ``name`` among ``names``; None if it is not in the group."""
        return next(
            (
                place
                for place, entry in enumerate(self.names)
                if name == entry or (entry.endswith(".") and name.startswith(entry))
            ),
            None,
        )


ENGINES: Final = SettingsGroup("engines", "scraping of inference servers", ("engine.",))
GROUPS: Final = (
    SettingsGroup(
        "common",
        "settings that most installations need",
        (
            "engine.target",
            "web.listen-address",
            "web.config.file",
            "thresholds",
            "record.directory",
            "node-name",
            "log.level",
        ),
    ),
    SettingsGroup("sources", "inputs; --no-collector.NAME turns one off", ("collector.",)),
    ENGINES,
    SettingsGroup("GPUs", "how GPUs are read", ("nvidia.", "gpu.amd.", "host.sys")),
    SettingsGroup(
        "Kubernetes",
        "how this node's pods are found, with their GPUs, logs and cgroups",
        ("kube.", "kubelet.", "host."),
    ),
    SettingsGroup("web server", "addresses, TLS and links", ("web.",)),
    SettingsGroup("recordings", "the flight recorder", ("record.",)),
    SettingsGroup("running", "ticks and log lines", ("interval", "log.")),
)


def group_of(name: str) -> SettingsGroup:
    """The group of the setting ``name``."""
    return next(group for group in GROUPS if group.place(name) is not None)


def grouped(options: Iterable[Option]) -> Mapping[SettingsGroup, list[Option]]:
    """Settings by group, both in their order; groups without a setting are omitted."""
    found: dict[SettingsGroup, list[Option]] = {group: [] for group in GROUPS}
    for option in sorted(options, key=lambda option: group_of(option.name).place(option.name) or 0):
        found[group_of(option.name)].append(option)
    return {_described(group): members for group, members in found.items() if members}


def _described(group: SettingsGroup) -> SettingsGroup:
    """The group of engines names those that this process knows."""
    if group is not ENGINES:
        return group
    return replace(group, text=f"{group.text}: {', '.join(one.title for one in dialects())}")
