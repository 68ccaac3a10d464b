"""Stands in for ``nvidia-smi``: prints what the variable ``FAKE_SMI`` (JSON) says, in the forms that the tool asks for.

``row``: cells of ``--query-gpu`` without the time; ``apps``: (pid, MiB); ``sm``; ``gpm``: percent of the three metrics,
or None for a version that does not know ``--gpm-metrics``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime


def main(arguments: list[str]) -> int:
    told = json.loads(os.environ["FAKE_SMI"])
    if arguments[0] == "dmon":
        gpm = "--gpm-metrics" in arguments
        if gpm and told["gpm"] is None:
            print("Invalid argument: --gpm-metrics")
            return 2
        print("# gpu     sm    mem    enc    dec    jpg    ofa" + ("  smutl  tnutl  drutl" if gpm else ""))
        print("# Idx      %      %      %      %      %      %" + ("  GPM:%  GPM:%  GPM:%" if gpm else ""))
        while True:
            cells = [0, told["sm"], 40, 0, 0, "-", 0, *(told["gpm"] if gpm else ())]
            print("  ".join(str(cell) for cell in cells), flush=True)
            time.sleep(0.2)
    if any(argument.startswith("--query-compute-apps") for argument in arguments):
        for pid, used in told["apps"]:
            print(f"{pid}, {used}")
        return 0
    while True:
        moment = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        print(f"{moment}, " + ", ".join(told["row"]), flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
