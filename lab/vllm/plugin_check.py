"""The plugin's stat logger on vLLM's own classes, found as vLLM finds it. Runs inside .vllm, without a server.

Usage: plugin_check.py DIRECTORY (for prometheus_client's files; emptied first). The last line is JSON: [what, whether
it is so, what was found] for each check.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

DIRECTORY = Path(sys.argv[1])
shutil.rmtree(DIRECTORY, ignore_errors=True)
DIRECTORY.mkdir(parents=True)
os.environ |= {"KVPRESSURE_PLUGIN": "0", "PROMETHEUS_MULTIPROC_DIR": str(DIRECTORY)}  # read when it is imported
before = set(sys.modules)

from prometheus_client import CollectorRegistry, multiprocess  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories  # noqa: E402
from vllm.v1.metrics.stats import IterationStats, SchedulerStats  # noqa: E402

STEP_SECONDS = 0.010  # a fast step of a large model
SHARE = 0.001
CALLS = 2000
NINE = ("kvpressure:engine_steps_total", "batch", "9")


def step(batch: int) -> tuple[SchedulerStats, IterationStats]:
    """A decoding step as vLLM reports it."""
    iteration = IterationStats()
    iteration.num_generation_tokens = batch
    iteration.inter_token_latencies_iter = [0.01] * batch
    return SchedulerStats(num_running_reqs=batch, kv_cache_usage=0.4), iteration


def seconds(work, repeat: int = 5) -> float:
    """CPU of this thread for one call of ``work``, the best of some."""

    def once() -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    return min(once() for _ in range(repeat))


def ours() -> list[str]:
    """Threads of the plugin."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvpressure")]


def page() -> dict[tuple[str, ...], float]:
    """The plugin's series as vLLM would serve them, by name and labels."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {
        (sample.name, *(sample.labels.get(label, "") for label in ("count", "size"))): sample.value
        for sample in samples
        if sample.name.startswith("kvpressure:")
    }


def switched_off(factory: type) -> tuple[str, bool, str]:
    """Without KVPRESSURE_PLUGIN=1 it is loaded, because vLLM loads what is installed, and does nothing."""
    load_general_plugins()
    factory(None, 0).record(*step(8))
    found = [*ours(), *(name for name, *_ in page())]
    return "switched off: no thread, no series", not found, ", ".join(found) or "none"


def costs(logger) -> list[tuple[str, bool, str]]:
    """What it costs the process that serves the users, per step and per second."""
    found = []
    for batch in (8, 256):
        one = step(batch)
        spent = seconds(lambda one=one: [logger.record(*one) for _ in range(CALLS)]) / CALLS
        found.append(
            (
                f"a step of {batch} requests costs at most 0.1% of 10 ms",
                spent <= SHARE * STEP_SECONDS,
                f"{spent * 1e6:.1f} microseconds ({spent / STEP_SECONDS:.3%})",
            )
        )
    from kvpressure_vllm.steps import FRONTEND

    spent = seconds(FRONTEND.report, 20)
    found.append(
        ("a report costs at most 0.1% of a second", spent <= SHARE, f"{spent * 1e6:.0f} microseconds ({spent:.3%})")
    )
    return found


def odd(logger) -> tuple[str, bool, str]:
    """Nothing that vLLM could pass gets an exception out of it."""
    scheduler, iteration = step(4)
    strange = [
        None,
        0,
        "x",
        [],
        {},
        object(),
        SimpleNamespace(),
        SimpleNamespace(num_running_reqs=-1, kv_cache_usage=float("nan")),
        SimpleNamespace(num_running_reqs=None, kv_cache_usage=None),
        SchedulerStats(num_running_reqs=10**9, kv_cache_usage=7.0),
    ]
    raised = []
    for one in strange:
        for pair in ((one, iteration), (scheduler, one), (one, one)):
            try:
                logger.record(*pair, None, 0)
                logger.record(*pair, mm_cache_stats=object(), engine_idx=3, something_new=1)
            except Exception as error:
                raised.append(f"{type(error).__name__} from {one!r}")
    return "odd statistics raise nothing", not raised, "; ".join(raised) or f"{len(strange) * 6} calls"


def told(logger) -> tuple[str, bool, str]:
    """The steps are on the page, and the odd ones have not spoilt it."""
    logger.record(*step(9))
    end = time.monotonic() + 10
    while not (shown := page()).get(NINE) and time.monotonic() < end:
        time.sleep(0.1)
    kv_max = shown.get(("kvpressure:engine_kv_max", "", ""), -1.0)
    steps = sum(value for (name, kind, _), value in shown.items() if name == NINE[0] and kind == "batch")
    good = NINE in shown and steps >= 2 * CALLS and 0 < kv_max <= 1
    return "the page tells the steps, odd ones left out", good, f"{steps:.0f} steps, KV maximum {kv_max}"


def main() -> None:
    """All checks."""
    factories = load_stat_logger_plugin_factories()
    factory = next((one for one in factories if one.__name__ == "StepLogger"), None)
    checks: list[tuple[str, bool, str]] = [
        ("vLLM finds the stat logger", factory is not None, ", ".join(f.__name__ for f in factories))
    ]
    if factory is not None:
        imported = {name.split(".")[0] for name in set(sys.modules) - before if name.startswith("kvpressure")}
        heavy = sorted(name for name in sys.modules if name.split(".")[0] == "kvpressure")
        checks.append(
            (
                "it imports nothing of the exporter",
                bool(imported) and not heavy,
                ", ".join(heavy) or "nothing else",
            )
        )
        checks.append(switched_off(factory))
        os.environ["KVPRESSURE_PLUGIN"] = "1"
        logger, again = factory(None, 0), factory(None, 0)
        checks.append(("built twice: one thread", len(ours()) == 1, ", ".join(ours())))
        again.record(*step(8))
        checks += [*costs(logger), odd(logger), told(logger)]
    print(json.dumps(checks))


if __name__ == "__main__":
    main()
