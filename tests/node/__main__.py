"""``python -m tests.node [pytest options]``: these tests in namespaces of their own, or what they lack.

Nothing outside is changed: mounts, network, process numbers and control groups are the node's own and end with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from tests.node.requirements import CGROUPS, controllers, missing

GROUP: Final = "kvpressure-node"
INSIDE: Final = "KVPRESSURE_NODE_INSIDE"
MEMORY_BYTES: Final = 8 << 30  # of everything on the node


def _enter_groups() -> None:
    for controller in controllers():
        group = CGROUPS / controller / GROUP
        group.mkdir(exist_ok=True)
        if controller == "cpuset":
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((CGROUPS / controller / name).read_text())
            (group / "cgroup.clone_children").write_text("1")
        if controller == "memory":
            (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))


def main(options: list[str]) -> None:
    """Run the tests as the first process of a machine of their own."""
    if reason := missing():
        sys.exit(f"try-node: {reason}")
    _enter_groups()
    namespaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup")
    tests = str(Path(__file__).parent)
    pytest = [sys.executable, "-m", "pytest", tests, "-q", "-rA", "-p", "no:cacheprovider", *options]
    command = ["unshare", *namespaces, "--fork", "--kill-child", "--mount-proc", "--propagation", "private", *pytest]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})


if __name__ == "__main__":
    main(sys.argv[1:])
