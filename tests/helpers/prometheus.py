"""A real Prometheus on blocks that promtool makes of an OpenMetrics file."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.ports import free_port
from tests.helpers.waiting import until


@contextmanager
def backfilled(history: Path) -> Iterator[str]:
    """Serves what ``history`` holds, from its folder; yields the base URL. Needs prometheus and promtool."""
    folder = history.parent
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", history, folder / "data"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (folder / "prometheus.yml").write_text("{}\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *("--storage.tsdb.retention.time=100y", "--log.level=error", f"--web.listen-address={url[7:]}"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _ready(url))
            yield url
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False
