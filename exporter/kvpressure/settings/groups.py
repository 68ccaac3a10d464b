"""Settings grouped by purpose, common ones first: the order of ``serve --help`` and ``docs/reference/settings.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvpressure.engines.registry import dialects
from kvpressure.settings.options import Option

COMMON: Final = "common"
_GROUPS: Final = {
    COMMON: (
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
    "sources": ("inputs; --no-collector.NAME turns one off", ("collector.",)),
    "engines": ("scraping of inference servers: {engines}", ("engine.",)),
    "GPUs": ("how GPUs are read", ("nvidia.", "host.sys")),
    "Kubernetes": (
        "how this node's pods are found, with their GPUs, logs and cgroups",
        ("kube.", "kubelet.", "host."),
    ),
    "web server": ("addresses, TLS and links", ("web.",)),
    "recordings": ("the flight recorder", ("record.",)),
    "running": ("ticks and log lines", ("interval", "log.")),
}
"""Title -> what it is about, and its settings: full names, or prefixes that end with a dot. A setting is in the first
group that names it.
"""


def grouped(options: Iterable[Option]) -> Iterator[tuple[str, str, list[Option]]]:
    """(title, text, settings) of each group that has a setting."""
    left, engines = list(options), ", ".join(one.title for one in dialects())
    for title, (text, names) in _GROUPS.items():
        members = [
            option
            for name in names
            for option in left
            if option.name == name or (name.endswith(".") and option.name.startswith(name))
        ]
        left = [option for option in left if option not in members]
        if members:
            yield title, text.format(engines=engines), members
