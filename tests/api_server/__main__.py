"""``python -m tests.api_server [pytest options]``: these tests alone, or one line that says what they lack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.api_server.cluster import missing

if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"try-api-server: {reason}")
    sys.exit(pytest.main([str(Path(__file__).parent), "-q", "-rA", *sys.argv[1:]]))
