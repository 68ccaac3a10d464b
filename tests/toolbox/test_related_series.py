"""What other exporters' series become: bounded, of this pod and container only, and never stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpressure.toolbox.related_series import AGE_SECONDS, MAX_GPUS, PodSeries

Row = dict[str, Any]


def row(name: str, value: str, times: Sequence[float] = (100.0,), **labels: str) -> Row:
    return {"metric": {"__name__": name, **labels}, "values": [[t, value] for t in times]}


def loaded(*rows: Row, renamed: Sequence[Row] = (), by_uuid: Sequence[Row] = ()) -> PodSeries:
    """What is known when a Prometheus answers with these rows."""
    beside = PodSeries("inference", "vllm-0", "vllm")

    def ask(_names: str, labels: Mapping[str, str], begin: float, end: float) -> Sequence[Mapping[str, Any]]:
        assert begin < end
        return by_uuid if "uuid=~" in labels else renamed if "exported_pod" in labels else rows

    beside.load(ask, 90.0, 200.0)
    return beside


RESTARTS = "kube_pod_container_status_restarts_total"


def test_a_sample_counts_for_two_minutes_and_not_longer() -> None:
    beside = loaded(row(RESTARTS, "3", container="vllm"))
    assert beside.containers(99.9) == ()
    assert beside.containers(100.0)[0].restarts == 3
    assert beside.containers(100.0 + AGE_SECONDS)[0].restarts == 3
    assert beside.containers(100.1 + AGE_SECONDS) == ()


def test_only_a_reason_that_holds_is_told() -> None:
    reason = "kube_pod_container_status_last_terminated_reason"
    beside = loaded(
        row(reason, "0", container="vllm", reason="Error"),
        row(reason, "1", container="vllm", reason="OOMKilled"),
        row("kube_pod_container_status_last_terminated_exitcode", "137", container="vllm"),
        row(RESTARTS, "1", container="vllm"),
    )
    ended = beside.containers(100.0)[0].last_termination
    assert ended is not None
    assert (ended.reason, ended.exit_code, ended.finished_at) == ("OOMKilled", 137, None)


def test_what_is_missing_is_absent_and_never_zero() -> None:
    assert loaded().containers(100.0) == ()
    assert loaded().gpus(100.0) == ()
    (container,) = loaded(row(RESTARTS, "0", container="vllm")).containers(100.0)
    assert (container.restarts, container.ready, container.cpu_periods, container.last_termination) == (
        0,
        None,
        None,
        None,
    )
    (gpu,) = loaded(row("DCGM_FI_DEV_FB_USED", "10", UUID="GPU-a", container="vllm")).gpus(100.0)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.utilization_ratio) == (10 * 2**20, None, None)


def test_the_gpus_of_a_pod_are_bounded() -> None:
    beside = loaded(*(row("DCGM_FI_DEV_GPU_UTIL", "50", UUID=f"GPU-{index}") for index in range(100)))
    assert len(beside.gpus(100.0)) == MAX_GPUS


def test_only_gpus_that_the_pod_owns_are_asked_for() -> None:
    asked: list[str] = []
    beside = PodSeries("inference", "vllm-0", "vllm")

    def ask(_names: str, labels: Mapping[str, str], _begin: float, _end: float) -> Sequence[Mapping[str, Any]]:
        if "uuid=~" in labels:
            asked.append(labels["uuid=~"])
            return [row("kvpressure_gpu_utilization_ratio", "0.4", uuid="GPU-a-1")]
        return [row("kvpressure_gpu_pod_info", "1", uuid=uuid) for uuid in ("GPU-a-1", 'x"} or vector(1)#')]

    beside.load(ask, 90.0, 200.0)
    assert asked == ["GPU-a-1"]
    assert beside.gpus(100.0)[0].utilization_ratio == 0.4
