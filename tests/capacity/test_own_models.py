"""Shapes from a directory of configurations and from targets, and what an engine's memory is known by then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpressure.capacity.models import CONFIGS
from kvpressure.capacity.own_models import ModelShapes, read
from kvpressure.errors import InputError
from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.model.state import EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.sources.scrape.targets import parse_target

CONFIG = json.dumps({**CONFIGS["llama-3.1-8b"], "num_hidden_layers": 16})  # half of it
TOKEN = 65_536  # bytes: 16 layers, 8 heads of 128, keys and values, 16 bits
PAGE = """vllm:num_requests_running{{model_name="{0}",engine="0"}} 1
vllm:kv_cache_usage_perc{{model_name="{0}",engine="0"}} 0.25
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="4096",cache_dtype="auto"}} 1
"""
POOL = 4096 * 16 * TOKEN
GIB = 2**30


def write(path: Path, text: str = CONFIG) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def layers(shapes: ModelShapes, name: str) -> int | None:
    found = shapes.find([name])
    return None if found is None else found.num_layers


def engine(shapes: ModelShapes, args: str = "", gpus: int = 1, served: str = "own") -> EngineState:
    uuids = tuple(f"GPU-{n}" for n in range(gpus))
    scrape = parse_scrape(
        PAGE.format(served), target="http://a:8000/metrics", time=1.0, pod="p", gpus=uuids, args=args.split()
    )
    readings = [
        GpuReading(uuid, n, "nvidia", "H100", memory_total_bytes=80 * GIB, memory_used_bytes=72 * GIB)
        for n, uuid in enumerate(uuids)
    ]
    return Pipeline(shapes=shapes).observe(Snapshot(1.0, gpus=tuple(readings), pages=(scrape,))).engines[0]


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("own.json", "own"),
        ("own.json", "org/Own"),
        ("Own-7B/config.json", "/models/own-7b/"),
        ("org/own-7b/config.json", "org/own-7b"),
    ],
)
def test_a_model_is_named_by_its_file_or_folder(tmp_path: Path, file: str, model: str) -> None:
    write(tmp_path / file)
    assert layers(read(tmp_path, {}), model) == 16


def test_own_configurations_win_over_published_ones_and_other_files_count_for_nothing(tmp_path: Path) -> None:
    assert layers(read(None, {}), "meta-llama/Llama-3.1-8B-Instruct") == 32
    write(tmp_path / "Llama-3.1-8B-Instruct" / "config.json")
    write(tmp_path / "Llama-3.1-8B-Instruct" / "tokenizer.json", "{}")
    write(tmp_path / "..data" / "hidden.json")
    shapes = read(tmp_path, {})
    assert layers(shapes, "meta-llama/Llama-3.1-8B-Instruct") == 16
    assert layers(shapes, "meta-llama/Llama-3.1-8B") == 32
    assert [*shapes.own] == ["llama-3.1-8b-instruct"]


def test_a_file_that_cannot_be_used_costs_itself_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "own.json")
    write(tmp_path / "bad.json", "{")
    write(tmp_path / "whisper.json", json.dumps({**json.loads(CONFIG), "is_encoder_decoder": True}))
    assert [*read(tmp_path, {}).own] == ["own"]
    assert [message.split(": ")[1].rsplit("/", 1)[-1] for message in caplog.messages] == ["bad.json", "whisper.json"]


def test_the_pool_and_the_required_memory_are_known_without_a_start_up_log(tmp_path: Path) -> None:
    write(tmp_path / "own.json")
    memory = engine(read(tmp_path, {})).signals.memory
    assert memory.kv_pool_bytes == POOL
    assert memory.device_demand_ratio == pytest.approx((72 * GIB - 0.75 * POOL) / (80 * GIB))
    unknown = engine(ModelShapes()).signals.memory
    assert (unknown.kv_pool_bytes, unknown.device_demand_ratio) == (None, None)


def test_a_target_names_its_model_whatever_it_is_called(tmp_path: Path) -> None:
    target = parse_target(f"a:8000;model-config={write(tmp_path / 'config.json')};args=--max-num-seqs 8")
    assert (target.name, target.args) == ("http://a:8000/metrics", ("--max-num-seqs", "8"))
    shapes = read(None, {target.name: target.model_config})
    assert engine(shapes, served="gpt-4").signals.memory.kv_pool_bytes == POOL
    assert layers(read(None, {"t": "llama-3.1-70b"}), "t") is None
    found = read(None, {"t": "llama-3.1-70b"}).find([], "t")
    assert found.num_layers == 80


def test_how_the_model_is_split_must_be_known_where_there_are_several_gpus(tmp_path: Path) -> None:
    shapes = read(tmp_path, {"http://a:8000/metrics": str(write(tmp_path / "config.json"))})
    assert engine(shapes, gpus=2).signals.memory.kv_pool_bytes is None
    two = engine(shapes, "vllm serve own --tensor-parallel-size 2", gpus=2)
    assert two.signals.memory.kv_pool_bytes == POOL / 2


def test_what_a_target_names_must_be_there() -> None:
    with pytest.raises(InputError, match="neither a file nor a known model"):
        read(None, {"t": "no-such-model"})
    with pytest.raises(InputError, match="model-config twice"):
        parse_target("a;model-config=x;model-config=y")
