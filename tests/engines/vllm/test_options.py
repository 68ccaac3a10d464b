"""Names of options: abbreviations that vLLM takes, misspelt names, and no false alarm on real servers."""

from __future__ import annotations

import json
from pathlib import Path

from kvpressure.engines.vllm import options
from kvpressure.engines.vllm.arguments import parse_logged
from kvpressure.engines.vllm.command_line import read

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_no_option_of_a_real_server_is_called_misspelt() -> None:
    logged = [
        parse_logged(line)[1]
        for path in (FIXTURES / "vllm-logs").glob("*.log")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    argued = [
        read([*container.get("command", []), *container.get("args", [])]).args.explicit
        for path in (FIXTURES / "pods").rglob("*.json")
        for container in json.loads(path.read_text(encoding="utf-8")).get("spec", {}).get("containers", [])
    ]
    names = {name for found in (*logged, *argued) for name in found} - {"model_tag"}
    assert len(names) > 25
    assert options.misspelt(names) == {}
