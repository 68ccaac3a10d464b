"""``diagnose`` and ``mitigate`` give the same verdict for the same input, with the same stage, confidence and cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpressure.cli import main

pytestmark = pytest.mark.slow

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"
SAME = ("namespace", "pod", "model_name", "verdict", "stage", "confidence", "cause")
NAMES = (
    *("vllm-cpu/l_dp2", "vllm-cpu/a_idle", "vllm-cpu-loads/04b-limit-and-full-quiet", "incidents/CP10"),
    *("incidents/HNG2", "incidents/KV01", "incidents-fresh/FTEL1"),
)


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_and_mitigate_agree(capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = str(RECORDINGS / f"{name}.jsonl.gz")
    main(["diagnose", path, "--format", "json"])
    diagnosed = json.loads(capsys.readouterr().out)["engines"]
    status = main(["mitigate", path, "--format", "json"])
    mitigated = json.loads(capsys.readouterr().out)
    assert {key: mitigated[key] for key in SAME} == {key: diagnosed[0][key] for key in SAME}, "the engine in trouble"
    assert status == (0 if mitigated["verdict"] == "kv_pressure" else 1)
    assert mitigated["applies"] == (diagnosed[0]["verdict"] == "kv_pressure")
