"""Check a built image: what its configuration says, what lies in it, and that it serves as the DaemonSet starts it.

``--root`` is the image's file system, mounted. The exporter is started in it by ``unshare`` and ``setpriv`` under the
profile of the chart: root read-only, no capabilities, no new privileges; once as uid 0 with the kubelet's socket
mounted read-only, once as uid 65532 with the same socket, which it must not be able to use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LABELS: Final = ("title", "description", "licenses", "vendor", "version", "revision", "created", "source", "url")
START_SECONDS: Final = 30.0

UNWANTED: Final = {
    "compiler": re.compile(
        r"/bin/([a-z0-9_]+-linux-gnu-)?(cc|c89|c99|gcc|g\+\+|c\+\+|clang|tcc|as|ld|make|go|rustc|cargo)(-[\d.]+)?$"
    ),
    "installer": re.compile(
        r"/bin/(pip|wheel|easy_install)[\d.]*$|/(pip|setuptools|wheel|pkg_resources|ensurepip)/__init__\.py$"
        r"|/(pip|setuptools|wheel)-[^/]*\.(whl|dist-info)(/|$)"
    ),
    "shell history": re.compile(r"/\.(bash|sh|python|node_repl)_history$"),
    "cache": re.compile(r"^/root/\.cache/|^/tmp/|^/opt/.*/__pycache__/"),
    "sources of the build": re.compile(r"^/src/"),
}
"""What must not be in the image -> paths by which it is recognised."""

SERVE: Final = """
set -e
root=$1; uid=$2; sockets=$3; shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/mnt"
mkdir "$root/mnt/sockets"
mount --bind "$sockets" "$root/mnt/sockets"
mount -o remount,bind,ro "$root/mnt/sockets"
mount --rbind /proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --bind /dev/null "$root/dev/null" 2>/dev/null || mount -t devtmpfs devtmpfs "$root/dev"
mount -o remount,bind,ro "$root"
if touch "$root/writable" 2>/dev/null; then echo "the root is not read-only" >&2; exit 9; fi
exec chroot "$root" /usr/bin/setpriv --reuid "$uid" --regid "$uid" --clear-groups --bounding-set=-all --inh-caps=-all \
    --no-new-privs "$@"
"""


def main() -> int:
    """Print one line for each finding; 0 = all as wanted, 1 = not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archive", required=True, help="the image as an OCI archive")
    parser.add_argument("--root", required=True, type=Path, help="its file system, mounted")
    args = parser.parse_args()
    problems = check_config(args.archive) + check_files(args.root) + check_serving(args.archive, args.root)
    for problem in problems:
        print(f"image: WRONG: {problem}")
    print(f"image: {'not as wanted' if problems else 'all as wanted'}")
    return 1 if problems else 0


# --- configuration and size ----------------------------------------------------------------------------------------


def _inspect(archive: str, *options: str) -> Any:
    command = ["skopeo", "inspect", *options, f"oci-archive:{archive}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def check_config(archive: str) -> list[str]:
    """User, command, port, labels; prints the sizes."""
    config = _inspect(archive, "--config")["config"]
    layers = [layer["size"] for layer in _inspect(archive, "--raw")["layers"]]
    print(
        f"image: compressed {sum(layers) / 1e6:.1f} MB, of which {sum(layers[1:]) / 1e6:.1f} MB over the base (layers: "
        f"{', '.join(f'{size / 1e6:.2f}' for size in layers)} MB)"
    )
    labels = config.get("Labels") or {}
    print("image: labels " + " ".join(f"{name}={value!r}" for name, value in sorted(labels.items())))
    wanted = {"User": "0", "Entrypoint": ["kvpressure"], "Cmd": ["serve"]}
    problems = [
        f"{key} is {config.get(key)!r}, not {value!r}" for key, value in wanted.items() if config.get(key) != value
    ]
    problems += [
        f"no label org.opencontainers.image.{name}"
        for name in LABELS
        if not labels.get(f"org.opencontainers.image.{name}")
    ]
    if "9846/tcp" not in (config.get("ExposedPorts") or {}):
        problems.append("port 9846 is not exposed")
    return problems


# --- files ---------------------------------------------------------------------------------------------------------


def check_files(root: Path) -> list[str]:
    """Nothing that a running exporter does not need and an intruder would like."""
    problems: list[str] = []
    total = own = 0
    for path in _files(root):
        name = f"/{path.relative_to(root)}"
        size = path.lstat().st_size
        total += size
        own += size if name.startswith("/opt/") else 0
        problems += [f"{what}: {name}" for what, pattern in UNWANTED.items() if pattern.search(name)]
    print(f"image: unpacked {total / 1e6:.1f} MB, of which {own / 1e6:.1f} MB are the exporter and its dependencies")
    return problems


def _files(root: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(root):
        for name in names:
            yield Path(directory, name)


# --- serving -------------------------------------------------------------------------------------------------------


def check_serving(archive: str, root: Path) -> list[str]:
    """``/metrics`` as uid 0 without capabilities, and as another uid without pod mapping."""
    from tests.sources.kubernetes.kubelet import FakeKubelet, claim

    environment = dict(item.split("=", 1) for item in _inspect(archive, "--config")["config"]["Env"])
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as directory, FakeKubelet(Path(directory) / "kubelet.sock") as kubelet:
        kubelet.pods = [claim("chat-0", devices={"nvidia.com/gpu": ["GPU-1"]})]
        Path(directory).chmod(0o755)
        kubelet.socket.chmod(0o755)  # as the kubelet leaves it: root's
        for uid, mapping in ((0, True), (65532, True), (65532, False)):
            page = _page(root, environment, uid, Path(directory), mapping)
            up = re.search(r'^kvpressure_source_up\{source="podresources"\} (\S+)$', page, re.MULTILINE)
            answer = {"1": "answered", "0": "refused", None: "not asked"}[up[1].split(".")[0] if up else None]
            status = re.search(r"^# status (.*)$", page, re.MULTILINE)
            samples = sum(not line.startswith("#") for line in page.splitlines())
            print(
                f"image: uid {uid}, pod mapping {'on' if mapping else 'off'}: {samples} samples on /metrics, kubelet "
                f"{answer}; {status[1] if status else 'no status'}"
            )
            wanted = "not asked" if not mapping else "answered" if uid == 0 else "refused"
            if samples == 0 or answer != wanted:
                problems.append(f"uid {uid}: {samples} samples, kubelet {answer}; wanted: samples, {wanted}")
            if status is None or "CapEff:0000000000000000" not in status[1]:
                problems.append(f"uid {uid}: ran with capabilities")
    return problems


def _page(root: Path, environment: dict[str, str], uid: int, sockets: Path, mapping: bool) -> str:
    """The metrics page once the sources have been read, with the process's own status as a comment."""
    options = ["--web.listen-address=127.0.0.1:0", "--no-collector.engines"]
    if mapping:
        options += ["--collector.podresources", "--kubelet.socket=/mnt/sockets/kubelet.sock"]
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        SERVE,
        "serve",
        str(root),
        str(uid),
        str(sockets),
        "/usr/bin/env",
        "-i",
        *(f"{name}={value}" for name, value in environment.items()),
        "kvpressure",
        "serve",
        *options,
    ]
    with tempfile.TemporaryFile("w+") as log, _process(command, log) as process:
        address = _wait(lambda: re.search(r"listening address=(\S+)", _text(log)), process, log)[1]
        wanted = 'kvpressure_source_up{source="podresources"}' if mapping else "kvpressure_build_info"
        page: str = _wait(
            lambda: (text := _fetch(f"http://{address}/metrics")) and wanted in text and text, process, log
        )
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    facts = re.findall(r"^(Uid|CapEff|CapBnd|NoNewPrivs):\s+(\w+)", status, re.MULTILINE)
    return page + "# status " + " ".join(f"{name}:{value}" for name, value in facts) + "\n"


@contextlib.contextmanager
def _process(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def _wait(found: Any, process: subprocess.Popen[bytes], log: Any) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        result = found()
        if result:
            return result
        time.sleep(0.1)
    sys.exit(f"image: the exporter did not come up\n{_text(log)}")


if __name__ == "__main__":
    sys.exit(main())
