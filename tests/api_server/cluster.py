"""A real kube-apiserver with its etcd on loopback. There is no kubelet, scheduler or controller: pods are bound to a
node and get their status by hand, and nothing starts them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import requests

from tests.helpers.ports import free_port
from tests.helpers.waiting import until

Json = dict[str, Any]

API_SERVER: Final = "KUBE_APISERVER"
ETCD: Final = "ETCD"
DEFINITIONS: Final = "CUSTOM_RESOURCES"
"""Environment variables: two programs, and a folder of CustomResourceDefinitions, which need not be given."""

OF_THE_SERVER: Final = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")
ADMIN: Final = "admin-token"
AUDIT_POLICY: Final = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


def missing() -> str:
    """Why there is no API server; empty when there is one."""
    absent = [name for name in (API_SERVER, ETCD) if not os.access(os.environ.get(name, ""), os.X_OK)]
    return f"set {' and '.join(absent)} to the paths of the programs" if absent else ""


class Cluster:
    """``with Cluster(folder) as cluster: cluster.create(document); cluster.kubectl("get", "pods")``."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.ca = where / "certificates" / "apiserver.crt"
        self.kubeconfig = where / "kubeconfig"
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._session = requests.Session()
        self._session.trust_env = False

    # --- processes ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        self._write_files()
        self._start_etcd()
        self.start_api_server()
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("kube-apiserver", "etcd"):
            self.stop(name)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def _write_files(self) -> None:
        (self.where / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        (self.where / "audit-policy.yaml").write_text(AUDIT_POLICY)
        key = self.where / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {"name": "here", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}
                    ],
                    "users": [{"name": "admin", "user": {"token": ADMIN}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
                    "current-context": "here",
                }
            )
        )

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self._run(
            "etcd",
            os.environ[ETCD],
            f"--data-dir={self.where / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        until(lambda: self._etcd("maintenance/status", {}), 60)

    def start_api_server(self) -> None:
        key = self.where / "service-accounts.key"
        self._run(
            "kube-apiserver",
            os.environ[API_SERVER],
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--secure-port={self._port}",
            f"--cert-dir={self.ca.parent}",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={self.where / 'tokens.csv'}",
            "--allow-privileged",
            f"--audit-policy-file={self.where / 'audit-policy.yaml'}",
            f"--audit-log-path={self.where / 'audit.log'}",
        )
        until(self._ready, 180)

    def _run(self, name: str, *command: str) -> None:
        with (self.where / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def stop(self, name: str) -> None:
        """End one of the two as its supervisor would."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ready(self) -> bool:
        process = self._processes["kube-apiserver"]
        if process.poll() is not None:
            raise RuntimeError((self.where / "kube-apiserver.log").read_text()[-2000:])
        try:
            return self.ask("GET", "/readyz").status_code == 200
        except (OSError, requests.RequestException):
            return False

    def compact(self) -> int:
        """Let etcd forget every version but the current one, and return it."""
        revision = int(self._etcd("kv/range", {"key": base64.b64encode(b"\0").decode()})["header"]["revision"])
        self._etcd("kv/compaction", {"revision": revision, "physical": True})
        return revision

    def _etcd(self, path: str, body: Json) -> Json:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._etcd_port}/v3/{path}", json.dumps(body).encode(), method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: Json = json.load(answer)
        except OSError:
            return {}
        return found

    # --- as an administrator ------------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, token: str = ADMIN, body: Any = None, content: str = "application/json"
    ) -> requests.Response:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content}
        data = None if body is None else json.dumps(body)
        return self._session.request(
            method, f"{self.url}{path}", headers=headers, data=data, verify=str(self.ca), timeout=60
        )

    def create(self, document: Json, dry_run: bool = False) -> requests.Response:
        metadata = document["metadata"]
        plural = f"{document['kind'].lower()}s"
        where = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
        return self.ask("POST", f"/api/v1{where}/{plural}{'?dryRun=All' if dry_run else ''}", body=document)

    def namespace(self, name: str, **labels: str) -> str:
        """A namespace with the account that pods without one of their own use. Made only once."""
        labelled = {f"pod-security.kubernetes.io/{mode}": level for mode, level in labels.items()}
        made = self.create({"kind": "Namespace", "metadata": {"name": name, "labels": labelled}})
        assert made.status_code in (201, 409), made.text
        account = self.create({"kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}})
        assert account.status_code in (201, 409), account.text
        return name

    def pod(self, document: Json) -> Json:
        """Create a pod, or replace one, with its status, and return it."""
        self.namespace(document["metadata"]["namespace"])
        path = f"/api/v1/namespaces/{document['metadata']['namespace']}/pods/{document['metadata']['name']}"
        metadata = {key: value for key, value in document["metadata"].items() if key not in OF_THE_SERVER}
        made = self.create({**document, "metadata": metadata})
        assert made.status_code in (201, 409), made.text
        put = self.ask(
            "PATCH",
            f"{path}/status",
            body={"status": document["status"]},
            content="application/strategic-merge-patch+json",
        )
        assert put.status_code == 200, put.text
        found: Json = put.json()
        return found

    def delete_pod(self, namespace: str, name: str) -> None:
        """At once, as no kubelet is there to end it."""
        answer = self.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", body={"gracePeriodSeconds": 0})
        assert answer.status_code == 200, answer.text

    def kubectl(self, *arguments: str, text: str | None = None, token: str | None = None) -> tuple[int, str, str]:
        identity = ["--token", token] if token else []
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), *identity, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    def token(self, namespace: str, account: str) -> str:
        """A token as the kubelet would mount it for a pod of the account."""
        status, token, problem = self.kubectl("create", "token", account, "-n", namespace, "--duration", "1h")
        assert status == 0, problem
        return token.strip()

    def may(self, token: str, verb: str, resource: str, namespace: str) -> bool:
        """What ``kubectl auth can-i VERB RESOURCE`` says to the token's owner."""
        plural, _, group = resource.partition(".")
        attributes = {"verb": verb, "resource": plural, "group": group, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", token, review)
        assert answer.status_code == 201, answer.text
        allowed: bool = answer.json()["status"]["allowed"]
        return allowed

    def audited(self, user: str) -> list[Json]:
        """What a user asked, from the API server's audit log."""
        path = self.where / "audit.log"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["user"].get("username") == user]

    def define(self, folder: Path) -> set[str]:
        """Install CustomResourceDefinitions and return their kinds."""
        done = self.kubectl("apply", "--server-side", "-f", str(folder))
        assert done[0] == 0, done[2]
        names = re.findall(r"customresourcedefinition\S*/(\S+) ", done[1])
        status, _, problem = self.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", *names)
        assert status == 0, problem
        time.sleep(1)  # discovery lags behind
        status, found, _ = self.kubectl("get", "crd", *names, "-o", "jsonpath={.items[*].spec.names.kind}")
        return set(found.split())
