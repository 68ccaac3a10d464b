"""The rendered bundle, once a session and worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.bundle.render import render, write
from kvpressure.bundle.rules import Options, load_groups
from kvpressure.bundle.spec import RuleGroup
from kvpressure.settings.thresholds import builtin

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def options() -> Options:
    return Options(builtin())


@pytest.fixture(scope="session")
def groups(options: Options) -> tuple[RuleGroup, ...]:
    return load_groups(options)


@pytest.fixture(scope="session")
def files(options: Options) -> dict[str, str]:
    return render(options)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    write(files, directory)
    return directory


@pytest.fixture(scope="session")
def rules(files: dict[str, str]) -> list[dict[str, Any]]:
    document = yaml.safe_load(files["alerts/kvpressure-rules.yaml"])
    return [{**rule, "group": group} for group in document["groups"] for rule in group["rules"]]
