"""``python -m kvpressure`` is the ``kvpressure`` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.live


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["capacity", "--help"], 0), (["nonsense"], 2)])
def test_the_module_is_the_command(arguments: list[str], status: int) -> None:
    def ran(*start: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    module = ran("-m", "kvpressure")
    assert module[0] == status
    assert module == ran(
        "-c", "import sys; from kvpressure.cli import main; sys.argv[0] = 'kvpressure'; sys.exit(main())"
    )
