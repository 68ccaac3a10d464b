"""Images of a node without a registry, as OCI archives: a pause container, and a vLLM server."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Final

from tests.deploy.chart import Json
from tests.node import engine

PAUSE: Final = "localhost/pause:1"
VLLM: Final = "docker.io/vllm/vllm-openai:v0.11.0"
EXPORTER: Final = "registry.internal/kvpressure:0.1.0"
"""As ``docs/deploy.md`` names it."""
_NAME: Final = "org.opencontainers.image.ref.name"
_PAUSE_C: Final = (
    "#include <signal.h>\n#include <unistd.h>\nstatic void end(int n) { (void)n; _exit(0); }\n"
    "int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }\n"
)


class Archive:
    """An OCI archive in memory: the layers and configuration of one image."""

    def __init__(self, path: Path | None = None) -> None:
        self._blobs: dict[str, bytes] = {}
        self._layers: list[Json] = []
        self.config: Json = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers"}}
        self.config["rootfs"]["diff_ids"] = []
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            files = {item.name.removeprefix("./"): tar.extractfile(item) for item in tar if item.isfile()}
            found = {name: file.read() for name, file in files.items() if file is not None}
        manifest = _of(found, json.loads(found["index.json"])["manifests"][0])
        self.config = _of(found, manifest["config"])
        self.config.pop("history", None)
        self._layers = manifest["layers"]
        for layer in self._layers:
            self._blobs[layer["digest"]] = found["blobs/" + layer["digest"].replace(":", "/")]

    def layer(self, files: dict[str, bytes]) -> None:
        """Programs, by path, on top of what there is."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for name, content in files.items():
                item = tarfile.TarInfo(name)
                item.size, item.mode = len(content), 0o755
                tar.addfile(item, io.BytesIO(content))
        described = self._blob(raw.getvalue(), "application/vnd.oci.image.layer.v1.tar")
        self._layers.append(described)
        self.config["rootfs"]["diff_ids"].append(described["digest"])

    def write(self, path: Path, name: str) -> Path:
        """Write the archive under an image's name."""
        config = self._blob(_json(self.config), "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
        described = self._blob(_json({**manifest, "config": config, "layers": self._layers}), manifest["mediaType"])
        described["annotations"] = {"io.containerd.image.name": name, _NAME: name}
        files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"})}
        files["index.json"] = _json({"schemaVersion": 2, "manifests": [described]})
        files |= {f"blobs/{digest.replace(':', '/')}": content for digest, content in self._blobs.items()}
        with tarfile.open(path, "w") as tar:
            for file, content in files.items():
                item = tarfile.TarInfo(file)
                item.size = len(content)
                tar.addfile(item, io.BytesIO(content))
        return path

    def _blob(self, content: bytes, kind: str) -> Json:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._blobs[digest] = content
        return {"mediaType": kind, "digest": digest, "size": len(content)}


def _of(files: dict[str, bytes], described: Json) -> Json:
    found: Json = json.loads(files["blobs/" + described["digest"].replace(":", "/")])
    return found


def _json(document: Json) -> bytes:
    return json.dumps(document).encode()


def pause(where: Path) -> Path:
    """The image of a pod's sandbox: a program that waits, linked statically."""
    program = where / "pause"
    subprocess.run(["cc", "-static", "-Os", "-x", "c", "-", "-o", program], input=_PAUSE_C, text=True, check=True)
    archive = Archive()
    archive.layer({"pause": program.read_bytes()})
    archive.config["config"] = {"Entrypoint": ["/pause"]}
    return archive.write(where / "pause.tar", PAUSE)


def exporter(where: Path, image: Path) -> Path:
    """The exporter's image under the name that the documents give it."""
    return Archive(image).write(where / "kvpressure.tar", EXPORTER)


def vllm(where: Path, image: Path) -> Path:
    """An image that starts, as vLLM's does, ``vllm serve``: the simulated engine of ``lab.demo``."""
    archive = Archive(image)
    archive.layer({"usr/local/bin/vllm": Path(engine.__file__).read_bytes()})
    archive.config["config"]["Entrypoint"] = ["vllm", "serve"]
    archive.config["config"].pop("Cmd", None)
    return archive.write(where / "vllm.tar", VLLM)
