"""The plugin's package, for processes of their own: it is not installed beside the exporter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PLUGIN: Final = ROOT / "plugin"


def with_plugin(environment: Mapping[str, str], without: tuple[str, ...] = ()) -> dict[str, str]:
    """``environment`` where the plugin can be imported, less the variables that begin with one of ``without``."""
    path = os.pathsep.join(filter(None, [str(PLUGIN), environment.get("PYTHONPATH")]))
    return {name: value for name, value in environment.items() if not name.startswith(without)} | {"PYTHONPATH": path}
