"""Recipe: an inference server is one folder with an ``EngineDialect``, found through its entry point. The
package stays as it is.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.engines import registry
from kvpressure.engines.base import EngineDialect
from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.model.readings import Snapshot
from kvpressure.model.state import Limit, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import encode
from kvpressure.publish.reference import render_settings_reference
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from tests.recipes.installed import HERE, run, written_files

COMMAND = ["/usr/bin/toyserve", "--weights", "tiny", "--slots", "4", "--window", "2048"]
PAGE = """\
toyserve_active{weights="tiny",rank="0"} 4
toyserve_queued{weights="tiny",rank="0"} 9
toyserve_pool_used{weights="tiny",rank="0"} 0.99
toyserve_pool_tokens{weights="tiny",rank="0"} 9000
toyserve_evictions_total{weights="tiny",rank="0"} 3
toyserve_tokens_in_total{weights="tiny",rank="0"} 1000
toyserve_tokens_out_total{weights="tiny",rank="0"} 500
"""


@pytest.fixture
def toyserve(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineDialect]:
    monkeypatch.syspath_prepend(str(HERE / "engine"))
    assert registry.adopt("toyserve")
    yield registry.dialect("toyserve")
    registry.remove("toyserve")


def pod() -> dict[str, object]:
    container = {"name": "server", "image": "example/inference:1", "command": COMMAND[:1], "args": COMMAND[1:]}
    return {
        "metadata": {"namespace": "n", "name": "toy-0", "uid": "u"},
        "spec": {"containers": [{"name": "side", "image": "example/proxy"}, container]},
        "status": {"phase": "Running", "podIP": "10.0.0.5"},
    }


def state() -> State:
    """Three seconds of a pod as discovered, scraped and logged."""
    found = read_pod(pod(), Policy())
    assert found is not None
    target = found.engines[0].target
    assert target is not None
    pipeline, scanner = Pipeline(), Scanner()
    line = registry.log_line("n", "toy-0", "server", "12:00 pool holds 9000 tokens", target.dialect)
    for t in (100.0, 101.0, 102.0):
        scrape = parse_scrape(
            PAGE,
            target=target.name,
            time=t,
            namespace="n",
            pod="toy-0",
            container="server",
            args=target.args,
            scanner=scanner,
            dialect=target.dialect,
        )
        concluded = pipeline.observe(Snapshot(t, pages=(scrape,), logs=(line,)))
    return concluded


def test_one_folder_is_all_that_is_written() -> None:
    assert written_files("engine") == ["toyserve/dialect.py"]


@pytest.mark.usefixtures("toyserve")
def test_its_pod_is_recognised_by_its_command_alone() -> None:
    found = read_pod(pod(), Policy())
    assert found is not None
    (engine,) = found.engines
    assert (engine.container, engine.dialect) == ("server", "toyserve")
    assert engine.target is not None
    assert engine.target.port == 7000


def test_without_the_extension_its_pod_is_none_of_ours() -> None:
    found = read_pod(pod(), Policy())
    assert found is not None
    assert found.engines == ()
    assert parse_scrape(PAGE, target="t", time=0.0).engines == ()


@pytest.mark.usefixtures("toyserve")
def test_its_page_becomes_an_engine_with_its_limits() -> None:
    (engine,) = state().engines
    assert (engine.dialect, engine.key.model_name, engine.up) == ("toyserve", "tiny", True)
    assert engine.signals.kv.kv_capacity_tokens == 9000
    limits = {name: (limit.value, limit.explicit, limit.source) for name, limit in engine.limits.items()}
    assert limits["max_num_seqs"] == (4.0, True, "args")
    assert limits["max_model_len"] == (2048.0, True, "args")


@pytest.mark.usefixtures("toyserve")
def test_metrics_have_it_and_its_log_events() -> None:
    text = encode(families(state()).collect(), openmetrics=False).decode()
    values = {line.partition("{")[0]: line for line in text.splitlines() if 'model_name="tiny"' in line}
    assert values["kvpressure_kv_cache_used_ratio"].endswith(" 0.99")
    assert values["kvpressure_requests_running"].endswith(" 4.0")
    assert values["kvpressure_preemptions_total"].endswith(" 3.0")
    assert 'event="capacity"' in text


@pytest.mark.usefixtures("toyserve")
def test_sentences_use_its_words_and_advice_its_flags() -> None:
    (engine,) = state().engines
    said = engine.diagnosis.evidence["preempting"].text
    assert "evicted" in said
    assert "counted by ToyServe" in said
    assert "vLLM" not in said
    assert dialect(engine.dialect).flag("max_num_seqs") == "--slots"
    pressed = dataclasses.replace(engine, limits={"max_num_seqs": Limit("max_num_seqs", 64.0, True, "args", 4.0)})
    pressed = dataclasses.replace(pressed, diagnosis=dataclasses.replace(engine.diagnosis, verdict="kv_pressure"))
    flags = [flag for action in plan(pressed, builtin()).actions for flag in action.flags]
    assert "--slots 4" in flags
    assert not any(flag.startswith("--max-num") for flag in flags)


@pytest.mark.usefixtures("toyserve")
def test_it_is_in_the_reference() -> None:
    assert "vLLM, SGLang, ToyServe." in render_settings_reference()


@pytest.mark.usefixtures("toyserve")
def test_pages_of_vllm_are_read_beside_it() -> None:
    both = PAGE + 'vllm:num_requests_running{engine="0",model_name="other"} 2\n'
    engines = parse_scrape(both, target="t", time=0.0).engines
    assert {(engine.dialect, engine.model_name) for engine in engines} == {("toyserve", "tiny"), ("vllm", "other")}


@pytest.mark.live
def test_help_lists_it_where_it_is_asked_for() -> None:
    asked = run("engine", "--extensions", "toyserve", "serve", "--help")
    assert "SGLang, ToyServe" in asked.stdout
    assert "ToyServe" not in run("engine", "serve", "--help").stdout


@pytest.mark.live
def test_nobody_looks_for_packages_unasked() -> None:
    """Looking takes time, and a package must not change what is read by being installed."""
    code = "import sys; from kvpressure import cli; cli.main(['--version']); import kvpressure.cli.serve; "
    code += (
        "from kvpressure.engines.registry import dialects, samples; samples(); print('importlib.metadata' in"
        " sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.live
def test_an_unknown_name_is_one_line() -> None:
    asked = run("engine", "--extensions=nobody", "serve", "--help")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert (
        asked.stderr
        == "kvpressure: --extensions: no installed package offers an engine, source, signal or condition 'nobody';"
        " install a package that does\n"
    )


def test_a_built_in_engine_is_not_replaced(toyserve: EngineDialect) -> None:
    with pytest.raises(InputError, match="built in"):
        registry.add(dataclasses.replace(toyserve, name="vllm"))
