"""The web configuration file of the Prometheus exporter-toolkit: TLS, client certificates, basic auth.

Same file, same meaning. What this server cannot do as asked (unverified client certificates, versions and cipher
suites, certificates inline, headers, a rate limit) fails the start, because every key here concerns security. TLS is
1.2 or newer. File and certificates are checked at every connection: a change applies at once, and one
that cannot be used (half a rotation, a typo) is logged while the last good configuration stays.

As in the toolkit, basic auth and client certificates protect every path, ``/-/healthy`` and ``/-/ready`` included; a
pod's probes then have to be of the kind ``tcpSocket``.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpressure.errors import InputError, shown
from kvpressure.publish.web.tls import TlsError, context_from
from kvpressure.settings import yaml_lines as yaml_nodes
from kvpressure.settings.yaml_lines import YamlNode

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0  # between checks of an unusable configuration
_BCRYPT: Final = re.compile(r"\$2[abxy]?\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "tls_server_config": (
        "cert_file",
        "key_file",
        "client_ca_file",
        "client_auth_type",
        "client_allowed_sans",
    ),
    "basic_auth_users": (),
}


class WebConfigError(InputError):
    """The web configuration is wrong; one line with place, problem and what is allowed."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Content of the file. ``tls`` None = plain HTTP; ``users``: bcrypt hash by name, empty = no auth."""

    tls: ssl.SSLContext | None = None
    allowed_sans: frozenset[str] = frozenset()
    users: Mapping[str, bytes] = field(default_factory=dict)
    files: tuple[Path, ...] = ()  # all files read, to notice changes


class WebConfigFile:
    """The current configuration; without a path, plain HTTP for everybody."""

    def __init__(self, path: Path | None) -> None:
        """Read the file for the first time. Raises ``WebConfigError`` with one line."""
        self._path = path
        self._config = WebConfig() if path is None else parse(path)
        self._seen = _signature(self._config.files)
        self._problem = ""
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def current(self) -> WebConfig:
        """The newest usable configuration."""
        if self._path is None:
            return self._config
        with self._lock:
            seen = _signature(self._config.files)
            # The fault may be in a file that is unknown yet, so a problem is checked again even without a change.
            if seen != self._seen or (self._problem and time.monotonic() >= self._retry_at):
                self._seen = seen
                self._read_again(self._path)
            return self._config

    def _read_again(self, path: Path) -> None:
        try:
            config = parse(path)
            if weaker := _weaker(self._config, config):
                raise WebConfigError(
                    f"{path}: {weaker} was removed from the file, and stays in force until the exporter is restarted"
                )
            self._config = config
        except WebConfigError as error:
            if str(error) != self._problem:
                log.error("web configuration not usable, the last good one stays: %s", error)
            self._problem = str(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        else:
            self._seen = _signature(self._config.files)
            self._problem = ""
            log.info("web configuration read again")


def _weaker(before: WebConfig, after: WebConfig) -> str:
    """The protection that ``before`` has and ``after`` lacks, "" if none. A file being written is incomplete for a
    moment.
    """
    if before.tls is not None and after.tls is None:
        return "tls_server_config"
    if before.users and not after.users:
        return "basic_auth_users"
    if before.tls is not None and after.tls is not None and after.tls.verify_mode < before.tls.verify_mode:
        return "client_auth_type"
    return "client_allowed_sans" if before.allowed_sans and not after.allowed_sans else ""


def _signature(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """Identity of the files' contents; with the inode, because Kubernetes swaps a link."""
    signature: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            signature.append(None)
        else:
            signature.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(signature)


def parse(path: Path) -> WebConfig:
    """Read the file. Raises ``WebConfigError``."""
    try:
        root = yaml_nodes.read(path, pipe=False)  # read again while clients wait
    except yaml_nodes.YamlError as error:
        raise WebConfigError(str(error)) from error
    sections = _children(root, "the file", tuple(_SECTIONS))
    parts = {name: _children(node, name, _SECTIONS[name]) for name, node in sections.items()}
    tls = parts.get("tls_server_config") or {}
    try:
        context, sans, certificates = context_from({key: node.value for key, node in tls.items()}, path.parent)
    except TlsError as error:
        where = tls[error.key].where if error.key in tls else sections["tls_server_config"].where
        raise WebConfigError(f"{where}: tls_server_config: {error}") from error
    return WebConfig(
        tls=context,
        allowed_sans=sans,
        users=_users(parts.get("basic_auth_users", {})),
        files=(path, *certificates),
    )


def _children(node: YamlNode, name: str, allowed: tuple[str, ...]) -> Mapping[str, YamlNode]:
    """The keys of a section, checked against ``allowed`` (empty = any); a section without a value is empty."""
    if node.children is None:
        if node.value is None:
            return {}
        raise WebConfigError(f"{node.where}: {name} is not a mapping; allowed: {', '.join(allowed) or 'name: value'}")
    for key, child in node.children.items():
        if allowed and key not in allowed:
            raise WebConfigError(f"{child.where}: unknown key {shown(key)} in {name}; allowed: {', '.join(allowed)}")
    return node.children


def _users(nodes: Mapping[str, YamlNode]) -> dict[str, bytes]:
    for name, node in nodes.items():
        if not isinstance(node.value, str) or not _BCRYPT.fullmatch(node.value):
            raise WebConfigError(
                f"{node.where}: basic_auth_users: the password of {shown(name)} is not a bcrypt hash; "
                "allowed: a hash like $2y$10$... (htpasswd -nBC 10)"
            )
    return {name: node.value.encode() for name, node in nodes.items()}
