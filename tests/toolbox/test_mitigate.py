"""``kvpressure mitigate``: the plan and its values, the patch, and the watch for recovery."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.advice.plan import Caps
from kvpressure.cli import main
from kvpressure.engines.vllm.command_line import parse
from kvpressure.errors import InputError
from kvpressure.model.arguments import value_text
from kvpressure.toolbox import changed_flags
from kvpressure.toolbox import gateway_config as edge
from kvpressure.toolbox.mitigation_check import Check, Outcome
from kvpressure.toolbox.mitigation_report import outcome_lines
from tests.toolbox.conftest import FIXTURES, FakeClock
from tests.toolbox.test_audit import deployment
from tests.toolbox.test_diagnose import CHAT, dead_address, document_of, heavy

pytestmark = pytest.mark.live

PRESSURE = str(FIXTURES / "recordings/vllm-cpu/d_kv_pressure.jsonl.gz")
UNMEASURED = [
    "--verdict",
    "kv_pressure",
    "--max-num-seqs",
    "100",
    "--capacity-tokens",
    "90000",
    "--prompt",
    "1000",
    "--output",
    "200",
]
STATED = [*UNMEASURED, "--running", "100"]


def mitigate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["mitigate", *arguments, "--format", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


def step(document: dict[str, Any], words: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in document["steps"] if words in item["title"])
    return found


# --- the plan ---------------------------------------------------------------------------------------------


def test_a_recording_gives_the_plan_in_the_documented_order(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = mitigate(capsys, PRESSURE)
    titles = [item["title"] for item in document["steps"]]
    wanted = [
        "edge",
        "max_num_seqs",
        "max-num-batched-tokens",
        "gpu-memory-utilization",
        "rollout",
        "restart",
        "Verify",
    ]
    found = [next(i for i, title in enumerate(titles) if word in title) for word in wanted]
    assert status == 0
    assert found == sorted(found)
    assert document["set"]["max_num_seqs"] == 9
    assert all(item["cost"] for item in document["steps"] if item["values"])
    assert document["caps"]["known"] is True


@pytest.mark.parametrize(
    ("capacity", "seqs"), [(60_000, 50), (61_200, 51), (84_000, 70), (90_000, 75), (200_000, 75), (10_000, 50)]
)
def test_the_cut_is_sized_by_the_overcommit_within_the_documented_band(
    capsys: pytest.CaptureFixture[str], capacity: int, seqs: int
) -> None:
    _, document = mitigate(capsys, *STATED, "--capacity-tokens", str(capacity))
    assert document["set"]["max_num_seqs"] == seqs


def test_the_caps_let_what_runs_fit_together(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(capsys, *STATED, "--capacity-tokens", "40000", "--max-rejected", "1")
    caps = document["caps"]
    assert document["set"]["max_num_seqs"] * (caps["input_tokens"] + caps["output_tokens"]) <= 40_000
    assert caps["long_prompts"] > 0.05
    _, kept = mitigate(capsys, *STATED, "--capacity-tokens", "40000")
    assert (kept["caps"]["input_tokens"], kept["caps"]["output_tokens"]) == (1000, 200)
    assert "can still need" in kept["steps"][0]["text"]
    assert "by the p95 given, at most 5 % of prompts and 5 % of outputs exceed the caps" in kept["steps"][0]["cost"]
    _, document = mitigate(capsys, *STATED, "--capacity-tokens", "10000000")
    assert (document["caps"]["input_tokens"], document["caps"]["output_tokens"]) == (1024, 256)


def test_less_memory_only_when_allocations_fail_and_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--gpu-memory-utilization", "0.9", "--gpu", "H100:80", "--kv-pool-gib", "40"]
    _, document = mitigate(capsys, *STATED, *more)
    assert step(document, "gpu-memory-utilization")["advice"] == "not here"
    assert "gpu_memory_utilization" not in document["set"]
    _, document = mitigate(capsys, *STATED, *more, "--out-of-memory")
    assert document["set"]["gpu_memory_utilization"] == 0.7
    cost = step(document, "gpu-memory-utilization")["cost"]
    assert "gpu_memory_utilization 0.7, the KV pool shrinks from 40.0 to 24.0 GiB (54 000 of 90 000 tokens)" in cost
    assert "gpu_memory_utilization 0.6, the KV pool shrinks from 40.0 to 16.0 GiB" in cost
    assert not any("More KV memory" in item["title"] for item in document["steps"])


@pytest.mark.parametrize(
    ("now", "wanted", "words"),
    [("0.7", 0.6, "set 0.6"), ("0.65", 0.6, "set 0.6"), ("0.6", None, "Allocations fail although it is low already")],
)
def test_the_share_goes_lower_where_the_first_step_is_done(
    capsys: pytest.CaptureFixture[str], now: str, wanted: float | None, words: str
) -> None:
    _, document = mitigate(
        capsys, *STATED, "--gpu-memory-utilization", now, "--out-of-memory", "--gpu", "H100:80", "--kv-pool-gib", "40"
    )
    found = step(document, "gpu-memory-utilization")
    assert document["set"].get("gpu_memory_utilization") == wanted
    assert words in found["text"]
    assert "none was seen" not in found["text"]
    assert "0.7" not in found["cost"]
    _, document = mitigate(capsys, *STATED, "--gpu-memory-utilization", now, "--out-of-memory")
    assert "-5 %" not in step(document, "gpu-memory-utilization")["cost"]


@pytest.mark.parametrize(("version", "advice"), [("0.23.0", "not here"), ("0.24.0", "do"), (None, "if it stays")])
def test_the_watermark_needs_a_version_that_knows_it(
    capsys: pytest.CaptureFixture[str], version: str | None, advice: str
) -> None:
    _, document = mitigate(capsys, *STATED, "--preempting", *(["--vllm-version", version] if version else []))
    assert step(document, "watermark")["advice"] == advice
    assert ("watermark" in document["set"]) == (advice == "do")
    _, document = mitigate(capsys, *STATED)
    assert not any("watermark" in item["title"] for item in document["steps"])


def test_batched_tokens_stay_above_the_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(
        capsys, *STATED, "--max-num-seqs", "1024", "--running", "1024", "--max-num-batched-tokens", "600"
    )
    assert document["set"]["max_num_batched_tokens"] >= document["set"]["max_num_seqs"] == 512


@pytest.mark.parametrize(
    ("now", "wanted", "words"),
    [
        ("8192", 4096, "set 4096, half."),
        ("8193", 4096, "set 4096, half."),
        ("800", 512, "set 512, 288 less (not below that)."),
        ("513", 512, "set 512, 1 less"),
        ("60", None, "not below 512"),
    ],
)
def test_the_token_budget_says_how_much_less_it_is(
    capsys: pytest.CaptureFixture[str], now: str, wanted: int | None, words: str
) -> None:
    _, document = mitigate(capsys, *STATED, "--max-num-batched-tokens", now)
    assert document["set"].get("max_num_batched_tokens") == wanted
    assert words in step(document, "batched-tokens")["text"]


def test_the_token_budget_is_never_raised(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(
        capsys, "--verdict", "kv_pressure", "--max-num-seqs", "2000", "--max-num-batched-tokens", "1000"
    )
    assert "max_num_batched_tokens" not in document["set"]
    assert step(document, "batched-tokens")["advice"] == "not here"


# --- what was not measured --------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "seqs"), [(60_000, 37), (84_000, 52), (90_000, 56), (200_000, 75), (10_000, 6)])
def test_without_a_measured_batch_the_cut_starts_from_what_the_cache_holds(
    capsys: pytest.CaptureFixture[str], capacity: int, seqs: int
) -> None:
    """A limit above what the cache lets run binds nothing (docs/reports/mitigations.md)."""
    _, document = mitigate(capsys, *UNMEASURED, "--capacity-tokens", str(capacity))
    assert document["set"]["max_num_seqs"] == seqs < max(2, capacity / 1200)


def test_the_example_of_the_help_gives_what_its_measured_twin_gives(capsys: pytest.CaptureFixture[str]) -> None:
    example = "--verdict kv_pressure --max-num-seqs 256 --capacity-tokens 90000 --prompt 2000 --output 500"
    with pytest.raises(SystemExit):
        main(["mitigate", "--help"])
    assert f"mitigate {example}" in capsys.readouterr().out
    _, stated = mitigate(capsys, *example.split())
    _, measured = mitigate(capsys, *example.split(), "--running", "36")
    assert stated["set"] == measured["set"] == {"max_num_seqs": 27}
    assert (
        stated["caps"]
        == measured["caps"]
        == {
            "input_tokens": 2048,
            "output_tokens": 512,
            "known": True,
            "long_prompts": 0.05,
            "long_outputs": 0.05,
            "long_asked": None,
        }
    )
    said = step(stated, "max_num_seqs")["text"]
    assert "run at once" not in said
    assert "25 % below the 36 requests of this length that fit into the KV cache" in said
    assert "Running requests: unknown" in said
    assert "the 36 requests running at once" in step(measured, "max_num_seqs")["text"]


def test_a_command_line_completes_a_stated_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(capsys, "--verdict", "kv_pressure", "--args=--max-num-seqs 64 --max-num-batched-tokens 8192")
    assert document["set"] == {"max_num_seqs": 48, "max_num_batched_tokens": 4096}
    _, document = mitigate(capsys, "--verdict", "kv_pressure", "--args=--max-num-seqs 64", "--max-num-seqs", "100")
    assert document["set"] == {"max_num_seqs": 75}


def test_what_is_not_computed_asks_for_nothing_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(capsys, str(FIXTURES / "recordings/vllm-cpu/c_steady.jsonl.gz"), "--anyway")
    said = step(document, "max_num_seqs")["text"]
    assert "The value to set is computed only if the verdict is kv_pressure with high confidence" in said
    assert "--running" not in said
    assert "--max-num-batched-tokens to have" not in step(document, "batched-tokens")["text"]


def test_a_cut_of_the_limit_alone_says_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(capsys, "--verdict", "kv_pressure", "--max-num-seqs", "256")
    said = step(document, "max_num_seqs")["text"]
    assert document["set"] == {"max_num_seqs": 192}
    assert "run at once" not in said
    assert "below the 256 set now" in said
    assert "if fewer run, this has no effect (give --running" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "only one request is running"),
        (["--capacity-tokens", "90000", "--prompt", "2000", "--output", "500"], "only one request is running"),
        (["--running", "1"], "only one request is running"),
        (["--running", "1", "--max-num-seqs", "256"], "only one request is running"),
        (
            ["--max-num-seqs", "256", "--capacity-tokens", "900", "--prompt", "2000", "--output", "500"],
            "the KV cache holds only one request of this length",
        ),
    ],
)
def test_below_one_request_there_is_nothing_to_lower(
    capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    _, document = mitigate(capsys, "--verdict", "kv_pressure", "--max-num-seqs", "1", *more)
    found = step(document, "max_num_seqs")
    assert (found["advice"], found["values"], document["set"]) == ("not here", {}, {})
    assert f"max_num_seqs cannot be lowered further, because {why}." in found["text"]


def test_caps_are_not_rounded_beyond_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(
        capsys,
        "--verdict",
        "kv_pressure",
        "--running",
        "9",
        "--prompt",
        "90",
        "--output",
        "5",
        "--max-model-len",
        "100",
    )
    assert (document["caps"]["input_tokens"], document["caps"]["output_tokens"]) == (100, 64)


def test_caps_that_cannot_fit_are_not_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = mitigate(
        capsys,
        "--verdict",
        "kv_pressure",
        "--running",
        "50",
        "--capacity-tokens",
        "3000",
        "--prompt",
        "2000",
        "--output",
        "500",
    )
    said = step(document, "edge")["text"]
    assert "25 requests at once can still need 64 000 tokens" in said


def test_what_is_given_is_not_said_to_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", *STATED, "--gpu-memory-utilization", "0.8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("engine: KV PRESSURE, assumed; nothing was measured\n")
    for words in ("confidence", "over 5 minutes", "requests seen", "was seen", "was found", "current length"):
        assert words not in text
    assert "(p95 as given, in tokens: prompts 1 000, outputs 200)" in text
    assert "below the 100 requests running at once as given." in text
    assert "Failed allocations: unknown (no log read)." in text
    assert "(now 0.8; failed allocations: unknown)" in text
    assert "Could not be checked: crash loop, OOM kill, fragmented memory" in text
    assert main(["mitigate", "--verdict", "kv_pressure"]) == 0
    assert "No lengths were given (--prompt, --output), so these caps are examples" in capsys.readouterr().out
    assert main(["mitigate", "--verdict", "stalled"]) == 1
    assert capsys.readouterr().out.startswith(
        "engine: THIS IS NOT KV PRESSURE: STALLED, assumed; nothing was measured ("
    )
    _, document = mitigate(capsys, *STATED)
    assert (document["confidence"], document["assumed"]) == (None, True)
    _, document = mitigate(capsys, PRESSURE)
    assert (document["confidence"] > 0.5, document["assumed"]) == (True, False)


def test_without_a_server_a_value_is_unknown_and_no_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", "--verdict", "kv_pressure"]) == 0
    out = capsys.readouterr().out
    assert "current max_num_seqs: unknown" in out
    assert not re.search(r"[–—]|(?:now|force:|above|of) -(?:\s|$)|\bNone\b|\bnan\b", out, re.M)


def test_another_verdict_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", "--verdict", "concurrency_limited", "--max-num-seqs", "64"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("engine: THIS IS NOT KV PRESSURE: CONCURRENCY LIMITED")
    assert "Mitigation, in this order" not in text
    assert main(["mitigate", "--verdict", "concurrency_limited", "--anyway"]) == 1
    text = capsys.readouterr().out
    assert text.index("NOT KV PRESSURE") < text.index("Mitigation, in this order")
    status, document = mitigate(capsys, str(FIXTURES / "recordings/vllm-cpu/a_idle.jsonl.gz"))
    assert (status, document["applies"], document["set"]) == (1, False, {})


@pytest.mark.parametrize(
    ("verdict", "actions", "text"),
    [
        ("stalled", ["Save the evidence", "Restart the server"], "A restart destroys it."),
        (
            "concurrency_limited",
            ["Raise max_num_seqs", "Roll out and watch", "Or add replicas"],
            "Current value: unknown",
        ),
        ("compute_bound", ["Find the client that sends the most prompt tokens"], "Requests waiting: unknown."),
        ("host_bound", ["Give the container more CPU"], "CPU usage: unknown."),
        ("unknown", ["watch longer"], "not enough data"),
        ("healthy", ["if users still complain"], "queueing is short"),
        ("idle", ["if users still complain"], "no requests running"),
    ],
)
def test_a_stated_verdict_has_its_own_actions(
    capsys: pytest.CaptureFixture[str], verdict: str, actions: list[str], text: str
) -> None:
    assert main(["mitigate", "--verdict", verdict]) == 1
    said = capsys.readouterr().out
    for number, action in enumerate(actions, 1):
        assert f"\n  {number}. {action}" in said
    assert text in said
    _, document = mitigate(capsys, "--verdict", verdict)
    assert [step[: len(action)] for step, action in zip(document["instead"], actions, strict=False)] == actions


def test_a_recording_prints_what_each_other_action_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", str(FIXTURES / "recordings/incidents/HNG2.jsonl.gz")]) == 1
    said = capsys.readouterr().out
    assert "  1. Save the evidence\n     Saving the evidence takes a minute. A restart destroys it. " in said


def test_an_exporter_and_a_live_server(
    capsys: pytest.CaptureFixture[str], serve_json: Callable[..., str], serve_pod: Callable[..., tuple[Any, str]]
) -> None:
    address = serve_json({"/api/v1/diagnosis": document_of(Path(PRESSURE))})
    document = mitigate(capsys, "--exporter", address)[1]
    assert document["applies"] is True
    main(["diagnose", "--exporter", address, "--format", "json"])
    (diagnosed,) = json.loads(capsys.readouterr().out)["engines"]
    recommended = {name: limit["recommended"] for name, limit in diagnosed["engine"]["limits"].items()}
    assert document["set"] == {name: value for name, value in recommended.items() if value is not None}
    assert document["set"]["max_num_seqs"] == 9
    _, url = serve_pod(heavy(CHAT), 90)
    status, document = mitigate(
        capsys, url, "--args=--max-num-seqs 128 --max-num-batched-tokens 8192", "--seconds", "20"
    )
    assert status == 0
    assert document["set"]["max_num_seqs"] < 128
    assert document["set"]["max_num_batched_tokens"] == 4096


# --- patch, Helm, edge ------------------------------------------------------------------------------------


def test_the_patch_keeps_everything_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(
        yaml.safe_dump(deployment(["--max-num-seqs=100", "--api-key", "sesame", "--max_num_batched_tokens", "8192"]))
    )
    assert main(["mitigate", *STATED, "--manifest", str(file), "--format", "patch"]) == 0
    text = capsys.readouterr().out
    assert "kubectl patch deploy/chat -n inference --type strategic --patch-file" in text
    container = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
    assert container == {
        "name": "vllm",
        "args": ["--max-num-seqs=75", "--api-key", "sesame", "--max_num_batched_tokens", "4096"],
    }


def test_the_patch_of_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    script = "set -e\nexec vllm serve llama --max-num-seqs 100 --port 8000 | tee log"
    file.write_text(yaml.safe_dump(deployment(command=["bash", "-c"], args=[script])))
    assert main(["mitigate", *STATED, "--manifest", str(file), "--format", "patch"]) == 0
    args = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == ["set -e\nexec vllm serve llama --max-num-seqs 75 --port 8000 | tee log"]


def test_the_patch_needs_the_manifest_of_one_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["mitigate", *STATED, "--format", "patch"]) == 2
    assert "give --manifest FILE" in capsys.readouterr().err
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump_all([deployment(), deployment()]))
    assert main(["mitigate", *STATED, "--manifest", str(file), "--format", "patch"]) == 2
    assert "2 server containers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "namespace", "args", "other"),
    [
        ("vllm-cpu", None, ["--model", "tiny"], False),
        ("vllm-cpu", None, ["--model", "$(MODEL)"], False),
        ("vllm-cpu", None, ["--model", "/models/x", "--served-model-name", "tiny"], False),
        ("vllm", None, ["--model", "tiny"], False),
        ("chat", None, ["--model", "tiny"], True),
        ("vllm-cpu", None, ["--model", "meta-llama/Llama-3.1-8B"], True),
        ("vllm-cpu", "other", ["--model", "tiny"], True),
    ],
)
def test_a_manifest_of_another_server_is_noted(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    namespace: str | None,
    args: list[str],
    other: bool,
) -> None:
    document = deployment(["--max-num-seqs", "64", *args])
    document["metadata"] = {"name": name, **({"namespace": namespace} if namespace else {})}
    file = tmp_path / "workload.yaml"
    file.write_text(yaml.safe_dump(document))
    words = "note: the manifest may belong to another server: it has deployment/"
    assert main(["mitigate", PRESSURE, "--manifest", str(file)]) == 0
    assert (words in capsys.readouterr().out) is other
    assert main(["mitigate", PRESSURE, "--manifest", str(file), "--format", "patch"]) == 0
    assert (f"# {words}" in capsys.readouterr().out) is other
    _, found = mitigate(capsys, PRESSURE, "--manifest", str(file))
    assert len(found["notes"]) == other


def test_a_workload_with_two_servers_is_patched_where_container_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    leader, worker = (deployment(args=["--max-num-seqs", seqs])["spec"]["template"] for seqs in ("100", "40"))
    file = tmp_path / "set.yaml"
    document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "big"},
        "spec": {"leaderWorkerTemplate": {"leaderTemplate": leader, "workerTemplate": worker}},
    }
    file.write_text(yaml.safe_dump(document))
    patch = ["mitigate", *STATED, "--manifest", str(file), "--format", "patch"]
    name = leader["spec"]["containers"][0]["name"]
    assert main(patch) == 2
    assert f"choose one with --container: leaderTemplate/{name}, workerTemplate/{name}" in capsys.readouterr().err
    for container in (name, "absent"):
        assert main([*patch, "--container", container]) == 2
        assert "choose one with --container" in capsys.readouterr().err
    for template in ("leaderTemplate", "workerTemplate"):
        assert main([*patch, "--container", f"{template}/{name}"]) == 0
        change = yaml.safe_load(capsys.readouterr().out)[-1]
        assert change["path"] == f"/spec/leaderWorkerTemplate/{template}/spec/containers/0/args"
        assert change["value"][:2] == ["--max-num-seqs", "75"]


def test_container_needs_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", *STATED, "--container", "vllm"]) == 2
    assert "--container: only together with --manifest FILE or -n NAMESPACE" in capsys.readouterr().err


def test_helm_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", *STATED, "--max-num-batched-tokens", "8192", "--format", "helm"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"] == {
        "maxNumSeqs": 75,
        "extraArgs": ["--max-num-batched-tokens", "4096"],
    }


def test_no_values_no_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", "--verdict", "healthy", "--format", "helm"]) == 2
    assert "there is no value to set" in capsys.readouterr().err


_WORDS = st.sampled_from(
    [
        "vllm",
        "serve",
        "llama",
        "--max-num-seqs",
        "--max_num_seqs",
        "--max-num-seqs=9",
        "7",
        "--enforce-eager",
        "--port",
        "8000",
        "--watermark",
        "0.5",
        "--gpu-memory-utilization=0.9",
        "python3",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "-tp",
        "2",
        "",
        "a b",
        "sh",
        "-c",
        "vllm serve x --max-num-seqs 3",
        'exec vllm serve "$MODEL" && sleep 1',
    ]
)
_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 4096).map(float),
        "watermark": st.sampled_from([0.1, 0.05]),
        "gpu_memory_utilization": st.sampled_from([0.6, 0.7]),
    },
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(words=st.lists(_WORDS, max_size=9), values=_VALUES)
def test_a_changed_command_line_has_the_values_or_is_refused(words: list[str], values: dict[str, float]) -> None:
    before = parse(words).values
    try:
        after = parse(changed_flags.with_values(words, values)).values
    except InputError:
        return
    assert {name: after[name] for name in values} == {name: value_text(value) for name, value in values.items()}
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed <= set(values)


def test_edge_configuration_holds_the_caps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mitigate", *STATED, "--edge"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# engine: KV PRESSURE, assumed; nothing was measured\n--- Envoy Gateway ---\n")
    assert "Mitigation, in this order" not in text
    assert "js_content limits.check" in text
    caps = Caps(1000, 200, known=True)
    limit, lua = yaml.safe_load_all(edge.envoy_gateway(caps))
    assert limit["spec"]["requestBuffer"]["limit"] == "8Ki"
    assert "local limit = 200" in lua["spec"]["lua"][0]["inline"]
    assert f"client_max_body_size {1000 * edge.BYTES_PER_TOKEN + 2048};" in edge.nginx(caps)
    assert "const LIMIT = 200;" in edge.nginx(caps)


# --- verification -----------------------------------------------------------------------------------------


def test_a_server_that_was_never_ill_is_well(
    capsys: pytest.CaptureFixture[str], serve_pod: Callable[..., tuple[Any, str]]
) -> None:
    _, url = serve_pod(CHAT, 120)
    assert main(["mitigate", "--verify", url, "--verify-seconds", "120"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("WELL after")
    assert "no problem while watched" in text
    assert "ok   headroom in the KV cache" in text


def test_silence_proves_no_recovery(
    capsys: pytest.CaptureFixture[str], serve_pod: Callable[..., tuple[Any, str]]
) -> None:
    _, url = serve_pod(replace(CHAT, load=replace(CHAT.load, requests_per_second=0.0)), 120)
    assert main(["mitigate", "--verify", url, "--verify-seconds", "60"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("NOT PROVEN after")
    assert "no traffic" in text


@pytest.mark.parametrize(
    ("verdict", "queue", "headline"),
    [
        ("healthy", True, "NOT PROVEN"),
        ("healthy", None, "NOT PROVEN"),
        ("healthy", False, "NOT RECOVERED"),
        ("kv_pressure", True, "NOT RECOVERED"),
    ],
)
def test_well_at_the_end_only_is_no_failure(verdict: str, queue: bool | None, headline: str) -> None:
    text = "\n".join(outcome_lines(Outcome(False, "chat-0", verdict, 40, (Check("queue", queue, "0", "0"),))))
    assert text.startswith(headline)
    assert ("not for 30 s without a break" in text) is (headline == "NOT PROVEN")


def test_a_server_that_stays_full_has_not(
    capsys: pytest.CaptureFixture[str], serve_pod: Callable[..., tuple[Any, str]]
) -> None:
    _, url = serve_pod(heavy(CHAT), 120)
    assert main(["mitigate", "--verify", url, "--verify-seconds", "60", "--format", "json"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["recovered"] is False
    assert (outcome["engine"], outcome["verdict"]) == (
        f"{url.removeprefix('http://')} chat-13b engine 0",
        "kv_pressure",
    )
    assert {check["name"]: check["ok"] for check in outcome["checks"]}["verdict"] is False


def test_recovery_during_the_watch(
    capsys: pytest.CaptureFixture[str],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    serve_pod: Callable[..., tuple[Any, str]],
) -> None:
    """The limits come down while it is watched, as in the demo's story."""
    from lab.demo.node import PodChange

    node, url = serve_pod(heavy(CHAT), 90)
    begin, sleep = clock.t, clock.sleep
    done: list[bool] = []

    def sleep_and_mitigate(seconds: float) -> None:
        sleep(seconds)
        if clock.t > begin + 20 and not done:
            done.append(True)
            calm = replace(heavy(CHAT).load, max_tokens=128, prompt_limit=1024)
            node.apply({CHAT.name: PodChange(load=calm, limits={"max_num_seqs": 64})}, clock.t)

    monkeypatch.setattr(clock, "sleep", sleep_and_mitigate)
    assert main(["mitigate", "--verify", url, "--verify-seconds", "180"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("RECOVERED after")
    assert "kv_pressure at first" in text


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--verdict", "slow"], "--verdict: 'slow' is not allowed; allowed: idle, "),
        (["--verdict", "kv_pressure", "http://a"], "remove one of them"),
        ([*STATED, "--max-num-seqs", "0"], "allowed: a whole number from 1 to 1000000000"),
        ([*STATED, "--gpu-memory-utilization", "1.5"], "above 0 and up to 1"),
        ([*STATED, "--vllm-version", "new"], "a version like"),
        ([*STATED, "--manifest", "/nowhere"], "/nowhere: No such file"),
        (["--verify", "http://a", "http://b"], "not together"),
        (["--verify", "ftp://a"], "--verify"),
        (["--verify", "http://a", "--verify-seconds", "-1"], "above 0"),
        (["missing.jsonl"], "missing.jsonl: No such file"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["mitigate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err


def test_nobody_to_verify(capsys: pytest.CaptureFixture[str], clock: FakeClock) -> None:
    assert main(["mitigate", "--verify", f"http://{dead_address()}", "--verify-seconds", "5"]) == 2
    assert "connection refused; is a vLLM server running there?" in capsys.readouterr().err
    del clock


def test_shell_words_are_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = deployment(["--max-num-seqs", "100"])
    document["metadata"]["namespace"] = "a; rm -rf /"
    file = tmp_path / "odd.yaml"
    file.write_text(yaml.safe_dump(document))
    main(["mitigate", *STATED, "--manifest", str(file)])
    assert f"-n {shlex.quote('a; rm -rf /')}" in capsys.readouterr().out
