"""A server's TLS context from the ``tls_server_config`` section of the exporter-toolkit's web configuration."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvpressure.errors import shown
from kvpressure.files import checked

_CLIENT_AUTH: Final = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


class TlsError(ValueError):
    """A key of the section is wrong (``key``)."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key


def context_from(
    values: Mapping[str, Any], directory: Path
) -> tuple[ssl.SSLContext | None, frozenset[str], tuple[Path, ...]]:
    """(context or ``None`` for an empty section, allowed client SANs, files read). File names are relative to
    ``directory``, that of the configuration. Raises ``TlsError``.
    """
    if not values:
        return None, frozenset(), ()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    files = (*_load_certificate(context, values, directory), *_client_auth(context, values, directory))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    sans = _strings(values, "client_allowed_sans")
    if sans and context.verify_mode is not ssl.CERT_REQUIRED:
        raise TlsError("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
    return context, frozenset(sans), files


def _load_certificate(context: ssl.SSLContext, values: Mapping[str, Any], directory: Path) -> tuple[Path, ...]:
    cert, key = (_file(values, name, directory) for name in ("cert_file", "key_file"))
    if cert is None or key is None:
        raise TlsError("cert_file" if cert is None else "key_file", "missing; allowed: a PEM file")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask on a terminal
    except (OSError, ssl.SSLError) as error:
        raise TlsError("cert_file", f"certificate and key cannot be used: {_words(error)}") from error
    return cert, key


def _client_auth(context: ssl.SSLContext, values: Mapping[str, Any], directory: Path) -> tuple[Path, ...]:
    policy = values.get("client_auth_type") or ""
    if policy not in _CLIENT_AUTH:
        raise TlsError(
            "client_auth_type",
            f"{shown(policy)} is not allowed; allowed: {', '.join(filter(None, _CLIENT_AUTH))} "
            "(unverified client certificates are not supported)",
        )
    authority = _file(values, "client_ca_file", directory)
    if (authority is None) != (_CLIENT_AUTH[policy] is ssl.CERT_NONE):
        if authority is None:
            raise TlsError("client_auth_type", f"{policy} needs client_ca_file")
        raise TlsError("client_ca_file", "given without client_auth_type; allowed: with RequireAndVerifyClientCert")
    if authority is None:
        return ()
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise TlsError("client_ca_file", f"cannot be used: {_words(error)}") from error
    context.verify_mode = _CLIENT_AUTH[policy]
    return (authority,)


def _strings(values: Mapping[str, Any], key: str) -> list[str]:
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TlsError(key, f"{shown(value)} is not allowed; allowed: a list of texts")
    return value


def _file(values: Mapping[str, Any], key: str, directory: Path) -> Path | None:
    """The file that ``key`` names; ``None`` without one."""
    value = values.get(key)
    if not isinstance(value, str | None):
        raise TlsError(key, f"{shown(value)} is not allowed; allowed: text")
    if not value:
        return None
    try:
        checked(directory / value)
    except OSError as error:
        raise TlsError(key, f"{shown(value)} is not a file that can be read") from error
    return directory / value


def _words(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
