"""A server's TLS context from the ``tls_server_config`` section of the exporter-toolkit's web configuration."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvpressure.errors import shown
from kvpressure.files import checked

_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CURVES: Final = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_CLIENT_AUTH: Final = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_CIPHERS: Final = {  # Go's names, as in the file -> OpenSSL's; "" = TLS 1.3, always on
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
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
    files = _load_certificate(context, values, directory)
    files += _client_auth(context, values, directory)
    _versions(context, values)
    _ciphers(context, values)
    sans = _strings(values, "client_allowed_sans")
    if sans and context.verify_mode is not ssl.CERT_REQUIRED:
        raise TlsError("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
    return context, frozenset(sans), tuple(files)


def _load_certificate(context: ssl.SSLContext, values: Mapping[str, Any], directory: Path) -> list[Path]:
    files: list[Path] = []
    with _pem(values, "cert", directory, files) as cert, _pem(values, "key", directory, files) as key:
        for name, path in (("cert", cert), ("key", key)):
            if path is None:
                raise TlsError(f"{name}_file", "missing; allowed: a PEM file")
        try:
            context.load_cert_chain(str(cert), str(key), password=lambda: "")  # never ask on a terminal
        except (OSError, ssl.SSLError) as error:
            raise TlsError("cert_file", f"certificate and key cannot be used: {_words(error)}") from error
    return files


def _client_auth(context: ssl.SSLContext, values: Mapping[str, Any], directory: Path) -> list[Path]:
    files: list[Path] = []
    policy = values.get("client_auth_type") or ""
    if policy not in _CLIENT_AUTH:
        raise TlsError(
            "client_auth_type",
            f"{shown(policy)} is not allowed; allowed: {', '.join(filter(None, _CLIENT_AUTH))} "
            "(unverified client certificates are not supported)",
        )
    with _pem(values, "client_ca", directory, files) as authority:
        if _CLIENT_AUTH[policy] is ssl.CERT_NONE:
            if authority is not None:
                key = "client_ca_file" if values.get("client_ca_file") else "client_ca"
                raise TlsError(key, "given without client_auth_type; allowed: with RequireAndVerifyClientCert")
            return files
        if authority is None:
            raise TlsError("client_auth_type", f"{policy} needs client_ca_file")
        try:
            context.load_verify_locations(str(authority))
        except (OSError, ssl.SSLError) as error:
            raise TlsError("client_ca_file", f"cannot be used: {_words(error)}") from error
    context.verify_mode = _CLIENT_AUTH[policy]
    return files


def _versions(context: ssl.SSLContext, values: Mapping[str, Any]) -> None:
    lowest, highest = values.get("min_version") or "TLS12", values.get("max_version") or "TLS13"
    for key, value in (("min_version", lowest), ("max_version", highest)):
        if value not in _VERSIONS:
            raise TlsError(
                key, f"{shown(value)} is not allowed; allowed: {', '.join(_VERSIONS)} (older ones are not safe)"
            )
    if _VERSIONS[lowest] > _VERSIONS[highest]:
        raise TlsError("min_version", f"{lowest} is above max_version {highest}")
    context.minimum_version, context.maximum_version = _VERSIONS[lowest], _VERSIONS[highest]


def _ciphers(context: ssl.SSLContext, values: Mapping[str, Any]) -> None:
    suites = _strings(values, "cipher_suites")
    for suite in suites:
        if suite not in _CIPHERS:
            raise TlsError("cipher_suites", f"{shown(suite)} is not allowed; allowed: {', '.join(_CIPHERS)}")
    names = [_CIPHERS[suite] for suite in suites if _CIPHERS[suite]]
    if names:
        context.set_ciphers(":".join(names))
    prefer = values.get("prefer_server_cipher_suites", True)
    if not isinstance(prefer, bool):
        raise TlsError("prefer_server_cipher_suites", f"{shown(prefer)} is not allowed; allowed: true or false")
    if prefer:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    curves = _strings(values, "curve_preferences")
    if curves:
        if len(curves) > 1 or curves[0] not in _CURVES:
            raise TlsError(
                "curve_preferences", f"{shown(', '.join(curves))} is not allowed; allowed: one of {', '.join(_CURVES)}"
            )
        context.set_ecdh_curve(_CURVES[curves[0]])


def _strings(values: Mapping[str, Any], key: str) -> list[str]:
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TlsError(key, f"{shown(value)} is not allowed; allowed: a list of texts")
    return value


@contextmanager
def _pem(values: Mapping[str, Any], name: str, directory: Path, files: list[Path]) -> Iterator[Path | None]:
    """Path of the PEM that ``name`` (inline) or ``name_file`` gives; ``None`` without either.

    OpenSSL takes keys from files only, and the container's file system is read-only, so inline text goes through an
    anonymous file in memory.
    """
    inline, file = values.get(name), values.get(f"{name}_file")
    for key, value in ((name, inline), (f"{name}_file", file)):
        if value is not None and not isinstance(value, str):
            raise TlsError(key, f"{shown(value)} is not allowed; allowed: text")
    if inline and file:
        raise TlsError(name, f"given together with {name}_file; allowed: one of them")
    if inline:
        descriptor = os.memfd_create(name)
        try:
            os.write(descriptor, inline.encode())
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    elif file:
        path = directory / file
        files.append(path)
        try:
            checked(path)
        except OSError as error:
            raise TlsError(f"{name}_file", f"{shown(file)} is not a file that can be read") from error
        yield path
    else:
        yield None


def _words(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
