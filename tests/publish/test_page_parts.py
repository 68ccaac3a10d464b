"""What the page is made of: triage steps, plans, links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.advice.triage import TriageStep, steps
from kvpressure.diagnosis.conditions import CONDITIONS
from kvpressure.model.readings import ContainerReading, Termination
from kvpressure.model.signals import (
    BatchSignals,
    HostSignals,
    LatencySignals,
    LoadSignals,
    MemorySignals,
    ProgressSignals,
    Signals,
)
from kvpressure.model.state import VERDICTS, ContainerState, Diagnosis, EngineState, State
from kvpressure.publish.links import DASHBOARDS, VERDICT_RUNBOOKS, Links
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.settings.thresholds import builtin
from tests.publish.states import NOW, full_engine, unknown_engine, with_findings

T = builtin()
ROOT = Path(__file__).parents[2]


def engine_with(verdict: str = "kv_pressure", confidence: float = 0.9, **groups: object) -> EngineState:
    signals = replace(Signals(time=NOW), **groups)
    engine = replace(full_engine(), signals=signals, diagnosis=Diagnosis(verdict, confidence, None, NOW))
    return with_findings(engine)


@pytest.mark.parametrize(("ratio", "words"), [(0.8, "Less than 80 %"), (0.7, "At least 70 %")])
def test_triage_is_judged_by_the_thresholds_of_the_site(ratio: float, words: str) -> None:
    site = T.override({"memory_warning_ratio": ratio}, "file")
    signals = Signals(time=NOW, memory=MemorySignals(device_demand_ratio=0.75))
    engine = with_findings(replace(unknown_engine(), signals=signals), site)
    html = render_page(State(time=NOW, engines=(engine,)), "node-1", ViewContext(site))
    assert words in html[html.index("The eight triage steps") :]


class TestTriage:
    def step(self, number: int, engine: EngineState, state: State | None = None) -> TriageStep:
        found = steps(engine, state or State(time=NOW), T)
        assert [step.number for step in found] == list(range(1, 9))
        return found[number - 1]

    def container(self, **reading: object) -> State:
        given = ContainerReading("prod", "chat-0", "vllm", **reading)
        return State(time=NOW, containers=(ContainerState(given),))

    def test_2_restarts(self) -> None:
        killed = self.container(restarts=2, last_termination=Termination("OOMKilled", 137, NOW - 60))
        calm, recent = (engine_with(host=HostSignals(restarts_recent=count)) for count in (0.0, 1.0))
        unwatched, least = (
            engine_with(host=HostSignals(restarts_recent=count, restarts_all_known=False)) for count in (None, 1.0)
        )
        for engine, state, finding, said in (
            (recent, killed, "bad", "exit code 137"),
            (calm, killed, "fine", ""),
            (recent, self.container(restarts=2), "look", ""),
            (calm, None, "unknown", ""),
            (unwatched, self.container(restarts=17), "unknown", "last 30 minutes: unknown"),
            (least, self.container(restarts=17), "look", "in the last 30 minutes: at least 1)"),
            (
                least,
                self.container(restarts=1),
                "look",
                "Restarts since the pod was created: 1 (in the last 30 minutes: 1).",
            ),
        ):
            step = self.step(2, engine, state)
            assert step.finding == finding
            assert said in " ".join(step.answers)

    def test_8_metrics(self) -> None:
        findings = {
            None: "unknown",
            1.0: "fine",
            T["latency_rising_ratio"]: "look",
            T["latency_multiplied_ratio"]: "bad",
        }
        for ratio, finding in findings.items():
            ratios = {} if ratio is None else {"ttft": ratio}
            latency = LatencySignals(inter_token={"0.95": 0.05}, baseline_ratios=ratios)
            step = self.step(8, engine_with(latency=latency, batch=BatchSignals(batch_p95=40.0)))
            assert step.finding == finding
            assert "time per output token p95 50 ms" in " ".join(step.answers)

    @pytest.mark.parametrize(
        ("phase", "seconds", "ratio", "finding"),
        [
            ("ttft", 19.0, None, "look"),
            ("queue", 19.0, None, "look"),
            ("ttft", T["ttft_floor_seconds"] - 0.1, None, "fine"),
            ("ttft", 19.0, 1.0, "fine"),
            ("ttft", T["wait_page_seconds"], 1.0, "bad"),
            ("queue", T["wait_page_seconds"], None, "bad"),
        ],
    )
    def test_8_is_not_fine_while_users_wait(
        self, phase: str, seconds: float, ratio: float | None, finding: str
    ) -> None:
        ratios = {} if ratio is None else {"ttft": ratio}
        latency = LatencySignals(**{phase: {"0.95": seconds}}, baseline_ratios=ratios)
        batch, progress = BatchSignals(batch_p95=40.0), ProgressSignals(work_present=True)
        engine = engine_with(latency=latency, load=LoadSignals(waiting=93.0), batch=batch, progress=progress)
        assert self.step(8, engine).finding == finding

    @pytest.mark.parametrize(
        ("pod", "typed"),
        [
            ("vllm.service", ("systemctl status", "journalctl --since -2h -u", "systemctl restart")),
            ("docker:ab12ab12ab12", ("docker inspect", "docker logs --since 2h", "docker restart")),
            ("podman:ab12ab12ab12", ("podman inspect", "podman logs --since 2h", "podman restart")),
        ],
    )
    def test_a_server_of_a_host_gets_commands_with_its_unit_or_container(
        self, pod: str, typed: tuple[str, ...]
    ) -> None:
        commands = []
        for verdict, up in (("stalled", True), ("unknown", False)):
            engine = replace(engine_with(verdict), up=up, key=replace(full_engine().key, namespace="", pod=pod))
            commands += [step.command for step in steps(engine, State(time=NOW), T)]
            commands += [command for action in plan(engine, T).actions for command in action.commands]
        name = pod.rpartition(":")[2]
        assert [one for one in typed if not any(command.startswith(f"{one} {name}") for command in commands)] == []
        assert [command for command in commands if "kubectl" in command or "<" in command.replace("<$f", "")] == []

    @pytest.mark.parametrize("verdict", ["kv_pressure", "concurrency_limited", "host_bound", "stalled", "unknown"])
    def test_a_server_known_by_its_address_gets_commands_of_a_host(self, verdict: str) -> None:
        for up in (True, False):
            engine = replace(
                engine_with(verdict), up=up, key=replace(full_engine().key, namespace="", pod="10.0.0.5:80")
            )
            commands = [step.command for step in steps(engine, State(time=NOW), T)]
            actions = plan(engine, T).actions
            commands += [command for action in actions for command in action.commands]
            assert [action.title for action in actions if "the pod" in action.title] == []
            answers = [answer for step in steps(engine, State(time=NOW), T) for answer in step.answers]
            assert [answer for answer in answers if "the pod" in answer or "container" in answer] == []
            assert [command for command in commands if "kubectl" in command] == []
            assert "curl -s http://10.0.0.5:8000/chat-0 | head" in commands

    def test_the_first_action_for_another_program_is_another_target(self) -> None:
        titles = dict.fromkeys(("refused", "timeout"), "Check that the server is running")
        titles |= {"target_limit": "Raise --engine.max-targets"}
        titles |= {"tgi": "Point the target at vLLM, SGLang or NIM servers"}
        titles |= {"dcgm_exporter": "Point the target at the model servers"}
        titles |= {"production_stack_router": "Point the target at the engine pods that its label server names"}
        titles |= dict.fromkeys(("html", "empty"), "Point the target at the metrics endpoint of an engine")
        key = replace(full_engine().key, namespace="", pod="10.0.0.5:80")
        for error, title in titles.items():
            (action,) = plan(replace(unknown_engine(up=False), key=key, error=error), T).actions
            assert action.title == title
            assert ("ss -ltnp 'sport = :80'" in action.commands) is (error in ("refused", "timeout"))


class TestLinks:
    def test_every_runbook_and_dashboard_exists(self) -> None:
        for name in {*VERDICT_RUNBOOKS.values(), *(one.runbook for one in CONDITIONS)}:
            assert (ROOT / f"docs/runbooks/{name}.md").is_file(), name
        assert set(VERDICT_RUNBOOKS) == set(VERDICTS) - {"healthy", "idle"}
        of_fleets = {"kvpressure-fleet"}  # no engine's page leads there
        assert {path.stem for path in (ROOT / "dashboards").glob("*.json")} == set(DASHBOARDS) | of_fleets

    def test_a_name_from_outside_cannot_leave_its_parameter(self) -> None:
        key = replace(full_engine().key, pod="a&var-x=1#</a>")
        assert (
            Links(dashboards="https://g.example")
            .dashboard("kvpressure-incident", key)
            .url.endswith("&var-pod=a%26var-x%3D1%23%3C%2Fa%3E")
        )
