"""What ends the failures that log and pod of an engine show, and those of its pair: memory that ran out, a start that
failed, probes, transfers of KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvpressure.advice.action import Action, container_limits, is_pod, of_pod, on_host, value_and_flag, workload
from kvpressure.advice.limits import peer_of
from kvpressure.advice.plan import roll_out
from kvpressure.engines.registry import dialect
from kvpressure.model.log_events import ALLOCATION_EVENTS, EVENTS
from kvpressure.model.reasons import TIMEOUT
from kvpressure.model.state import EngineState
from kvpressure.printable import PIPE, UNKNOWN, capital, command, named, say

_FITTING: Final = {
    "context_too_long": ("max_model_len", "fitting_tokens"),
    "too_few_blocks": ("max_num_seqs", "fitting_requests"),
}
_GPU_MEMORY: Final = {
    "load_oom": ("Give the model more GPU memory", "Use more GPUs (tensor parallel) or quantized weights."),
    "no_kv_blocks": ("Raise {gpu_memory_utilization}", "Or use more GPUs (tensor parallel) or quantized weights."),
    "memory_profiling_failed": ("End the other processes on the GPU", "Then start the engine again."),
}
_AT_RUN_TIME: Final = ("cuda_oom", "warmup_oom")
_HOST_MEMORY: Final = ("host_oom_killed", "host_memory_near_limit")


def start_failure(engine: EngineState) -> str:
    """The failed allocation that the log of an engine names; "" without one."""
    names = (*_FITTING, *sorted(ALLOCATION_EVENTS), "host_oom")
    return next((name for name in names if name in engine.signals.events), "")


def failures(engine: EngineState) -> Iterator[Action]:
    """What ends the failures that log and pod show, whatever the verdict."""
    failed, beside = start_failure(engine), engine.diagnosis.conditions
    why = f"The engine's log: {EVENTS[failed]}." if failed else ""
    if failed in _FITTING:
        yield _fitting(engine, failed, why)
    elif failed in _GPU_MEMORY:
        title, text = _GPU_MEMORY[failed]
        called = dialect(engine.dialect).called("gpu_memory_utilization")
        yield Action(title.format(gpu_memory_utilization=called), f"{why} {text}")
    elif failed in _AT_RUN_TIME:
        yield from _at_run_time(engine, why)
    host = next((name for name in _HOST_MEMORY if beside.get(name)), "")
    if failed == "host_oom" or host:
        yield _host_memory(engine, why or f"{capital(engine.diagnosis.beside[host].text)}.")
    elif beside.get("crash_loop") and engine.error == TIMEOUT:
        yield _probes(engine)


_OF_TRANSFERS: Final = {
    "answers_suspect": (
        "Raise kv_lease_duration, and relieve the decode servers",
        "They ended with HTTP 200. Until no more are counted, take the pair out of service, or let requests wait on"
        " decode for less than the lease (30 s by default, in kv_connector_extra_config).",
    ),
    "loads_stuck": (
        "Look at the {peer} servers: what they hold back",
        "One that is gone, has no slots or could not write tells nobody, and requests wait for minutes.",
    ),
    "transfer_failing": (
        "Check the network between both servers, and the log of the {peer} server",
        "A request whose load fails ends with an error, or its prompt is computed here (kv_load_failure_policy). On"
        " models with several kinds of KV cache it may get a wrong answer.",
    ),
    "transfer_slow": (
        "Find what slows the transfers between both servers: the network, or its other traffic",
        "Requests hold KV blocks here until theirs have come.",
    ),
    "lease_expired": (
        "Relieve the decode servers, which fetch too late, or raise the lease",
        "What was computed is thrown away. Clients that hang up between the two servers cause it, too.",
    ),
    "prefill_wasted": (
        "Find why the decode server computes prompts itself",
        "The prefill servers work for nothing. Failed loads that are recomputed need not be counted anywhere.",
    ),
}
_NONE_SUCCEEDED: Final = "Check how transfers are set up and built: none has succeeded"


def of_transfers(engine: EngineState) -> Iterator[Action]:
    """What mends the exchange of KV blocks between this server and its peers, the most urgent first; each names the
    side to act on.
    """
    s, key = engine.signals, engine.key
    peer = peer_of(engine)
    words = "-iE", "kv|nixl|mooncake|transfer|disagg"
    look = (
        (command("kubectl", "logs", *of_pod(key), "--since=30m", PIPE, "grep", *words),)
        if is_pod(key)
        else on_host(key, "log")
    )
    for name, (title, text) in _OF_TRANSFERS.items():
        if engine.diagnosis.holds(name):
            if name == "transfer_failing" and s.transfers.transfers_failed_ratio == 1:
                title = _NONE_SUCCEEDED
            sentence = capital(engine.diagnosis.evidence[name].text)
            yield Action(title.format(peer=peer), f"{sentence}. {text}", commands=look)


def _fitting(engine: EngineState, failed: str, why: str) -> Action:
    """The limit to lower so that the engine starts, with the numbers of its own log."""
    one, oom = dialect(engine.dialect), engine.signals.oom
    needed = (
        f" {say(oom['needed_bytes'], 'bytes')} of KV cache are needed, {say(oom['available_bytes'], 'bytes')} are"
        " available."
        if {"needed_bytes", "available_bytes"} <= oom.keys()
        else ""
    )
    limit, number = _FITTING[failed]
    value, flag = oom.get(number), one.flag(limit)
    flags = (f"{flag} {value:.0f}",) if value and flag else ()
    return Action(f"Lower {one.called(limit)}", f"{why}{needed} What fits: {say(value)}.", flags)


def _at_run_time(engine: EngineState, why: str) -> Iterator[Action]:
    """What leaves more GPU memory outside the KV pool, and keeps it in one piece."""
    called, oom = dialect(engine.dialect).called, engine.signals.oom
    flag, now = value_and_flag(engine, "gpu_memory_utilization")
    chunk = called("max_num_batched_tokens")
    yield Action(
        f"Lower {called('gpu_memory_utilization') if flag else chunk}",
        f"{why} Allocations need free GPU memory outside the KV pool. {named('Current value', now)}. Look for other"
        f" processes on the GPU first; a lower {chunk} lowers peak activation memory.",
        (flag,) if flag else (),
    )
    asked, free = oom.get("requested_bytes"), oom.get("reserved_unallocated_bytes")
    if asked is None or free is None or free >= asked:
        yield Action(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            f"{named('Reserved by PyTorch but unallocated', say(free, 'bytes'))},"
            f" {named('last tried to allocate', say(asked, 'bytes'))}. Helps if memory is fragmented: GPU memory grew"
            " while requests of varying length ran. On Ascend the variable is PYTORCH_NPU_ALLOC_CONF.",
        )


def _host_memory(engine: EngineState, why: str) -> Action:
    return Action(
        "Give the container or node more memory",
        f"{why} Or lower what the host holds: swap space, KV offloaded to the CPU, cached media. Ray ends a worker when"
        " the node's memory passes RAY_memory_usage_threshold. GPU limits do not help.",
        commands=container_limits(engine, "--limits=memory=<size>"),
    )


def _probes(engine: EngineState) -> Action:
    host = engine.signals.host
    return Action(
        "Give the probes more time: raise timeoutSeconds and failureThreshold",
        "The container restarts, and its metrics time out. The same process answers /health, so probes with the default"
        " timeout of 1 s fail under load, and the kubelet ends the container. Confirm with the pod's events."
        f" {named('Last termination', host.last_termination_reason or UNKNOWN)},"
        f" {named('exit code', say(host.last_exit_code))}.",
        commands=roll_out(engine.key, workload(engine)),
    )
