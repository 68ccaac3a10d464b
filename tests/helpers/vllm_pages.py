"""Recorded vLLM pages for tests, and their translation into other dialects."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "fixtures" / "vllm"
CAPTURES = sorted(str(path.relative_to(ROOT))[: -len(".prom.gz")] for path in ROOT.rglob("*.prom.gz"))


def text_of(capture: str) -> str:
    """A recorded page, e.g. ``d_kv_pressure`` or ``versions/live_0.32.0``."""
    return gzip.decompress((ROOT / f"{capture}.prom.gz").read_bytes()).decode()


def to_openmetrics(text: str, *, underscores: bool = False) -> str:
    """The page as an OpenMetrics writer would have put it: counter families without ``_total``, ``# EOF``.

    ``underscores`` gives sample names without colons, as the Python client does on ``/metrics/``.
    """
    lines = []
    for line in text.splitlines():
        line = re.sub(r"^(# TYPE \S+?)_total counter$", r"\1 counter", line)
        if underscores and not line.startswith("#"):
            line = line.replace("vllm:", "vllm_", 1)
        lines.append(line)
    return "\n".join([*lines, "# EOF"]) + "\n"


def to_quoted(text: str) -> str:
    """The page with quoted names, as written with ``escaping=allow-utf-8``: ``{"vllm:x",engine="0"} 1``."""
    text = re.sub(r"^(vllm:\w+)\{", r'{"\1",', text, flags=re.M)
    return re.sub(r"^(vllm:\w+) ", r'{"\1"} ', text, flags=re.M)
