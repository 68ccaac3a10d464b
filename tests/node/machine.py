"""One node with everything that a Kubernetes node runs: etcd, API server, scheduler, controllers, containerd, kubelet.

It stands in namespaces of its own (``python -m tests.node``). What is no part of the project and not real: the GPU's
driver (the compiled stand-in of the NVIDIA tests, mounted into containers of the runtime class ``nvidia`` as the NVIDIA
container toolkit mounts the real one), its device plugin, and the cluster's DNS. There is no kube-proxy.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import requests
import yaml

from tests.api_server.cluster import ADMIN, Cluster
from tests.helpers.waiting import until
from tests.node import dns
from tests.node.requirements import CONTROLLERS, KUBELET, ROOT, SCHEDULER, controllers
from tests.sources.gpu.nvml_stub import World
from tests.sources.gpu.nvml_stub import build as build_driver
from tests.sources.gpu.nvml_stub import write as write_world

NAME: Final = "gpu-node-0"
ADDRESS: Final = "10.90.0.1"
SERVICE: Final = "10.96.0.1"  # of the API server, as pods know it
POD_NETWORK: Final = "10.244.0.0/24"
NODE_TOKEN: Final = "node-token"
WORLD: Final = "/usr/share/nvml-stub/world"
"""Where containers with the driver see what the GPUs tell."""

KUBELET_CONFIG: Final = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "clusterDNS": [ADDRESS],
    "clusterDomain": "cluster.local",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
    "registerNode": True,
    "resolvConf": "/etc/resolv.conf",
}
CONTAINERD_CONFIG: Final = """\
version = 3
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
      BinaryName = "/usr/local/bin/with-driver"
"""
WITH_DRIVER: Final = r"""#!/bin/sh
# What the NVIDIA container toolkit does: mount the driver's library into each container, then leave the rest to runc.
bundle=; for word in "$@"; do [ "$before" = --bundle ] && bundle=$word; before=$word; done
case " $* " in *" create "*)
  library='{"destination":"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1","type":"bind","source":"/usr/share/nvml-stub/libnvidia-ml.so.1","options":["rbind","ro"]}'
  world='{"destination":"/usr/share/nvml-stub","type":"bind","source":"/usr/share/nvml-stub","options":["rbind","ro"]}'
  sed -i "s|\"mounts\":\[|\"mounts\":[$library,$world,|" "$bundle/config.json"
esac
exec /usr/sbin/runc "$@"
"""
CNI: Final = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": POD_NETWORK}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
    ],
}
TUNABLES: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings of the whole kernel that a kubelet wants. It finds them in files that are mounted over the real ones."""


def run(*command: str | Path, **options: object) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]  # any of its options
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    out: str = done.stdout
    return out


class Machine(Cluster):
    """``with Machine(folder) as machine: machine.image(archive)``; ``root`` is the node's file system."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._port = 443
        self.root = where / "root"
        self._dns: dns.Server | None = None
        self._inside: tuple[str, ...] = ()

    # --- what Cluster does otherwise ----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the API server listens."""
        return f"https://{ADDRESS}:{self._port}"

    def api_server_options(self) -> Sequence[str]:
        """The pods reach it by the address of its service, which this machine has."""
        return (
            "--bind-address=0.0.0.0",
            f"--advertise-address={ADDRESS}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
        )

    def _tokens(self) -> str:
        return f"{super()._tokens()}{NODE_TOKEN},system:node:{NAME},node,system:nodes\n"

    def __enter__(self) -> Machine:
        self._network()
        self._file_system()
        super().__enter__()
        kubeconfig = json.loads(self.kubeconfig.read_text())
        kubeconfig["users"][0]["user"] = {"token": NODE_TOKEN}
        kubeconfig["clusters"][0]["cluster"] = {"server": self.url, "certificate-authority": "/etc/kubernetes/ca.crt"}
        shutil.copy(self.ca, self._file("etc/kubernetes/ca.crt"))
        self._write("etc/kubernetes/kubeconfig", json.dumps(kubeconfig))
        self._start_controllers()
        self.start_containerd()
        self.start_kubelet()
        self._dns = dns.Server((ADDRESS, 53), self.endpoints)
        threading.Thread(target=self._dns.serve_forever, daemon=True).start()
        until(self.node_ready, 180)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("kubelet", "containerd", "kube-scheduler", "kube-controller-manager"):
            self.stop(name)
        super().__exit__()
        self.stop("root")

    # --- the machine --------------------------------------------------------------------------------------------

    def _network(self) -> None:
        run("ip", "link", "set", "lo", "up")
        for address in (ADDRESS, SERVICE):
            run("ip", "address", "add", f"{address}/32", "dev", "lo")
        run("ip", "route", "add", "blackhole", "10.96.0.0/24")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        socket.sethostname(NAME)

    def _file(self, path: str) -> Path:
        found = self.root / path
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def _write(self, path: str, text: str) -> Path:
        found = self._file(path)
        found.write_text(text)
        return found

    def _file_system(self) -> None:
        state = self.where / "disk"
        for path in (self.root, state):
            path.mkdir()
        # What overlay file systems are made of may not lie on one: images do, so that it is a disk of its own.
        run("mount", "-t", "tmpfs", "-o", "size=4g,mode=755", "disk", state)
        for name in ("upper", "work", "containerd"):
            (state / name).mkdir()
        options = f"lowerdir={os.environ[ROOT]},upperdir={state}/upper,workdir={state}/work"
        run("mount", "-t", "overlay", "-o", options, "node", self.root)
        for name in ("proc", "sys", "dev", "run", "tmp", "var/lib/containerd", "var/lib/kubelet", "var/log/pods"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "proc", "proc", self.root / "proc")
        run("mount", "-t", "sysfs", "sysfs", self.root / "sys")
        run("mount", "--rbind", "/dev", self.root / "dev")
        run("mount", "-t", "tmpfs", "run", self.root / "run")
        run("mount", "--bind", state / "containerd", self.root / "var/lib/containerd")
        run("mount", "--bind", self.root / "var/lib/kubelet", self.root / "var/lib/kubelet")
        run("mount", "--make-shared", self.root / "var/lib/kubelet")
        self._groups()
        for name, value in TUNABLES.items():
            fake = self._write(f"run/tunables/{name.replace('/', '-')}", f"{value}\n")
            run("mount", "--bind", fake, self.root / "proc/sys" / name)
        self._write("etc/resolv.conf", f"nameserver {ADDRESS}\n")
        self._write("etc/hosts", f"127.0.0.1 localhost\n{ADDRESS} {NAME}\n")
        self._write("etc/passwd", "root:x:0:0::/root:/bin/sh\n")
        self._write("etc/group", "root:x:0:\n")
        self._write("etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        self._write("etc/containerd/config.toml", CONTAINERD_CONFIG)
        self._write("etc/cni/net.d/10-pods.conflist", json.dumps(CNI))
        self._write("etc/kubernetes/kubelet.yaml", yaml.safe_dump(KUBELET_CONFIG))
        self._write("usr/local/bin/with-driver", WITH_DRIVER).chmod(0o755)
        shutil.copy(os.environ[KUBELET], self._file("usr/local/bin/kubelet"))
        build_driver(self._file("usr/share/nvml-stub/world").parent)
        self._enter()

    def _enter(self) -> None:
        """A mount namespace whose root is the node's: what enters a container later, enters from that root."""
        change = 'cd "$0" && mkdir -p run/outside && pivot_root . run/outside && umount -l /run/outside'
        pivot = f"{change} && exec sleep infinity"
        holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", pivot, self.root], cwd="/"
        )
        until(lambda: Path(f"/proc/{holder.pid}/exe").resolve().name in ("sleep", "coreutils"))
        self._processes["root"] = holder
        self._inside = ("nsenter", f"--mount=/proc/{holder.pid}/ns/mnt")

    def _groups(self) -> None:
        groups = self.root / "sys/fs/cgroup"
        run("mount", "-t", "tmpfs", "cgroups", groups)
        for name in controllers():
            (groups / name).mkdir()
            kind = "none,name=systemd" if name == "systemd" else name
            run("mount", "-t", "cgroup", "-o", kind, "cgroup", groups / name)

    def gpus(self, world: World) -> None:
        """What the driver tells from now on."""
        write_world(self.root / WORLD[1:], world)

    # --- its programs -------------------------------------------------------------------------------------------

    def _start_controllers(self) -> None:
        common = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1")
        self._run("kube-scheduler", os.environ[SCHEDULER], *common)
        self._run(
            "kube-controller-manager",
            os.environ[CONTROLLERS],
            *common,
            f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={self.where / 'service-accounts.key'}",
        )

    def start_containerd(self) -> None:
        """Start the container runtime and wait until it answers."""
        self._run("containerd", *self._inside, "/usr/bin/containerd")
        until(lambda: self.ctr("version", check=False), 60)

    def ctr(self, *arguments: str, check: bool = True) -> bool:
        """Whether a command of containerd's client succeeded."""
        command = [*self._inside, "/usr/bin/ctr", "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done.returncode == 0

    def image(self, archive: Path) -> None:
        """Make the images of an archive known to the node, as if pulled."""
        shutil.copy(archive, self._file("tmp/image.tar"))
        self.ctr("images", "import", "--local", "--no-unpack=false", "/tmp/image.tar")

    def start_kubelet(self) -> None:
        """Start it; the node is ready a little later."""
        self._run(
            "kubelet",
            *self._inside,
            "/usr/local/bin/kubelet",
            "--config=/etc/kubernetes/kubelet.yaml",
            "--kubeconfig=/etc/kubernetes/kubeconfig",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            "--node-labels=nvidia.com/gpu.present=true",
            "--v=2",
        )

    def node_ready(self) -> bool:
        """Whether the scheduler may use the node."""
        for name in ("kubelet", "containerd"):
            process = self._processes[name]
            if process.poll() is not None:
                raise RuntimeError((self.where / f"{name}.log").read_text()[-3000:])
        answer = self.ask("GET", f"/api/v1/nodes/{NAME}")
        if answer.status_code == 404:  # the kubelet has not registered it yet
            return False
        conditions = {item["type"]: item["status"] for item in answer.json()["status"].get("conditions", ())}
        return conditions.get("Ready") == "True"

    def endpoints(self, namespace: str, service: str) -> list[str]:
        """Addresses of a service's ready pods."""
        try:
            selector = f"labelSelector=kubernetes.io/service-name={service}"
            path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{selector}"
            slices = requests.get(
                f"{self.url}{path}", headers={"Authorization": f"Bearer {ADMIN}"}, verify=str(self.ca), timeout=5
            ).json()
        except requests.RequestException:
            return []
        return [
            address
            for one in slices.get("items", ())
            for endpoint in one.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready")
            for address in endpoint["addresses"]
        ]
