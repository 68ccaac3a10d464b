"""Rendering and checking the chart: Helm itself, and the schemas of Kubernetes and of the Prometheus Operator."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils as kubernetes_schemas

Json = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
KUBERNETES: Final = tuple(f"1.{minor}" for minor in range(28, 38))
SCC_FIELDS: Final = {
    *("apiVersion", "kind", "metadata", "priority", "users", "groups", "volumes", "allowedFlexVolumes"),
    *("allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID", "allowHostPorts"),
    *("allowPrivilegeEscalation", "defaultAllowPrivilegeEscalation", "allowPrivilegedContainer"),
    *("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities", "readOnlyRootFilesystem"),
    *("runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups", "seccompProfiles"),
    *("allowedUnsafeSysctls", "forbiddenSysctls", "userNamespaceLevel"),
}
"""Of security.openshift.io/v1, which kubernetes-validate does not know."""
CI_VALUES: Final[dict[str, Json]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "helm/kvpressure/ci").glob("*.yaml"))
} | {"default": {}}
"""The chart's example values, by name."""
OPERATOR_KINDS: Final = ("PodMonitor", "ServiceMonitor", "PrometheusRule", "AlertmanagerConfig")


def load_script(path: Path) -> ModuleType:
    """A script that is no part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def generator() -> ModuleType:
    return load_script(DEPLOY / "generate.py")


@lru_cache(maxsize=1)
def chart() -> Any:
    return generator().load_chart()


@lru_cache(maxsize=16)
def _rendered(values: str, release: str) -> list[Json]:
    found: list[Json] = generator().documents(chart(), json.loads(values), **json.loads(release))
    return found


def render(values: Json | None = None, **release: Any) -> list[Json]:
    return copy.deepcopy(_rendered(json.dumps(values or {}, sort_keys=True), json.dumps(release)))


def helm_test_objects(values: Json | None = None) -> list[Json]:
    chosen = {"image": {"repository": "kvpressure"}, **(values or {})}
    rendered = chart().render(values=chosen, name="kvpressure", namespace="kvpressure")
    texts = [text for name, text in rendered.items() if "/tests/" in name]
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def of_kind(documents: list[Json], kind: str) -> list[Json]:
    return [item for item in documents if item["kind"] == kind]


def only(documents: list[Json], kind: str) -> Json:
    (found,) = of_kind(documents, kind)
    return found


def name_of(document: Json) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


# --- schemas ----------------------------------------------------------------------------------------------------

# It looks for its schemas and reads ten megabytes of them for each object; the same each time.
kubernetes_schemas.all_versions = cache(kubernetes_schemas.all_versions)
kubernetes_schemas.schema_contents = cache(kubernetes_schemas.schema_contents)


@cache
def _problems(text: str, version: str) -> tuple[str, ...]:
    document = json.loads(text)
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"{name_of(document)} on {version}: {'.'.join(map(str, error.path))}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (f"{name_of(document)} on {version}: {error.message}",)
    return ()


def problems(documents: list[Json], versions: tuple[str, ...] = KUBERNETES) -> list[str]:
    """What the API server of some version, or the operator's resource definitions, would refuse."""
    found = []
    for document in documents:
        if document["kind"] == "SecurityContextConstraints":
            found += [f"{name_of(document)}: {name}: unknown field" for name in document.keys() - SCC_FIELDS]
        elif document["kind"] in OPERATOR_KINDS:
            found += [
                f"{name_of(document)}: {'.'.join(map(str, error.path))}: {error.message}"
                for error in _operator_schema(document["apiVersion"], document["kind"]).iter_errors(document)
            ]
        else:
            text = json.dumps(document, sort_keys=True)
            found += [problem for version in versions for problem in _problems(text, version)]
    return found


@cache
def _operator_schema(version: str, kind: str) -> Any:
    """The schema of a resource of the Prometheus Operator, which refuses unknown fields as ``kubectl apply`` does."""
    from cloudcoil.models.prometheus_operator import v1, v1alpha1

    models = v1alpha1 if version.endswith("/v1alpha1") else v1
    schema = getattr(models, kind).model_json_schema()
    _close(schema)
    return jsonschema.Draft202012Validator(schema)


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)
    elif isinstance(schema, list):
        for part in schema:
            _close(part)
