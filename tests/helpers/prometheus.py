"""A real Prometheus for tests."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.ports import free_port
from tests.helpers.waiting import until


def accepted(*command: str | Path, folder: Path | None = None) -> str:
    """What promtool or amtool prints of something that it takes."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@contextmanager
def prometheus(folder: Path, configuration: Mapping[str, Any], *flags: str) -> Iterator[str]:
    """Runs it in ``folder``, with the data there, once it is ready; yields the base URL."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(configuration)))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *("--log.level=error", f"--web.listen-address={url[7:]}", *flags),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _ready(url))
            yield url
        finally:
            process.terminate()


@contextmanager
def backfilled(history: Path) -> Iterator[str]:
    """Serves what ``history`` (OpenMetrics) holds, from its folder; yields the base URL. Needs promtool too."""
    accepted("promtool", "tsdb", "create-blocks-from", "openmetrics", history, history.parent / "data")
    with prometheus(history.parent, {}, "--storage.tsdb.retention.time=100y") as url:
        yield url


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False
