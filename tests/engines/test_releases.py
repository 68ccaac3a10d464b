"""Every kept release: its options are read as ``lab/packages.py`` reads them, and its metrics are read or listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.packages import RELEASES, merged, unknown

from kvpressure.engines import options
from kvpressure.engines.base import EngineDialect
from kvpressure.engines.registry import dialect
from kvpressure.engines.vllm.arguments import parse_logged
from kvpressure.engines.vllm.command_line import OPTIONS, read
from kvpressure.model.arguments import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEWEST = ("vllm-0.33.0", "sglang-0.5.23")
SERVERS = {"vllm": ("vllm", "serve", "org/m"), "sglang": ("python3", "-m", "sglang.launch_server")}
every_release = pytest.mark.parametrize("path", sorted(RELEASES.glob("*.json")), ids=lambda path: path.stem)


def started(server: EngineDialect, *words: str) -> EngineArgs:
    return server.read_command((*SERVERS[server.name], *words), {}).args


@every_release
def test_every_spelling_of_a_release_is_read_and_leaves_the_arguments_complete(path: Path) -> None:
    server = dialect(path.stem.partition("-")[0])
    for spelling in json.loads(path.read_text(encoding="utf-8"))["options"]:
        name, kind = server.options.spellings[spelling]
        words = {options.FLAG: (), options.OFF: (), options.LIST: ("7", "8")}.get(kind, ("7",))
        found = started(server, spelling, *words, "--port" if name != "port" else "--host", "9")
        value = {options.FLAG: "True", options.OFF: "False"}.get(kind, "7")
        assert (found.values[name], found.values["port" if name != "port" else "host"]) == (value, "9")
        assert found.complete is (name != "config")


@pytest.mark.parametrize("engine", SERVERS)
def test_the_tables_of_options_are_those_of_the_kept_releases(engine: str) -> None:
    kept = Path(options.__file__).with_name(engine) / "options.json"
    assert json.loads(kept.read_text(encoding="utf-8")) == merged(engine)


@pytest.mark.parametrize("release", NEWEST)
def test_every_metric_of_the_newest_releases_is_read_or_listed_with_a_reason(release: str) -> None:
    found = json.loads((RELEASES / f"{release}.json").read_text(encoding="utf-8"))
    assert unknown(release.partition("-")[0], found)["metrics"] == []


@pytest.mark.parametrize(
    "words",
    [("--made-up", "5"), ("--made-up",), ("stray",), ("-x", "5"), ("--max", "5")],
    ids=["an option", "a flag", "a word", "a letter", "a beginning of several"],
)
@pytest.mark.parametrize("engine", SERVERS)
def test_what_no_release_has_may_set_anything(engine: str, words: tuple[str, ...]) -> None:
    found = started(dialect(engine), "--port", "1", *words)
    assert found.is_explicit("max_num_seqs") is None
    assert found.values["port"] == "1"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--device-memory-utilization", "0.8"), "gpu_memory_utilization", "0.8"),
        (("--disable-prefix-caching",), "enable_prefix_caching", "False"),
        (("--enable-chunked-prefill", "False"), "enable_chunked_prefill", "False"),
        (("--served-model-name", "a", "b", "--port", "1"), "served_model_name", "a"),
        (("-O3",), "compilation_config", "3"),
        (("-cc.cudagraph_mode", "NONE"), "compilation_config.cudagraph_mode", "NONE"),
        (("--max-num-batched", "64"), "max_num_batched_tokens", "64"),
    ],
)
def test_spellings_that_mean_another_name(words: tuple[str, ...], name: str, value: str) -> None:
    found = started(dialect("vllm"), *words)
    assert (found.values[name], found.complete) == (value, True)


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
    assert OPTIONS.misspelt(names) == {}
