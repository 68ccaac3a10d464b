"""Pod logs on disk as kubelet and container runtime write them."""

from __future__ import annotations

import gzip
import time
from datetime import UTC, datetime
from pathlib import Path

from kvpressure.sources.kubernetes.pod import Pod


class PodLog:
    """The log directory of one container. ``write`` appends messages in CRI format."""

    def __init__(self, root: Path, pod: Pod, container: str = "vllm", restarts: int = 0) -> None:
        self.directory = root / f"{pod.namespace}_{pod.name}_{pod.uid}" / container
        self.directory.mkdir(parents=True)
        self.restarts = restarts
        self.path.touch()

    @property
    def path(self) -> Path:
        return self.directory / f"{self.restarts}.log"

    def write(self, *messages: str, at: float | None = None, stream: str = "stderr", tag: str = "F") -> None:
        """Append messages, at the time ``at`` (now)."""
        stamp = datetime.fromtimestamp(time.time() if at is None else at, UTC).strftime("%Y-%m-%dT%H:%M:%S.123456789Z")
        with self.path.open("a", encoding="utf-8") as file:
            for message in messages:
                file.write(f"{stamp} {stream} {tag} {message}\n")

    def append(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def rotate(self, name: str = "20260101-000000", compress: bool = False) -> None:
        """Move the file away, as the kubelet does, and begin a new one."""
        rotated = self.path.rename(self.directory / f"{self.path.name}.{name}")
        if compress:
            (rotated.with_name(rotated.name + ".gz")).write_bytes(gzip.compress(rotated.read_bytes()))
            rotated.unlink()
        self.path.touch()

    def restart(self) -> None:
        """The container starts again: a new file beside the old one."""
        self.restarts += 1
        self.path.touch()
