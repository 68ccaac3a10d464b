"""``build/mitigations.md``, made of the stored results of ``mitigations.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpressure.printable import grouped

Result = dict[str, Any]


def report(results: Sequence[Result], requests: int, clients: int) -> str:
    """The whole page."""
    by_name = {result["name"]: result for result in results}
    base = by_name.get("baseline")
    lines = [
        "# What the mitigations do to the same overload",
        "",
        (
            "Written by `make -C lab measure-mitigations` (`lab/vllm/mitigations.py`): vLLM 0.32.0 on the CPU, a 77"
            " M-parameter random Llama on two cores, 255"
        ),
        (
            f"usable KV blocks of 32 tokens (8 160 tokens). {clients} clients work off one list of {requests} requests,"
            " drawn once from a fixed seed: 85 % with 100 to"
        ),
        (
            "250 tokens in and out, 15 % with 800 to 1 200 in and 400 to 700 out. A fresh server for each line, the"
            " same list, every request waited for."
        ),
        "",
        "## What the engine did",
        "",
        (
            "Scheduling is deterministic here: these numbers are the same in every run but for a request or two."
            ' "Computed again" are tokens of preempted'
        ),
        (
            "requests. *Engine time* is the cost of all steps at one speed of the machine, so that settings can be"
            " compared although the cores had other work."
        ),
        (
            "It is fitted to the first run (`lab/vllm/step_cost.py`). Finished requests and tokens per second are"
            " based on it."
        ),
        "",
        (
            "| setting | preemptions | computed again | steps | mean batch | at most at once | waiting, mean | KV, mean"
            " | engine time | finished/s | output tokens/s | finished | refused |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_counts(result) for result in results]
    lines += [
        "",
        "## What users saw",
        "",
        (
            "As measured by the clients. *Wall time* over engine time shows how busy the two cores were otherwise:"
            " compare only rows where it is about"
        ),
        (
            "equal. Latencies include the queue. The gap between tokens is longest for a request that is preempted and"
            " computed again."
        ),
        "",
        (
            "| setting | wall time | over engine time | first token p50 / p99 | gap between tokens p50 / p99 / longest"
            " | whole request p50 / p99 |"
        ),
        "|---|---|---|---|---|---|",
    ]
    lines += [_times(result) for result in results]
    if base is not None:
        lines += ["", "## What that says about the plan", "", *_findings(by_name, base)]
        plan = base.get("plan")
        if plan:
            values = ", ".join(f"{name} {value:g}" for name, value in plan["set"].items())
            lines += [
                "",
                (
                    f"`kvpressure mitigate` on the baseline under load said: {plan['verdict']} ({plan['stage']}),"
                    f" confidence {plan['confidence']:.2f}; set {values}; prompts up to {plan['caps']['input_tokens']}"
                    f" tokens, answers up to {plan['caps']['output_tokens']}."
                ),
            ]
    return "\n".join(lines) + "\n"


def _setting(result: Result) -> str:
    flags = " ".join(result["flags"])
    return result["title"] + (
        f" (`{flags}`)" if flags and f"`{flags}`" not in result["title"] and result["name"] != "limit-50" else ""
    )


def _counts(result: Result) -> str:
    failed = sum(result["failed"].values())
    cells = [
        f"{result['preemptions']:.0f}",
        grouped(result["recomputed"]),
        grouped(result["steps"]),
        f"{result['decoding_mean']:.1f}",
        f"{result['running_max']:.0f}",
        f"{result['waiting_mean']:.0f}",
        f"{result['kv_mean']:.0%}",
        f"{result['engine_seconds']:.0f} s",
        f"{result['finished'] / result['engine_seconds']:.2f}",
        f"{result['tokens'] / result['engine_seconds']:.0f}",
        str(result["finished"]),
        str(result["refused_at_edge"] + failed),
    ]
    return f"| {_setting(result)} | " + " | ".join(cells) + " |"


def _times(result: Result) -> str:
    seconds = result["seconds"]
    ttft, gaps, e2e = result["ttft"], result["gaps"], result["e2e"]
    cells = [
        f"{seconds:.0f} s",
        f"{seconds / result['engine_seconds']:.2f}",
        f"{ttft['p50']:.1f} s / {ttft['p99']:.1f} s",
        f"{1000 * gaps['p50']:.0f} ms / {1000 * gaps['p99']:.0f} ms / {gaps['max']:.1f} s",
        f"{e2e['p50']:.0f} s / {e2e['p99']:.0f} s",
    ]
    return f"| {_setting(result)} | " + " | ".join(cells) + " |"


def _findings(by_name: dict[str, Result], base: Result) -> list[str]:
    """One paragraph a step of the plan, in its order, for what was measured."""

    def told(name: str) -> str:
        result = by_name[name]
        return (
            f"preemptions {base['preemptions']:.0f} → {result['preemptions']:.0f},"
            f" recomputed tokens {grouped(base['recomputed'])} → {grouped(result['recomputed'])}, engine time"
            f" {_change(result['engine_seconds'], base['engine_seconds'])}, mean queue {base['waiting_mean']:.0f} →"
            f" {result['waiting_mean']:.0f}"
        )

    texts = {
        "caps": (
            "1. **Caps at the edge**",
            (
                "This is the only step that shortens the queue for all others, and it needs no restart. The plan puts"
                " it first."
            ),
        ),
        "limit-50": (
            "2. **`max_num_seqs`, a cut of the limit that was set**",
            "A limit above the running requests has no effect. The plan cuts what runs, not what is set.",
        ),
        "cut-25": ("   25 % below what ran at once", 'The smaller cut of the guide "Emergency Mitigation".'),
        "cut-50": (
            "   50 % below",
            (
                "The guide's larger cut ends most preemptions and their gaps between tokens. The queue stays as"
                " long. The plan sizes the cut by what the KV cache holds."
            ),
        ),
        "cut-75": ("   75 % below (not in the guides)", "The batch is too small, and the KV cache is not used."),
        "batched-512": (
            "3. **`max_num_batched_tokens`**",
            "It does not limit KV cache usage. The plan uses it for the peak of activations.",
        ),
        "pool-70": (
            "4. **`gpu_memory_utilization` down**",
            (
                "A smaller KV pool makes a full cache worse. The plan prints the guide's step and advises it only"
                " when allocations fail on the device."
            ),
        ),
        "watermark": (
            "5. **`--watermark 0.1`** (not in the guides)",
            "Blocks are kept free on admission for running requests.",
        ),
        "pool-150": ("6. **More KV memory** (not in the guides), half as much again", "The queue shrinks."),
        "pool-200": (
            "6. **More KV memory** (not in the guides), twice as much",
            "The one engine setting that helps both queue and preemptions.",
        ),
        "plan": ("**All that the plan said to set, together**", "Without caps at the edge."),
    }
    return [
        f"{title}: {told(name)}. {why}"
        if name != "caps"
        else f"{title}: {told(name)}, for the {by_name[name]['finished']} admitted requests. {why}"
        for name, (title, why) in texts.items()
        if name in by_name
    ]


def _change(value: float, base: float) -> str:
    return f"{(value - base) / base:+.0%}" if round(value / base, 2) != 1 else "as before"
