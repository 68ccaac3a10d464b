"""kubectl as a subprocess: read-only verbs, bounded in time and output."""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any, Final

from kvpressure.errors import InputError
from kvpressure.parsed import json_of, mapping, mappings

READ_ONLY: Final = ("get", "logs")
TIMEOUT_SECONDS: Final = 15.0
MAX_BYTES: Final = 32 * 1024 * 1024
"""Output of `kubectl`. Beyond: cut."""
MAX_LIST_BYTES: Final = 256 * 1024 * 1024  # a thousand pods of 240 KB
_ERROR_BYTES: Final = 64 * 1024


def _last_line(stream: IO[bytes]) -> str:
    """The last non-empty line of the last bytes."""
    stream.seek(max(0, stream.seek(0, io.SEEK_END) - _ERROR_BYTES))
    lines = [line for line in stream.read(_ERROR_BYTES).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


class KubectlError(Exception):
    """A call failed; the text is kubectl's own first line."""


class Kubectl:
    """Calls kubectl in one context. Raises ``InputError`` when it is not installed."""

    def __init__(self, context: str | None = None) -> None:
        found = shutil.which("kubectl")
        if found is None:
            raise InputError("-n needs kubectl: not found in PATH; install kubectl, or give a URL instead of -n")
        self._command = [found, *(["--context", context] if context else [])]

    def run(self, *arguments: str, limit: int = MAX_BYTES) -> str:
        """Standard output of ``kubectl ARGUMENTS``, cut after ``limit`` bytes. Raises ``KubectlError``."""
        if arguments[0] not in READ_ONLY:
            raise ValueError(f"kubectl {arguments[0]} is not a reading verb")
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                [*self._command, *arguments], stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL
            ) as process,
        ):
            late = threading.Event()

            def give_up() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(TIMEOUT_SECONDS, give_up)
            timer.start()
            try:
                output = process.stdout.read(limit + 1) if process.stdout else b""
                if len(output) > limit:  # the rest would be thrown away
                    process.kill()
                status = process.wait()
            finally:
                timer.cancel()
            if late.is_set():
                raise KubectlError(f"kubectl {arguments[0]}: no answer in {TIMEOUT_SECONDS:.0f} s")
            if status != 0 and len(output) <= limit:
                raise KubectlError((_last_line(errors) or f"kubectl {arguments[0]} failed")[:300])
        return output[:limit].decode(errors="replace")

    def objects(self, kind: str, namespace: str, *more: str) -> list[Mapping[str, Any]]:
        """The items of ``kubectl get KIND -o json``. Raises ``KubectlError``."""
        text = self.run("get", kind, "-n", namespace, *more, "-o", "json", limit=MAX_LIST_BYTES)
        document = json_of(text)
        if document is None:
            cut = len(text) >= MAX_LIST_BYTES // 4  # in characters of up to four bytes
            why = f"more than {MAX_LIST_BYTES >> 20} MiB; name fewer by -l" if cut else "the answer is not JSON"
            raise KubectlError(f"kubectl get {kind}: {why}")
        return mappings(mapping(document).get("items"))

    def object(self, kind: str, name: str, namespace: str) -> Mapping[str, Any]:
        """One object. Raises ``KubectlError``."""
        document = json_of(self.run("get", kind, name, "-n", namespace, "-o", "json"))
        if not isinstance(document, dict):
            raise KubectlError(f"kubectl get {kind} {name}: the answer is not a JSON object")
        return document

    def logs(self, namespace: str, pod: str, container: str, *more: str) -> list[str]:
        """Lines of a container's log. Raises ``KubectlError``."""
        return self.run("logs", "-n", namespace, pod, "-c", container, *more).splitlines()

    def page(self, namespace: str, pod: str, port: int, path: str, scheme: str) -> str:
        """Response of a pod through the API server's proxy. Raises ``KubectlError``."""
        name = pod if scheme == "http" else f"https:{pod}"
        return self.run("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{path}")
