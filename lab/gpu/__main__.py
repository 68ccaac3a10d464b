"""``python -m lab.gpu``: see ``lab.gpu.command``. Says in one line which packages this Python lacks."""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = {"pynvml": "nvidia-ml-py", "prometheus_client": "prometheus-client", "yaml": "PyYAML"}
"""What the exporter needs here, module -> distribution. torch is needed by some parts, and they say so themselves."""

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("exporter", "plugin")]
    lacking = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if lacking:
        print(
            f"lab.gpu: {sys.executable} lacks {', '.join(lacking)}; run it with a Python that has them, e.g. make"
            " test-gpu GPU_PYTHON=/path/to/python",
            file=sys.stderr,
        )
        sys.exit(2)
    from lab.gpu.command import main

    sys.exit(main())
