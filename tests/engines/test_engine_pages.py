"""Each page of ``fixtures/engine-pages`` holds the engines that its table says, with their values, or is
what the table says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.advice.wording import reason_text
from kvpressure.engines.base import Known
from kvpressure.engines.other_software import SOFTWARE
from kvpressure.engines.registry import dialect
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape
from kvpressure.model.reasons import OTHER_SOFTWARE, REASONS
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape

PAGES = Path(__file__).parents[1] / "fixtures" / "engine-pages"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((PAGES / "expected.yaml").read_text())
ENGINES = [name for name, page in EXPECTED.items() if "engines" in page]
OTHERS = [name for name, page in EXPECTED.items() if "reason" in page]
BAD_LINES = {"vllm-shim": 1}  # the usage in percent, which is no share


STAMPED = 1772445600.0  # the samples of pages with timestamps


def scrape(name: str, time: float = STAMPED) -> Scrape:
    return parse_scrape((PAGES / f"{name}.prom").read_bytes(), target=name, time=time)


def read(engine: EngineReading, page: Scrape) -> dict[str, float | None]:
    """The values of the table; waiting holds the deferred ones too."""
    gauges, counters = engine.gauges, engine.counters
    deferred = gauges.get(r.WAITING_DEFERRED)
    limit = dialect(engine.dialect).limits(Known(reading=engine)).get("max_num_seqs")
    return {
        "running": gauges.get(r.RUNNING),
        "waiting": gauges[r.WAITING] - (deferred or 0.0) if r.WAITING in gauges else None,
        "deferred": deferred or None,
        "kv_usage": gauges.get(r.KV_USAGE),
        "preemptions": counters.get(r.PREEMPTIONS),
        "prompt_tokens": counters.get(r.PROMPT_TOKENS),
        "generation_tokens": counters.get(r.GENERATION_TOKENS),
        "capacity_tokens": dialect(engine.dialect).capacity_tokens(engine, page.engines_of_server(engine)),
        "limit": limit.value if limit is not None and limit.source == "metrics" else None,
    }


@pytest.mark.parametrize("name", ENGINES)
def test_a_page_gives_its_engines(name: str) -> None:
    expected = EXPECTED[name]["engines"]
    page = scrape(name)
    assert page.error is None
    assert page.bad_lines == BAD_LINES.get(name, 0)
    assert page.cut == {}
    shown = "SGLang" in EXPECTED[name]["software"] and name != "vllm-shim"
    assert {engine.dialect for engine in page.engines} == {"sglang" if shown else "vllm"}
    assert len({engine.engine for engine in page.engines}) == len(expected)
    found = {values_key(read(engine, page), expected[0]): engine for engine in page.engines}
    assert len(found) == len(expected)
    for wanted in expected:
        engine = found[values_key(wanted, expected[0])]
        assert engine.model_name == wanted["model_name"]
        values = read(engine, page)
        assert {key: values[key] for key in wanted if key not in ("model_name", "identity")} == {
            key: value for key, value in wanted.items() if key not in ("model_name", "identity")
        }
        for label, identity in wanted["identity"].items():
            assert_identity(label, identity, engine, page)


def values_key(values: dict[str, Any], of: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(key) for key in of if key not in ("model_name", "identity"))


def assert_identity(label: str, identity: str, engine: EngineReading, page: Scrape) -> None:
    if label == "engine_type":
        assert page.flavour == identity
    elif label in ("ReplicaId", "WorkerId"):
        assert engine.replica == identity
        assert identity not in engine.engine
    elif label == "instance":
        assert engine.engine.endswith(identity.rpartition(":")[2])
    elif label == "pod":
        assert f"/{identity}:" in engine.engine
    elif label in ("engine", "dp_rank"):
        assert identity in engine.engine.split("/")
    else:
        assert label in ("model", "version")


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_page_is_named(name: str) -> None:
    page = scrape(name)
    assert page.engines == ()
    assert page.error == EXPECTED[name]["reason"]
    assert page.error in REASONS


def test_software_is_named_with_what_to_point_at() -> None:
    assert {*SOFTWARE} == {*OTHER_SOFTWARE}
    for name, software in SOFTWARE.items():
        assert software.begins or software.contains
        assert reason_text(name) == f"this is {software.title}: {software.advice}"
        for first in software.begins:
            assert parse_scrape(first + b'_x{model="a"} 1\n', target="", time=0.0).error == name
            assert parse_scrape(b"x_" + first + b"_x 1\n", target="", time=0.0).error == "no_engine_metrics"


# --- several servers behind one page --------------------------------------------------------------------------


def ray(**usage: float) -> bytes:
    return "".join(
        f'ray_vllm_kv_cache_usage_perc{{model_name="m",engine="0",WorkerId="{worker}"}} {value}\n'
        for worker, value in usage.items()
    ).encode()


def named(scanner: Scanner, page: bytes) -> dict[str, tuple[str, float]]:
    return {one.engine: (one.replica, one.gauges[r.KV_USAGE]) for one in scanner.scan(page).engines}


def test_workers_that_collide_are_engines_in_any_order_and_a_new_one_has_the_place_of_one_that_is_gone() -> None:
    assert named(Scanner(), ray(a=0.99, b=0.01)) == {"0/r0": ("a", 0.99), "0/r1": ("b", 0.01)}
    assert named(Scanner(), ray(b=0.01, a=0.99)) == {"0/r0": ("a", 0.99), "0/r1": ("b", 0.01)}
    scanner = Scanner()
    named(scanner, ray(a=0.9, b=0.1))
    assert named(scanner, ray(b=0.2, z=0.0)) == {"0/r0": ("z", 0.0), "0/r1": ("b", 0.2)}
    assert named(scanner, ray(b=0.2)) == {"0/r1": ("b", 0.2)}
    assert named(scanner, ray(b=0.2, z=0.1)) == {"0/r0": ("z", 0.1), "0/r1": ("b", 0.2)}


def test_replicas_that_change_for_ever_need_as_many_names_as_there_are_at_once() -> None:
    scanner = Scanner()
    names = {name for n in range(500) for name in named(scanner, ray(**{f"w{n}": 0.1, f"w{n + 1}": 0.2}))}
    assert names == {"0/r0", "0/r1"}


def test_each_server_of_a_page_has_its_own_configuration() -> None:
    page = b"".join(
        f'vllm:num_requests_running{{model_name="m",engine="0",pod="{pod}",namespace="n",instance="10.0.0.{n}:8000"}}'
        f" {n}\n"
        f'vllm:cache_config_info{{pod="{pod}",namespace="n",instance="10.0.0.{n}:8000",engine="0",block_size="16",'
        f'num_gpu_blocks="{n}01"}} 1\n'.encode()
        for n, pod in enumerate(("a-0", "a-1"), 1)
    )
    scraped = parse_scrape(page, target="", time=0.0)
    assert {one.engine: read(one, scraped)["capacity_tokens"] for one in scraped.engines} == {
        "0/n/a-0:8000": 1600.0,
        "0/n/a-1:8000": 3200.0,
    }


def test_several_series_of_one_value_are_counted_and_none_is_believed() -> None:
    scanner = Scanner()
    line = 'vllm:num_requests_running{{model_name="m",engine="0",zone="{}"}} {}\n'
    other = 'vllm:num_requests_waiting{model_name="m",engine="0"} 3\n'
    result = scanner.scan(line.format("a", 9) + line.format("b", 1) + other)
    assert result.cut == {"collisions": 1}
    assert [dict(one.gauges) for one in result.engines] == [{r.WAITING: 3.0}]
    one = scanner.scan(line.format("b", 4) + other)  # the other series is gone
    assert one.cut == {}
    assert [dict(each.gauges) for each in one.engines] == [{r.RUNNING: 4.0, r.WAITING: 3.0}]
    again = scanner.scan(line.format("b", 2) + other + line.format("a", 2))  # the same number is no better
    assert again.cut == {"collisions": 1}


# --- samples with a time of their own -------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [-121.0, 121.0])
def test_a_page_of_another_moment_is_no_reading(apart: float) -> None:
    name = "prometheus-federate"
    page = scrape(name, STAMPED + apart)
    assert (page.error, page.engines) == ("bad_timestamps", ())
    assert page.cut["timestamps"] > 20
    near = scrape(name, STAMPED + apart * 119 / 121)
    assert (near.error, len(near.engines), near.cut) == (None, 2, {})


@pytest.mark.parametrize("stamp", ["1772445600000", "1772445600", "1772445600.5", "1.7724456e9"])
def test_timestamps_are_in_milliseconds_or_in_seconds(stamp: str) -> None:
    line = f'vllm:num_requests_running{{model_name="m",engine="0"}} 3 {stamp}\n'
    assert len(Scanner().scan(line, STAMPED).engines) == 1
    assert Scanner().scan(line, STAMPED + 200).error == "bad_timestamps"


def test_an_engine_whose_samples_grew_old_leaves_the_page_and_the_others_stay() -> None:
    line = 'vllm:num_requests_running{{model_name="m",engine="{}"}} 3 {:.0f}\n'
    scanner = Scanner()
    both = line.format(0, STAMPED * 1000) + line.format(1, STAMPED * 1000)
    assert [one.engine for one in scanner.scan(both, STAMPED).engines] == ["0", "1"]
    later = line.format(0, (STAMPED + 300) * 1000) + line.format(1, STAMPED * 1000)
    found = scanner.scan(later, STAMPED + 300)
    assert ([one.engine for one in found.engines], found.cut) == (["0"], {"timestamps": 1})
    assert scanner.scan('vllm:num_requests_running{model_name="m"} 3 1e\n', STAMPED).bad_lines == 1


# --- SGLang -----------------------------------------------------------------------------------------------------


def test_what_the_server_counts_for_all_ranks_is_no_rank_s() -> None:
    first, second = scrape("sglang-dp2").engines
    for engine in (first, second):
        assert r.PROMPT_TOKENS not in engine.counters
        assert r.TTFT not in engine.histograms
    assert (first.counters[r.GENERATION_TOKENS], second.counters[r.GENERATION_TOKENS]) == (90000.0, 9000.0)
    assert r.PREEMPTIONS not in second.counters


def test_attention_ranks_of_one_engine_are_no_collision() -> None:
    line = 'sglang:num_running_reqs{{model_name="m",dp_rank="0",tp_rank="{0}",moe_ep_rank="{0}"}} {1}\n'
    result = Scanner().scan(line.format(0, 5) + line.format(1, 4))
    assert result.cut == {}
    assert [(one.engine, one.gauges[r.RUNNING]) for one in result.engines] == [("0", 4.0)]
