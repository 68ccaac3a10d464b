"""What the page is made of: history, sparklines, triage steps, plans, links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.advice.mitigation import MitigationPlan, plan
from kvpressure.advice.triage import TriageStep, steps
from kvpressure.diagnosis.conditions import CONDITIONS
from kvpressure.model.readings import ContainerReading, NodeCondition, Snapshot, Termination
from kvpressure.model.signals import (
    BatchSignals,
    ComputeSignals,
    ContextSignals,
    HostSignals,
    KvSignals,
    LatencySignals,
    LoadSignals,
    MemorySignals,
    ProgressSignals,
    Signals,
)
from kvpressure.model.state import (
    VERDICTS,
    ContainerState,
    Diagnosis,
    EngineState,
    Found,
    Limit,
    State,
    TargetState,
)
from kvpressure.publish.links import DASHBOARDS, VERDICT_RUNBOOKS, Links
from kvpressure.publish.page import view
from kvpressure.publish.page.history import SERIES, SLOT_SECONDS, SLOTS, PageHistory
from kvpressure.publish.page.sparkline import HEIGHT, WIDTH, sparkline
from kvpressure.publish.page.view import ViewContext, engine_view, headline
from kvpressure.settings.thresholds import builtin
from tests.publish.states import NOW, full_engine, unknown_engine, with_findings

T = builtin()
ROOT = Path(__file__).parents[2]


def engine_with(verdict: str = "kv_pressure", confidence: float = 0.9, **groups: object) -> EngineState:
    signals = replace(Signals(time=NOW), **groups)
    engine = replace(full_engine(), signals=signals, diagnosis=Diagnosis(verdict, confidence, None, NOW))
    return with_findings(engine)


class TestHistory:
    def observe(
        self, history: PageHistory, time: float, kv: float | None, pod: str = "chat-0", up: bool = True
    ) -> None:
        engine = replace(full_engine(pod), up=up, signals=Signals(time=time, kv=KvSignals(kv_used_ratio_max=kv)))
        history.observe(Snapshot(time=time), State(time=time, engines=(engine,)))

    def series(self, history: PageHistory) -> list[float | None]:
        return list(history.of(full_engine().key)["kv_used_ratio_max"])

    def test_a_slot_keeps_its_largest_value_and_the_newest_is_last(self) -> None:
        history = PageHistory()
        for offset, kv in ((0, 0.5), (4, 0.75), (8, 0.25), (10, 0.125)):
            self.observe(history, NOW + offset, kv)
        assert self.series(history)[-3:] == [None, 0.75, 0.125]

    def test_slots_without_a_value_are_gaps(self) -> None:
        history = PageHistory()
        self.observe(history, NOW, 0.5)
        self.observe(history, NOW + 3 * SLOT_SECONDS, None)
        self.observe(history, NOW + 4 * SLOT_SECONDS, 0.9, up=False)
        assert self.series(history)[-5:] == [0.5, None, None, None, None]

    def test_old_values_fall_out_after_fifteen_minutes(self) -> None:
        history = PageHistory()
        self.observe(history, NOW, 1.0)
        self.observe(history, NOW + (SLOTS - 1) * SLOT_SECONDS, 0.5)
        assert (self.series(history)[0], len(self.series(history))) == (1.0, SLOTS)
        self.observe(history, NOW + SLOTS * SLOT_SECONDS, 0.5)
        assert 1.0 not in self.series(history)

    @pytest.mark.parametrize("step", [-7200.0, 7 * 86400.0])
    def test_a_step_of_the_clock_leaves_nothing_false(self, step: float) -> None:
        history = PageHistory()
        self.observe(history, NOW, 1.0)
        self.observe(history, NOW + step, 0.25)
        assert [value for value in self.series(history) if value is not None] == [0.25]

    def test_an_engine_that_is_gone_is_forgotten(self) -> None:
        history = PageHistory()
        self.observe(history, NOW, 0.5, pod="old-0")
        self.observe(history, NOW, 0.5)
        assert history.of(full_engine("old-0").key) == {}
        assert set(history.of(full_engine().key)) == set(SERIES)


class TestSparkline:
    def test_points_run_from_left_to_right_and_stay_inside(self) -> None:
        found = sparkline([0.0, 0.5, 2.0], top=1.0, mark=0.97)
        points = [tuple(map(float, point.split(","))) for point in found.lines[0].split()]
        assert points == [(2.0, HEIGHT - 2.0), (WIDTH / 2, HEIGHT / 2), (WIDTH - 2.0, 2.0)]
        assert found.mark == 3.1
        assert (found.now, found.highest) == (2.0, 2.0)

    def test_gaps_break_the_line_and_a_lonely_point_is_seen(self) -> None:
        lines = sparkline([1.0, 1.0, None, 1.0, None]).lines
        assert [len(line.split()) for line in lines] == [2, 2]
        assert lines[1].split()[0] == lines[1].split()[1]


class TestTriage:
    def step(self, number: int, engine: EngineState, state: State | None = None) -> TriageStep:
        found = steps(engine, state or State(time=NOW), T)
        assert [step.number for step in found] == list(range(1, 9))
        return found[number - 1]

    def container(self, **reading: object) -> State:
        given = ContainerReading("prod", "chat-0", "vllm", **reading)
        return State(time=NOW, containers=(ContainerState(given),))

    def test_1_pod(self) -> None:
        findings = {True: "fine", False: "bad", None: "unknown"}
        for ready, finding in findings.items():
            assert self.step(1, full_engine(), self.container(ready=ready)).finding == finding

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

    def test_3_signature(self) -> None:
        for high, low, demand, finding in (
            (0.93, 0.3, 0.5, "look"),
            (0.93, 0.9, 0.5, "fine"),
            (0.93, 0.9, T["memory_warning_ratio"], "look"),
            (None, 0.3, None, "unknown"),
            (None, 0.9, None, "fine"),
        ):
            engine = engine_with(
                memory=MemorySignals(device_used_ratio=high, device_demand_ratio=demand),
                compute=ComputeSignals(gpu_utilization=low),
                progress=ProgressSignals(work_present=True),
            )
            step = self.step(3, engine)
            assert step.finding == finding
            assert 'Thresholds are documented in "KV Cache Diagnostics".' in step.answers

    def test_4_log(self) -> None:
        assert self.step(4, engine_with()).finding == "unknown"
        assert self.step(4, engine_with(events_known=True, events={"capacity": 1, "stats": 9})).finding == "fine"
        failed = self.step(4, engine_with(events_known=True, events={"cuda_oom": 2, "engine_dead": 1}))
        assert failed.finding == "bad"
        assert failed.answers == (
            "The log shows recent allocation failures: 2 in the last 10 min.",
            "The log shows that GPU memory ran out: 2 × in the last 10 min.",
            "Notable log lines: CUDA OOM (2 ×), engine dead (1 ×).",
        )

    def test_5_requests(self) -> None:
        spike = T["context_spike_ratio"]
        assert self.step(5, engine_with()).finding == "unknown"
        assert self.step(5, engine_with(context=ContextSignals(context_spike_ratio=spike - 0.1))).finding == "fine"
        assert self.step(5, engine_with(context=ContextSignals(context_spike_ratio=spike))).finding == "look"
        over = engine_with(kv=KvSignals(kv_overcommit_ratio=1.0))
        assert self.step(5, over).finding == "look"

    def test_6_node(self) -> None:
        findings = {("MemoryPressure", True): "look", ("MemoryPressure", False): "fine", ("Ready", True): "fine"}
        findings |= {("Ready", False): "look", ("Ready", None): "unknown"}
        for condition, finding in findings.items():
            state = State(time=NOW, node_conditions=(NodeCondition(*condition),))
            assert self.step(6, full_engine(), state).finding == finding

    def test_7_endpoint(self) -> None:
        target = TargetState(full_engine().target, True, 0.004, 3)
        step = self.step(7, full_engine(), State(time=NOW, targets=(target,)))
        assert (step.finding, step.answers) == (
            "fine",
            ("http://10.0.0.5:8000/chat-0: scraped in 4 ms.", "3 lines could not be parsed."),
        )
        crowded = TargetState(full_engine().target, True, 0.004, 0, cut={"engines": 60, "series": 4})
        step = self.step(7, full_engine(), State(time=NOW, targets=(crowded,)))
        assert step.answers[1] == "Left out: 60 engines, 4 series."
        down = self.step(7, unknown_engine(up=False))
        assert (down.finding, down.answers) == (
            "bad",
            ("http://10.0.0.5:8000/chat-0: scrape failed: connection refused.",),
        )

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
        ("verdict", "still", "short", "finding"),
        [
            ("stalled", True, False, "bad"),
            ("unknown", True, True, "look"),
            ("kv_pressure", False, False, "look"),
            ("kv_pressure", False, None, "unknown"),
            ("healthy", False, True, "fine"),
        ],
    )
    def test_8_without_latency_is_judged_by_queue_and_progress(
        self, verdict: str, still: bool, short: bool | None, finding: str
    ) -> None:
        engine = engine_with(verdict, load=LoadSignals(running=10.0, waiting=38.0))
        facts = {"no_progress": still, "queue_short": short}
        evidence = {name: Found(name, value, f"{name} sentence") for name, value in facts.items()}
        evidence["signature_batch_collapsed"] = Found("signature_batch_collapsed", False, "")
        found = replace(engine.diagnosis, evidence=evidence)
        step = self.step(8, replace(engine, diagnosis=found))
        assert step.finding == finding
        assert ("No_progress sentence." in step.answers) is still

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
        titles |= {"tgi": "Point the target at vLLM, SGLang or NIM servers"}
        titles |= {"dcgm_exporter": "Point the target at the model servers"}
        titles |= {"production_stack_router": "Point the target at the engine pods that its label server names"}
        titles |= dict.fromkeys(("html", "empty"), "Point the target at the metrics endpoint of an engine")
        key = replace(full_engine().key, namespace="", pod="10.0.0.5:80")
        for error, title in titles.items():
            (action,) = plan(replace(unknown_engine(up=False), key=key, error=error), T).actions
            assert action.title == title
            assert ("ss -ltnp 'sport = :80'" in action.commands) is (error in ("refused", "timeout"))


class TestPlan:
    def flags(self, made: MitigationPlan) -> list[str]:
        return [flag for action in made.actions for flag in action.flags]

    @pytest.mark.parametrize(
        ("stuck", "title", "runbooks"),
        [
            (8.0, "Wait a few seconds for a verdict", ["InferenceStalled"]),
            (19.5, "Wait a few seconds for a verdict", ["InferenceStalled"]),
            (40.0, "Check the triage steps", ["InferenceStalled"]),
            (0.0, "Check the triage steps", []),
            (None, "Check the triage steps", []),
        ],
    )
    def test_what_nobody_can_provide_is_not_asked_for(
        self, stuck: float | None, title: str, runbooks: list[str]
    ) -> None:
        engine = engine_with("unknown", 0.4, progress=ProgressSignals(seconds_without_progress=stuck))
        evidence = {"no_progress": Found("no_progress", stuck and stuck >= 8, "no progress")}
        found = replace(engine.diagnosis, missing=("why it waits", "GPU activity"), inputs=("GPU activity",))
        engine = replace(engine, diagnosis=replace(found, evidence=evidence))
        assert [(action.title, action.text) for action in plan(engine, T).actions] == [
            (title, "Evidence still missing: why it waits."),
            ("Provide the missing inputs", "Inputs missing for a verdict: GPU activity."),
        ]
        assert plan(replace(engine, limits={}), T).actions[-1].text.endswith(";args=--max-num-seqs N'.")
        view = engine_view(engine, State(time=NOW, engines=(engine,)), ViewContext())
        assert [link.title for link in view.runbooks] == runbooks

    def test_kv_pressure_follows_the_guide_in_its_order_with_the_values_to_set(self) -> None:
        engine = replace(
            engine_with(
                kv=KvSignals(kv_capacity_tokens=42_416.0),
                load=LoadSignals(in_flight=133.0),
                context=ContextSignals(prompt_quantiles={"0.95": 500.0}, output_quantiles={"0.95": 300.0}),
            ),
            limits={
                "max_num_seqs": Limit("max_num_seqs", 128.0, True, "args", 39.0),
                "max_num_batched_tokens": Limit("max_num_batched_tokens", 8192.0, True, "log", 4096.0),
                "gpu_memory_utilization": Limit("gpu_memory_utilization", 0.92, False, "default", None),
            },
        )
        made = plan(engine, T)
        assert [action.title for action in made.actions] == [
            "Cap input and output tokens at the edge",
            "Lower max_num_seqs",
            "Lower max-num-batched-tokens",
            'Skip for now: "Lower gpu-memory-utilization to 0.7, then 0.6"',
            'If KV pressure persists: add KV memory (this step is not in the guide "Emergency Mitigation")',
            "Apply and watch the rollout",
            'Skip for now: "Controlled restart after the limits are lowered"',
            "Verify",
        ]
        assert self.flags(made) == ["--max-num-seqs 39", "--max-num-batched-tokens 4096"]
        assert "39 requests at once need at most 32 448 tokens; the KV capacity is 42 416" in made.actions[0].text
        assert made.actions[1].text.startswith(
            "Current max_num_seqs: 128 (set in the arguments). Set max_num_seqs to 39 (running now: unknown). "
        )
        assert 'The guide "Emergency Mitigation" cuts max_num_seqs by 25 % to 50 %.' in made.actions[1].text
        assert all("Cost: " in action.text for action in made.actions[:5])
        assert not any(action.commands for action in made.actions if action.title.startswith("Skip for now: "))

    def test_memory_share_and_restart_come_only_when_they_help(self) -> None:
        limits = {"gpu_memory_utilization": Limit("gpu_memory_utilization", 0.92, True, "args", 0.7)}
        engine = replace(engine_with(), limits=limits)
        engine = replace(engine, diagnosis=replace(engine.diagnosis, conditions={"crash_loop": True}))
        titles = [action.title for action in plan(engine, T).actions]
        assert titles.index("Controlled restart after the limits are lowered") > titles.index(
            "Apply and watch the rollout"
        )
        assert self.flags(plan(engine, T)) == ["--gpu-memory-utilization 0.7"]

    def test_what_is_not_computed_or_not_known_says_why(self) -> None:
        limits = {"max_num_seqs": Limit("max_num_seqs", 128.0, True, "args", None)}
        said = "The value to set is computed only if the verdict is kv_pressure with high confidence"
        engine = engine_with(load=LoadSignals(running=40.0))
        assert said in plan(replace(engine, limits=limits), T).actions[1].text
        for failed, said in (
            (False, "fail, and no failed allocation was found."),
            (None, "fail. Failed allocations: unknown (no log read)."),
        ):
            engine = replace(engine_with(), limits={})
            engine = replace(engine, diagnosis=replace(engine.diagnosis, conditions={"gpu_out_of_memory": failed}))
            assert said in next(one.text for one in plan(engine, T).actions if "gpu-memory-utilization" in one.title)

    def test_a_sequence_limit_is_raised_to_what_is_recommended_and_says_what_fits(self) -> None:
        for raised, expected in ((48.0, ["--max-num-seqs 48"]), (None, [])):
            engine = engine_with("concurrency_limited", load=LoadSignals(kv_share_held=0.75 / 77.9, max_num_seqs=24.0))
            engine = replace(engine, limits={"max_num_seqs": Limit("max_num_seqs", 24.0, True, "args", raised)})
            made = plan(engine, T)
            assert self.flags(made) == expected
            assert "about 77 fit with 25 % of the KV cache to spare" in made.actions[0].text


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


def headline_of(*engines: EngineState) -> str:
    return headline(map(view.said, engines), len(engines))


def test_the_headline_names_trouble_first() -> None:
    healthy = replace(full_engine("calm-0"), diagnosis=Diagnosis("healthy", 0.9, None, NOW))
    assert headline_of(healthy, healthy, full_engine()) == "3 engines: 1 KV pressure, 2 healthy."
    assert headline_of() == "No engine found on this node."
