"""Every command that reports or acts on one of several engines takes the one in most trouble, by the order of the
page, and names it.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from kvpressure.cli import main
from tests.helpers.command import Capsys
from tests.toolbox.conftest import FIXTURES, ServeJson
from tests.toolbox.test_diagnose import document_of

pytestmark = pytest.mark.live

RECORDINGS: Final = FIXTURES / "recordings"
CALM: Final = {"namespace": "prod", "pod": "calm-0"}
WORST: Final = {"namespace": "prod", "pod": "worst-0", "model_name": "org/worst"}


def node(worst: str, calm_first: bool) -> dict[str, Any]:
    """An exporter's document of an idle engine and one of ``worst`` trouble, which is less certain."""
    document = document_of("vllm-cpu/a_idle")
    (idle,) = document["engines"]
    (pressed,) = document_of("incidents/KV01")["engines"]
    engines = [idle | CALM | {"confidence": 0.95}, pressed | WORST | {"verdict": worst, "confidence": 0.6}]
    return document | {"engines": engines if calm_first else engines[::-1]}


COMMANDS: Final = {
    "diagnose": ["diagnose", "--exporter"],
    "diagnose as JSON": ["diagnose", "--format", "json", "--exporter"],
    "mitigate": ["mitigate", "--exporter"],
    "mitigate as JSON": ["mitigate", "--format", "json", "--exporter"],
    "mitigate --anyway": ["mitigate", "--anyway", "--exporter"],
    "mitigate --edge": ["mitigate", "--edge", "--exporter"],
}


@pytest.mark.parametrize(("worst", "calm_first"), [("stalled", True), ("kv_pressure", False), ("unknown", True)])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_engine_in_trouble_comes_first_and_by_its_name(
    capsys: Capsys, serve_json: ServeJson, command: str, worst: str, calm_first: bool
) -> None:
    status = main([*COMMANDS[command], serve_json({"/api/v1/diagnosis": node(worst, calm_first)})])
    said = capsys.readouterr().out
    assert status in (0, 1)
    assert "worst-0" in said
    assert "calm-0" not in said[: said.index("worst-0")]
    if command == "diagnose":
        assert said.splitlines()[0].endswith("First: prod/worst-0 org/worst engine 0.")
    if command.startswith("mitigate"):
        assert "calm-0" not in said


@pytest.mark.parametrize("command", [name for name in COMMANDS if name.startswith("mitigate")])
def test_others_in_trouble_are_named_too(capsys: Capsys, serve_json: ServeJson, command: str) -> None:
    document = node("kv_pressure", True)
    document["engines"].append(document["engines"][1] | {"pod": "second-0", "verdict": "host_bound"})
    assert main([*COMMANDS[command], serve_json({"/api/v1/diagnosis": document})]) == 0
    said = capsys.readouterr().out
    assert "calm-0" not in said
    assert 0 < said.index("worst-0") < said.index("second-0")


def test_a_recording_of_a_dead_replica_is_not_an_all_clear(capsys: Capsys) -> None:
    """One of two replicas is dead; the other one serves."""
    path = str(RECORDINGS / "incidents/CP10.jsonl.gz")
    assert main(["mitigate", path]) == 1
    said = capsys.readouterr().out
    assert said.startswith("inference/vllm-cp10-0 ")
    assert "HEALTHY" not in said
    assert "does not help here" not in said
    assert "Check that the pod is running" in said
    assert main(["mitigate", path, "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["pod"], document["verdict"]) == ("vllm-cp10-0", "unknown")


SAME = ("namespace", "pod", "model_name", "verdict", "stage", "confidence", "cause")
NAMES = (
    *("vllm-cpu/l_dp2", "vllm-cpu/a_idle", "vllm-cpu-loads/04b-limit-and-full-quiet", "incidents/CP10"),
    *("incidents/HNG2", "incidents/KV01", "incidents-fresh/FTEL1"),
)


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_and_mitigate_agree(capsys: Capsys, name: str) -> None:
    """On the verdict, its stage, confidence and cause."""
    path = str(RECORDINGS / f"{name}.jsonl.gz")
    main(["diagnose", path, "--format", "json"])
    diagnosed = json.loads(capsys.readouterr().out)["engines"]
    status = main(["mitigate", path, "--format", "json"])
    mitigated = json.loads(capsys.readouterr().out)
    assert {key: mitigated[key] for key in SAME} == {key: diagnosed[0][key] for key in SAME}, "the engine in trouble"
    assert status == (0 if mitigated["verdict"] == "kv_pressure" else 1)
    assert mitigated["applies"] == (diagnosed[0]["verdict"] == "kv_pressure")
