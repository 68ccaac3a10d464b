"""Names of options: abbreviations that vLLM takes, misspelt names, and no false alarm on real servers."""

from __future__ import annotations

import json
from pathlib import Path

from kvpressure.engines.vllm import options
from kvpressure.engines.vllm.arguments import parse_logged
from kvpressure.engines.vllm.command_line import read

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_a_beginning_that_one_option_has_is_that_option() -> None:
    assert read(["vllm", "serve", "m", "--max-num-seq", "8", "--gpu-memory-util=0.7"]).args.values == {
        "model": "m",
        "max_num_seqs": "8",
        "gpu_memory_utilization": "0.7",
    }
    assert read(["vllm", "serve", "m", "--no-enable-prefix-cach"]).args.values["enable_prefix_caching"] == "False"
    assert options.full("max_num") == "max_num", "several options begin so"
    assert options.full("mod") == "mod"


def test_one_or_two_letters_are_a_misspelling() -> None:
    assert options.misspelt(["max_nun_seqs", "tensor_paralel_size", "my_own_option", "max_num_seqs"]) == {
        "max_nun_seqs": "max_num_seqs",
        "tensor_paralel_size": "tensor_parallel_size",
    }


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
