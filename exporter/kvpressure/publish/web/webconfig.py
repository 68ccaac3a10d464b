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
from typing import Any, Final

from kvpressure.errors import InputError, shown
from kvpressure.files import checked
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
_CLIENT_AUTH: Final = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


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
        """Read the file for the first time. Raises ``InputError`` with one line."""
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
                raise InputError(
                    f"{path}: {weaker} was removed from the file, and stays in force until the exporter is restarted"
                )
            self._config = config
        except InputError as error:
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
    """Read the file. Raises ``InputError``."""
    root = yaml_nodes.read(path, pipe=False)  # read again while clients wait
    sections = _children(root, "the file", tuple(_SECTIONS))
    parts = {name: _children(node, name, _SECTIONS[name]) for name, node in sections.items()}
    tls = _TlsSection(path.parent, sections.get("tls_server_config", root), parts.get("tls_server_config", {}))
    context, sans, certificates = tls.context()
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
        raise InputError(f"{node.where}: {name} is not a mapping; allowed: {', '.join(allowed) or 'name: value'}")
    for key, child in node.children.items():
        if allowed and key not in allowed:
            raise InputError(f"{child.where}: unknown key {shown(key)} in {name}; allowed: {', '.join(allowed)}")
    return node.children


def _users(nodes: Mapping[str, YamlNode]) -> dict[str, bytes]:
    for name, node in nodes.items():
        if not isinstance(node.value, str) or not _BCRYPT.fullmatch(node.value):
            raise InputError(
                f"{node.where}: basic_auth_users: the password of {shown(name)} is not a bcrypt hash; "
                "allowed: a hash like $2y$10$... (htpasswd -nBC 10)"
            )
    return {name: node.value.encode() for name, node in nodes.items()}


@dataclass(frozen=True, slots=True)
class _TlsSection:
    """``tls_server_config``. ``directory``: that of the file, to which names of files are relative."""

    directory: Path
    section: YamlNode
    keys: Mapping[str, YamlNode]

    def context(self) -> tuple[ssl.SSLContext | None, frozenset[str], tuple[Path, ...]]:
        """(context or ``None`` for an empty section, allowed client SANs, files read). Raises ``InputError``."""
        if not self.keys:
            return None, frozenset(), ()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
        files = (*self._load_certificate(context), *self._client_auth(context))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        sans = self._strings("client_allowed_sans")
        if sans and context.verify_mode is not ssl.CERT_REQUIRED:
            raise self._refused("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
        return context, frozenset(sans), files

    def _load_certificate(self, context: ssl.SSLContext) -> tuple[Path, ...]:
        cert, key = (self._file(name) for name in ("cert_file", "key_file"))
        if cert is None or key is None:
            raise self._refused("cert_file" if cert is None else "key_file", "missing; allowed: a PEM file")
        try:
            context.load_cert_chain(cert, key, password=lambda: "")  # never ask on a terminal
        except (OSError, ssl.SSLError) as error:
            raise self._refused("cert_file", f"certificate and key cannot be used: {_words(error)}") from error
        return cert, key

    def _client_auth(self, context: ssl.SSLContext) -> tuple[Path, ...]:
        policy = self._value("client_auth_type") or ""
        if policy not in _CLIENT_AUTH:
            raise self._refused(
                "client_auth_type",
                f"{shown(policy)} is not allowed; allowed: {', '.join(filter(None, _CLIENT_AUTH))} "
                "(unverified client certificates are not supported)",
            )
        authority = self._file("client_ca_file")
        if (authority is None) != (_CLIENT_AUTH[policy] is ssl.CERT_NONE):
            if authority is None:
                raise self._refused("client_auth_type", f"{policy} needs client_ca_file")
            raise self._refused(
                "client_ca_file", "given without client_auth_type; allowed: with RequireAndVerifyClientCert"
            )
        if authority is None:
            return ()
        try:
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            raise self._refused("client_ca_file", f"cannot be used: {_words(error)}") from error
        context.verify_mode = _CLIENT_AUTH[policy]
        return (authority,)

    def _strings(self, key: str) -> list[str]:
        value = self._value(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._refused(key, f"{shown(value)} is not allowed; allowed: a list of texts")
        return value

    def _file(self, key: str) -> Path | None:
        """The file that ``key`` names; ``None`` without one."""
        value = self._value(key)
        if not isinstance(value, str | None):
            raise self._refused(key, f"{shown(value)} is not allowed; allowed: text")
        if not value:
            return None
        try:
            checked(self.directory / value)
        except OSError as error:
            raise self._refused(key, f"{shown(value)} is not a file that can be read") from error
        return self.directory / value

    def _value(self, key: str) -> Any:
        return self.keys[key].value if key in self.keys else None

    def _refused(self, key: str, text: str) -> InputError:
        return InputError(f"{self.keys.get(key, self.section).where}: tls_server_config: {key}: {text}")


def _words(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
