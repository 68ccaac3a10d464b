"""``kvpressure probe``: what each step measures, what each fault looks like, and that nothing is sent
without consent.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvpressure.cli import main
from kvpressure.toolbox import probing
from kvpressure.toolbox.kv_block_meter import Cache
from kvpressure.toolbox.probing import stages
from tests.helpers.command import Capsys, refused, run
from tests.toolbox.fake_vllm import FakeVllm

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits; the measuring itself takes real time."""
    monkeypatch.setattr(probing, "BASELINE_SECONDS", 0.05)
    monkeypatch.setattr(probing, "RETURN_SECONDS", 0.4)
    monkeypatch.setattr(probing, "SAMPLE_SECONDS", 0.01)


def probe(capsys: Capsys, fake: FakeVllm, *more: str) -> tuple[int, dict[int, dict[str, Any]], dict[str, Any]]:
    """Exit status, steps by number, the whole answer."""
    status = main(["probe", fake.url, "--yes", "--output", "32", "--format", "json", *more])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, {step["step"]: step for step in document["steps"]}, document


def test_a_sound_server_is_as_expected_in_all_steps(capsys: Capsys) -> None:
    with FakeVllm() as fake:
        status, steps, document = probe(capsys, fake)
    assert status == 0, steps
    assert [step["verdict"] for step in steps.values()] == ["as expected"] * 4
    assert len(fake.requests) == 12
    assert [len(request["prompt"]) for request in fake.requests] == [512, *[2048] * 10, 16384]
    assert steps[4]["slots_per_token"] == pytest.approx(1.0, abs=0.01)
    assert 5 * 2048 < steps[3]["tokens"] <= 10 * 2080, "the mean of moments in which at least half of it is in flight"
    assert document["cache"]["tokens"] == 3999 * 16
    prompts = [tuple(request["prompt"]) for request in fake.requests]
    assert len({prompt[:16] for prompt in prompts}) == 12, "shared prefixes would share blocks"


@pytest.mark.parametrize(
    ("faults", "verdicts"),
    [
        ({"leak": 3}, {2: "leak", 3: "leak", 4: "leak"}),
        ({"factor": 2.0}, {2: "duplication", 3: "duplication", 4: "duplication"}),
        ({"factor": 1.5, "factor_above": 10_000}, {2: "as expected", 3: "as expected", 4: "duplication"}),
        ({"held": 800}, {1: "baseline too high"}),
        ({"factor": 0.5}, {2: "less than expected", 3: "less than expected", 4: "less than expected"}),
        ({"status": 400}, {2: "not measured", 3: "not measured", 4: "not measured"}),
    ],
)
def test_each_fault_has_its_verdict(capsys: Capsys, faults: dict[str, Any], verdicts: dict[int, str]) -> None:
    with FakeVllm(**faults) as fake:
        status, steps, _ = probe(capsys, fake)
    assert status == 1
    assert {number: steps[number]["verdict"] for number in verdicts} == verdicts
    if "factor_above" in faults:
        assert "growth is not linear" in steps[4]["text"]
    if "status" in faults:
        assert "too long" in steps[2]["text"]


def test_servers_without_running_token_counts(capsys: Capsys) -> None:
    with FakeVllm(usage_chunks=False) as fake:
        status, _, _ = probe(capsys, fake)
    assert status == 0


def test_a_small_server_gets_what_fits(capsys: Capsys) -> None:
    with FakeVllm(blocks=256, block_size=32, max_model_len=2048) as fake:
        status, steps, document = probe(capsys, fake)
    assert status == 0
    assert "tokens instead of 2048" in steps[3]["text"]
    assert "tokens instead of 16384" in steps[4]["text"]
    assert max(len(request["prompt"]) for request in fake.requests) <= 2048 - 32
    assert 10 * (len(fake.requests[1]["prompt"]) + 32) <= 0.8 * document["cache"]["tokens"]


# --- consent and limits -----------------------------------------------------------------------------------


def test_nothing_is_sent_without_consent(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with FakeVllm() as fake:
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        assert "12 requests with 38144 tokens in all" in refused(capsys, f"probe {fake.url}")
        monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
        status, _, err = run(capsys, f"probe {fake.url}")
        assert (status, "nothing was sent" in err) == (2, True)
        assert fake.requests == []
        monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
        assert main(["probe", fake.url, "--output", "32"]) == 0


def test_a_busy_server_is_left_alone(capsys: Capsys) -> None:
    with FakeVllm(others=3) as fake:
        assert "busy (3 running, 0 waiting)" in refused(capsys, f"probe {fake.url} --yes")
        assert fake.requests == []
        status, _, document = probe(capsys, fake, "--force", "--max-requests", "1")
    assert status == 1
    assert document["busy"] == "3 running, 0 waiting"
    assert len(fake.requests) == 1


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(
    blocks=st.integers(1, 100_000),
    size=st.sampled_from([1, 16, 32, 128]),
    length=st.none() | st.integers(1, 10**6),
    output=st.integers(1, 4096),
    requests=st.integers(1, 40),
    tokens=st.integers(1, 10**6),
)
def test_no_plan_exceeds_its_budget(
    blocks: int, size: int, length: int | None, output: int, requests: int, tokens: int
) -> None:
    plan = stages(Cache(blocks, size, 1), length, output, requests, tokens)
    asks = [ask for stage in plan for ask in stage.asks]
    assert len(plan) == 3
    assert len(asks) <= requests
    assert sum(ask.total for ask in asks) <= tokens
    for stage in plan:
        assert bool(stage.asks) or stage.note
        assert sum(ask.total for ask in stage.asks) <= blocks * size
        assert all(length is None or ask.total < length for ask in stage.asks)


def test_models_and_keys(capsys: Capsys, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with FakeVllm(key="sesame", blocks=600) as fake:
        assert "not served; allowed: small" in refused(capsys, f"probe {fake.url} --yes --model other")
        assert "neither a file nor a known model" in refused(
            capsys, f"probe {fake.url} --yes --model-config no-such-model"
        )
        status, steps, _ = probe(capsys, fake)
        assert (status, steps[2]["verdict"]) == (1, "not measured")
        assert "status 401" in steps[2]["text"]
        assert probe(capsys, fake, "--api-key-file", str(key))[0] == 0
        assert "the limits are too low for a probe" in refused(capsys, f"probe {fake.url} --yes --max-tokens 10")
