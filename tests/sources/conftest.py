"""What several tests of the Kubernetes sources need."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpressure.engines.vllm.dialect import VLLM
from kvpressure.settings.settings import Settings
from kvpressure.sources.kubernetes import command_lines, podspec
from tests.sources.kubernetes.apiserver import FakeApi
from tests.sources.kubernetes.objects import NODE


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """An API server that answers everybody."""
    with FakeApi() as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings whose files lie in this test's directory unless given."""

    def build(**fields: Any) -> Settings:
        return Settings(
            **{
                "node_name": NODE,
                "kube_token_file": tmp_path / "token",
                "kube_ca_file": tmp_path / "ca.crt",
                "kubelet_socket": tmp_path / "kubelet.sock",
                "host_proc": tmp_path / "proc",
                "host_cgroup": tmp_path / "cgroup",
                "host_pod_logs": tmp_path / "pods",
                **fields,
            }
        )

    return build


@pytest.fixture
def commands_read(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every command line that is read from here on."""
    seen: list[object] = []
    told = replace(VLLM, read_command=lambda *given: seen.append(given) or VLLM.read_command(*given))
    for module in (podspec, command_lines):
        monkeypatch.setattr(module, "dialects", lambda: (told,))
        monkeypatch.setattr(module, "default", lambda: told)
    return seen


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def self_signed(where: Path) -> tuple[Path, Path]:
    """Certificate and key, written to ``where``."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kube"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *more], cwd=where, check=True, capture_output=True)
    return where / "cert.pem", where / "key.pem"
