"""Certificates from the openssl command: an authority, servers, clients."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


class Certificates:
    """An authority in ``directory`` and what it signs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = directory / "ca.crt"
        new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout ca.key -out ca.crt -subj"
        self._openssl(new, "/CN=test authority")
        self.issue("server", "DNS:localhost,IP:127.0.0.1")
        self.issue("client", "DNS:prometheus.example,email:ops@example.com")
        self.issue("stranger", "DNS:stranger.example")

    def issue(self, name: str, sans: str) -> None:
        """``name.crt`` and ``name.key``, signed by the authority; a new pair each time."""
        (self.directory / f"{name}.ext").write_text(f"subjectAltName={sans}\n")
        curve = "ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        self._openssl(f"req -newkey {curve} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        signed = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 2"
        self._openssl(f"x509 -req -in {name}.csr {signed} -extfile {name}.ext -out {name}.crt")

    def _openssl(self, words: str, *more: str) -> None:
        subprocess.run(
            ["openssl", *words.split(), *more], cwd=self.directory, check=True, capture_output=True, timeout=30
        )

    def client_context(self, name: str | None = None) -> ssl.SSLContext:
        """A client that trusts the authority, with the certificate of ``name`` if given."""
        context = ssl.create_default_context(cafile=str(self.authority))
        if name is not None:
            context.load_cert_chain(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        return context
