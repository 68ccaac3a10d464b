"""``kvpressure capacity --sweep``: tensor-parallel sizes and KV cache dtypes side by side."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from kvpressure.cli import main

LOAD = ("--prompt", "p50=1000,p95=4000,p100=9000", "--output", "500")
MODEL = ("llama-3.1-70b", "--gpu-memory", "80GiB", *LOAD)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["capacity", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def swept(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    got, out, err = run(capsys, *arguments, "--sweep", "--format", "json")
    assert (got, err) == (status, "")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def by_choice(found: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(one["tensor"], one["cache_dtype"]): one for one in found["choices"]}


def test_each_choice_is_what_the_same_question_alone_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row agrees with ``capacity`` for that size and dtype and the same max_model_len."""
    found = swept(capsys, *MODEL, "--concurrency", 200)
    for (tensor, dtype), row in by_choice(found).items():
        _, out, _ = run(
            capsys, *MODEL, "--tp", tensor, "--kv-cache-dtype", dtype, "--max-model-len", 12288, "--format", "json"
        )
        alone = json.loads(out)
        assert row["bytes_per_token"] == alone["kv_bytes_per_token_per_gpu"]
        if row["at_once"] is not None:
            assert row["at_once"] == alone["capacity"]["requests"]
            assert row["capacity_tokens"] == alone["capacity"]["capacity_tokens"]
            assert row["pool_bytes"] == alone["memory"]["pool"]["bytes"]
        else:
            assert not alone["fits"]


def test_replicas_hold_the_required_concurrency_and_no_fewer_would(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(capsys, *MODEL, "--concurrency", 200)
    for row in by_choice(found).values():
        if row["replicas"] is not None:
            assert row["replicas"] * row["at_once"] >= 200 > (row["replicas"] - 1) * row["at_once"]
            assert row["gpus"] == row["replicas"] * row["tensor"]
    best = by_choice(found)[found["best"]["tensor"], found["best"]["cache_dtype"]]
    assert best["gpus"] == min(row["gpus"] for row in by_choice(found).values() if row["gpus"])


def test_without_a_concurrency_the_best_holds_most_requests_per_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(capsys, *MODEL)
    rows = by_choice(found)
    per_gpu = {key: row["at_once"] / row["gpus"] for key, row in rows.items() if row["at_once"]}
    assert max(per_gpu, key=lambda key: per_gpu[key]) == (found["best"]["tensor"], found["best"]["cache_dtype"])
    assert all(row["replicas"] is None for row in rows.values())
    _, out, _ = run(capsys, *MODEL, "--sweep")
    assert "replicas" not in out.splitlines()[2]


def test_what_does_not_work_says_why_and_has_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = by_choice(swept(capsys, *MODEL))
    assert rows[1, "auto"]["problem"].startswith("does not start: each GPU lacks ")
    assert rows[1, "auto"]["at_once"] is None
    small = by_choice(swept(capsys, "llama-3.1-8b", "--gpu-memory", "24GiB"))
    assert small[1, "auto"]["problem"] == "does not start: the longest request that fits has 43232 tokens"


def test_sizes_that_the_models_heads_do_not_allow_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    rows = by_choice(swept(capsys, "qwen2.5-7b", "--gpu-memory", "80GiB", "--context", 4096))
    assert "28 attention heads" in rows[8, "auto"]["problem"]
    assert rows[4, "auto"]["problem"] == ""


def test_nothing_that_works_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(capsys, "deepseek-v3", "--gpu-memory", "24GiB", status=1)
    assert found["best"] is None
    _, out, _ = run(capsys, "deepseek-v3", "--gpu-memory", "24GiB", "--sweep")
    assert "None of these works" in out


def test_markdown_and_csv_hold_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = swept(capsys, *MODEL, "--concurrency", 200)["choices"]
    _, text, _ = run(capsys, *MODEL, "--concurrency", 200, "--sweep", "--format", "csv")
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row["at_once"] for row in read] == ["" if row["at_once"] is None else str(row["at_once"]) for row in rows]
    _, text, _ = run(capsys, *MODEL, "--concurrency", 200, "--sweep", "--format", "markdown")
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(rows)
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MODEL, "--sweep", "--tp", "2"), "--tp: not with --sweep"),
        ((*MODEL, "--sweep", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype: not with --sweep"),
        ((*MODEL, "--sweep", "--worksheet"), "--worksheet: not with --sweep"),
        (("llama-3.1-8b", "--sweep"), "--sweep: needs --gpu-memory"),
        ((*MODEL, "--format", "csv"), "--format csv: only with --sweep; allowed: text, json"),
    ],
)
def test_options_that_do_not_go_together_get_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
