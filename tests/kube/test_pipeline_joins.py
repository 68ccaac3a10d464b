"""What the pipeline makes of what only a Kubernetes node tells: the environment of pods, the pods of processes."""

from __future__ import annotations

from kvpressure.pipeline import Pipeline
from kvpressure.readings import EnginePage, EngineReading, GpuProcess, GpuReading, Snapshot


def page(pod: str, seqs: str) -> EnginePage:
    return EnginePage(f"http://{pod}:8000/metrics", 1000.0, "inference", pod, "vllm", (),
                      ("vllm", "serve", "m", "--max-num-seqs", "$(SEQS)"), {"SEQS": seqs},
                      engines=(EngineReading("m", "0", {"running": 1.0}),))


def test_the_same_command_line_in_two_environments_gives_two_limits() -> None:
    state = Pipeline().observe(Snapshot(1000.0, pages=(page("a", "8"), page("b", "16"))))
    assert {engine.key.pod: engine.limits["max_num_seqs"].value for engine in state.engines} == {"a": 8, "b": 16}


def test_memory_of_processes_is_summed_by_pod() -> None:
    gpu = GpuReading("GPU-0", 0, "nvidia", processes=(
        GpuProcess(1, 10), GpuProcess(2, 20), GpuProcess(3, 40), GpuProcess(4, 80), GpuProcess(5, None)))
    pods = {1: ("ns", "a"), 2: ("ns", "a"), 3: ("", ""), 5: ("ns", "a")}
    state = Pipeline().observe(Snapshot(1000.0, gpus=(gpu,), process_pods=pods))
    assert state.gpus[0].process_bytes == {("ns", "a"): 30, ("", ""): 40}
